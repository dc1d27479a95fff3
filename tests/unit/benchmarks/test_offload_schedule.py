"""Schedules on the virtual clock: equal to the formulas, valid in every layout."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common.kvpr import paper_split
from benchmarks.offload.schedule import (
    DEVICE,
    HOST,
    IN,
    OUT,
    BatchTokens,
    Operation,
    Rules,
    Schedule,
    ScheduleClock,
    Sizes,
    Speeds,
    StepWork,
    TaskKind,
    combine_devices,
    even_layers,
    plan_step,
    staging_bytes,
)
from quire.errors import ConfigError, InvariantError
from quire.offload.split import OffloadRates, host_split, pipelined_seconds, pipelined_split
from quire.plan.rates import CopyRate
from support.offload_formulas import serial_seconds, step_seconds
from support.offload_timelines import (
    busy_fraction,
    busy_s,
    copied_bytes,
    overlap,
    seconds_by_kind,
)

SECONDS = st.floats(0.01, 10)
ONE_BYTE_A_SECOND = CopyRate(bytes_per_s=1.0)


def speeds_of(recompute_s, *, layer_s=0.0, host_s=0.0):
    return Speeds(
        inward=ONE_BYTE_A_SECOND,
        outward=ONE_BYTE_A_SECOND,
        project_token_s=recompute_s,
        layer_s=layer_s,
        host_token_s=host_s,
    )


def step_of(rates: OffloadRates, x: int, kv: int, layers: int, **more) -> StepWork:
    sizes = Sizes(kv_bytes=rates.kv_s, x_bytes=rates.x_s, **more)
    batch = BatchTokens(rows=1, x=x, kv=kv)
    return StepWork(
        layers=even_layers((batch,), layers, embedded=False),
        sizes=sizes,
        speeds=speeds_of(rates.recompute_s, layer_s=rates.other_s),
    )


def seconds_of(work: StepWork, **rules) -> float:
    timeline = ScheduleClock().run(plan_step(work, Rules(**rules)))
    timeline.check()
    return timeline.seconds


RATES = st.builds(
    OffloadRates,
    kv_s=SECONDS,
    x_s=SECONDS,
    recompute_s=SECONDS,
    other_s=st.just(0.0) | st.floats(0, 300),
)


@given(RATES, st.integers(0, 30), st.integers(0, 30), st.integers(1, 9), st.integers(2, 4))
def test_step_time_matches_the_formula(rates, x, kv, layers, slots):
    work = step_of(rates, x, kv, layers)

    found_s = seconds_of(work, slots=slots, x_chunks=1)

    assert found_s == pytest.approx(step_seconds(rates, x + kv, x, layers), rel=1e-9)


@given(RATES, st.integers(0, 9), st.integers(0, 30), st.integers(1, 9), st.sampled_from([2, 3, 5]))
def test_chunked_step_time_matches_the_formula(rates, x, kv, layers, chunks):
    x *= chunks  # equal chunks

    found_s = seconds_of(step_of(rates, x, kv, layers), x_chunks=chunks)

    assert found_s == pytest.approx(step_seconds(rates, x + kv, x, layers, chunks), rel=1e-9)


@given(RATES, st.integers(0, 40), st.integers(1, 6))
def test_planned_split_is_never_slower_than_transferring_all_kv(rates, tokens, layers):
    """Exact in the steady state; the first layer can add its X, which does not overlap."""
    split = pipelined_split(rates, tokens)

    chosen_s = seconds_of(step_of(rates, split, tokens - split, layers), x_chunks=1)
    whole_s = seconds_of(step_of(rates, 0, tokens, layers), x_chunks=1)

    bubble_s = step_seconds(rates, tokens, split, 1) - rates.kv_s * tokens - rates.other_s
    steady_s = pipelined_seconds(rates, tokens, split) - pipelined_seconds(rates, tokens, 0)
    assert chosen_s <= whole_s + max(0.0, bubble_s) + 1e-9
    assert chosen_s - whole_s == pytest.approx(bubble_s + (layers - 1) * steady_s, abs=1e-6)


@given(RATES, st.integers(0, 20), st.integers(0, 20), st.integers(1, 5))
def test_serial_recompute_and_transfer_do_not_overlap(rates, x, kv, layers):
    found_s = seconds_of(step_of(rates, x, kv, layers), serial=True, x_chunks=1)

    assert found_s == pytest.approx(layers * serial_seconds(rates, x + kv, x), rel=1e-9)


@given(RATES, st.integers(0, 30), st.integers(1, 5))
def test_times_add_without_prefetch(rates, kv, layers):
    found_s = seconds_of(step_of(rates, 0, kv, layers), prefetch=False)

    assert found_s == pytest.approx(layers * (rates.kv_s * kv + rates.other_s), rel=1e-9)


def test_paper_split_has_the_papers_runtime():
    """OPT-13B on an A100: rho = 0.58, xi = 0.5; gains of 1.46 and, pipelined, 1.86."""
    rates = OffloadRates(kv_s=1.0, x_s=0.5, recompute_s=0.58)
    times = {
        name: seconds_of(step_of(rates, x, 1000 - x, 400))
        for name, x in (
            ("prefetch", 0),
            ("paper", paper_split(rates, 1000)),
            ("pipelined", pipelined_split(rates, 1000)),
        )
    }

    assert times["prefetch"] / times["paper"] == pytest.approx(1.46, abs=0.01)
    assert 1 - times["paper"] / times["prefetch"] == pytest.approx(0.316, abs=0.003)
    assert times["prefetch"] / times["pipelined"] == pytest.approx(1.86, abs=0.01)


@given(RATES, st.integers(1, 30), st.integers(1, 30), st.floats(1, 99), st.integers(1, 4))
def test_several_batches_match_the_formula(rates, x, kv, weights, batches):
    """Columns: after the first layer, a layer takes max(W + n transfers, n recomputes)."""
    sizes = {
        "kv_weight_bytes": weights / 4,
        "qo_weight_bytes": weights / 4,
        "mlp_weight_bytes": weights / 2,
    }

    def whole_s(layers):
        work = step_of(rates, x, kv, layers, **sizes)
        batch = work.layers[0][0]
        work = StepWork(
            layers=even_layers((batch,) * batches, layers, embedded=False),
            sizes=work.sizes,
            speeds=work.speeds,
        )
        return seconds_of(work)

    loaded = rates.with_weights(weights, batches)
    layer_s = batches * pipelined_seconds(loaded, x + kv, x)
    assert (whole_s(24) - whole_s(12)) / 12 == pytest.approx(layer_s, rel=1e-9)


@given(RATES, st.integers(1, 30), st.integers(0, 30), st.floats(1, 99))
def test_fine_weights_are_never_slower(rates, x, kv, weights):
    sizes = {
        "kv_weight_bytes": weights / 6,
        "qo_weight_bytes": weights / 6,
        "mlp_weight_bytes": weights * 2 / 3,
    }
    fine_s, coarse_s = (
        seconds_of(step_of(rates, x, kv, 3, **sizes), fine_weights=fine, prefetch=False)
        for fine in (True, False)
    )

    assert fine_s <= coarse_s * (1 + 1e-12)


@given(st.floats(1, 4), SECONDS, SECONDS, st.integers(1, 60), st.integers(2, 6))
def test_cpu_attention_adds_its_rate(xi, kv_s, host_s, tokens, layers):
    rates = OffloadRates(kv_s=kv_s, x_s=xi * kv_s, recompute_s=1.0, host_s=host_s)
    host = host_split(rates, tokens)
    work = StepWork(
        layers=even_layers((BatchTokens(rows=1, kv=tokens - host, host=host),), layers),
        sizes=Sizes(kv_bytes=rates.kv_s, x_bytes=rates.x_s),
        speeds=speeds_of(1.0, host_s=host_s),
    )

    found_s = seconds_of(work) / layers

    assert found_s == pytest.approx(max(kv_s * (tokens - host), host_s * host), rel=1e-9)
    assert found_s <= tokens / (1 / kv_s + 1 / host_s) + max(kv_s, host_s)


def test_several_devices_share_one_host():
    """CPU attention of all devices runs in turn; links and devices run in parallel."""
    rates = OffloadRates(kv_s=1.0, x_s=0.5, recompute_s=0.5)
    offloaded = StepWork(
        layers=even_layers((BatchTokens(rows=1, host=10),), 5),
        sizes=Sizes(kv_bytes=1, x_bytes=1),
        speeds=speeds_of(1.0, host_s=0.3),
    )
    transferred = plan_step(step_of(rates, 6, 4, 5))

    alone_s, together_s = (
        ScheduleClock().run(combine_devices([plan_step(offloaded)] * n)).seconds for n in (1, 8)
    )
    one, eight = (ScheduleClock().run(combine_devices([transferred] * n)) for n in (1, 8))

    assert together_s == pytest.approx(8 * alone_s)
    assert eight.seconds == one.seconds
    eight.check()
    assert eight.schedule.resource("3/in") == "3/in"
    hosted_8 = combine_devices([plan_step(offloaded)] * 8)
    assert {hosted_8.resource(f"{i}/host") for i in range(8)} == {HOST}


def test_half_duplex_directions_run_in_turn():
    rates = OffloadRates(kv_s=1.0, x_s=0.5, recompute_s=0.01)
    work = step_of(rates, 0, 10, 50, new_kv_bytes=2.0, new_x_bytes=1.0)

    full, half = (
        ScheduleClock().run(plan_step(work, Rules(half_duplex=half))) for half in (False, True)
    )

    assert full.seconds == pytest.approx(50 * 10 + 3)
    assert half.seconds == pytest.approx(50 * 13)
    spans = sorted((s.start_s, s.end_s) for s in half.spans if s.operation.lane in (IN, OUT))
    assert all(a[1] <= b[0] for a, b in pairwise(spans))


def test_copies_have_the_link_order():
    sizes = {"kv_weight_bytes": 1, "qo_weight_bytes": 1, "mlp_weight_bytes": 1}
    rates = OffloadRates(kv_s=1.0, x_s=0.5, recompute_s=0.01)
    work = step_of(rates, 4, 6, 2, **sizes)

    def link_order(**rules):
        operations = plan_step(work, Rules(x_chunks=2, **rules)).lanes[IN]
        return [(op.kind, op.part) for op in operations if op.layer == 0]

    assert link_order() == [
        (TaskKind.WEIGHTS_IN, 0),
        (TaskKind.X_IN, 0),
        (TaskKind.X_IN, 1),
        (TaskKind.KV_IN, 0),
        (TaskKind.WEIGHTS_IN, 1),
        (TaskKind.WEIGHTS_IN, 2),
    ]
    assert link_order(fine_weights=False)[:3] == [
        (TaskKind.WEIGHTS_IN, 0),
        (TaskKind.WEIGHTS_IN, 1),
        (TaskKind.X_IN, 0),
    ]


def test_first_layer_loads_no_activations():
    batch = BatchTokens(rows=1, x=8, kv=2)
    work = StepWork(
        layers=even_layers((batch,), 3),
        sizes=Sizes(kv_bytes=1, x_bytes=1),
        speeds=speeds_of(1.0),
    )
    schedule = plan_step(work)

    transferred = [op.layer for op in schedule.operations if op.kind == TaskKind.X_IN]
    assert set(transferred) == {1, 2}
    assert next(op.tokens for op in schedule.operations if op.kind == TaskKind.PROJECT) == 8
    chunks = [(op.first, op.tokens) for op in schedule.operations if op.kind == TaskKind.X_IN]
    assert chunks[:4] == [(0, 2), (2, 2), (4, 2), (6, 2)]


def test_hidden_states_are_copied_out_and_in_between_batches():
    work = StepWork(
        layers=even_layers((BatchTokens(rows=3, kv=5),) * 3, 4),
        sizes=Sizes(kv_bytes=1, x_bytes=1, hidden_bytes=2, new_kv_bytes=1),
        speeds=speeds_of(1.0, layer_s=1.0),
    )
    schedule = plan_step(work)

    assert copied_bytes(schedule, TaskKind.HIDDEN_IN) == 3 * 3 * 6  # not for the first layer
    assert copied_bytes(schedule, TaskKind.HIDDEN_OUT) == 3 * 3 * 6  # not for the last layer
    assert copied_bytes(schedule, TaskKind.KV_OUT) == 4 * 9
    ScheduleClock().run(schedule).check()


@given(
    st.lists(
        st.lists(
            st.builds(
                BatchTokens,
                rows=st.integers(1, 3),
                x=st.integers(0, 9),
                kv=st.integers(0, 9),
                resident=st.integers(0, 9),
                host=st.integers(0, 9),
            ),
            min_size=2,
            max_size=2,
        ),
        min_size=1,
        max_size=5,
    ),
    st.builds(
        Rules,
        slots=st.integers(1, 4),
        x_chunks=st.integers(1, 5),
        x_ring=st.integers(0, 3),
        prefetch=st.booleans(),
        serial=st.just(False),
        fine_weights=st.booleans(),
        half_duplex=st.booleans(),
    ),
)
def test_every_layout_is_valid_and_complete(layers, rules):
    sizes = Sizes(
        kv_bytes=3,
        x_bytes=2,
        new_kv_bytes=3,
        new_x_bytes=2,
        hidden_bytes=1,
        kv_weight_bytes=7,
        qo_weight_bytes=7,
        mlp_weight_bytes=13,
    )
    work = StepWork(
        layers=tuple(map(tuple, layers)), sizes=sizes, speeds=speeds_of(0.5, layer_s=0.2, host_s=1)
    )

    schedule = plan_step(work, rules)

    schedule.check()
    timeline = ScheduleClock().run(schedule)
    timeline.check()
    all_batches = [batch for batches in layers for batch in batches]
    assert copied_bytes(schedule, TaskKind.KV_IN) == 3 * sum(b.kv for b in all_batches)
    assert copied_bytes(schedule, TaskKind.X_IN) == 2 * sum(b.x for b in all_batches)
    assert copied_bytes(schedule, TaskKind.WEIGHTS_IN) == pytest.approx(
        27 * len(layers), abs=4 * len(layers)
    )
    _slots_are_overwritten_after_their_use(schedule, timeline, rules.x_ring)


def _slots_are_overwritten_after_their_use(schedule, timeline, ring):
    """An operation fills a slot after its last reader: X after projection, KV after attention."""
    readers = {
        TaskKind.X_IN: TaskKind.PROJECT,
        TaskKind.KV_IN: TaskKind.ATTEND,
        TaskKind.WEIGHTS_IN: TaskKind.LAYER,
    }
    weight_slots = max(2, 1 + max(op.slot for op in schedule.operations))
    for op in schedule.operations:
        for other in schedule.operations if op.kind in readers else ():
            before = (other.layer, other.batch) < (op.layer, op.batch)
            if op.kind == TaskKind.WEIGHTS_IN:
                same = other.layer < op.layer and other.layer % weight_slots == op.slot
            elif op.kind == TaskKind.KV_IN:
                same = before and other.slot == op.slot
            else:
                same = (other.index < op.index if ring else before) and other.x_slot == op.x_slot
            if same and other.kind == readers[op.kind]:
                assert timeline.spans[other.index].end_s <= timeline.spans[op.index].start_s


def test_x_ring_costs_no_steady_state_time_and_little_staging():
    """With c below the chunks that the ring holds ahead; staging is 4 % above KV alone."""
    rates = OffloadRates(kv_s=1.0, x_s=0.5, recompute_s=0.58, other_s=20.0)
    split = pipelined_split(rates, 960)
    work = [step_of(rates, split, 960 - split, layers) for layers in (10, 30)]
    rules = Rules(x_chunks=16, x_ring=3)

    short_s, long_s = (ScheduleClock().run(plan_step(w, rules)).seconds for w in work)

    layer_s = (long_s - short_s) / 20
    assert layer_s == pytest.approx(pipelined_seconds(rates, 960, split), rel=0.01)
    alone = staging_bytes(step_of(rates, 0, 960, 3), Rules())
    assert staging_bytes(work[0], rules) / alone == pytest.approx(1.04, abs=0.005)
    assert staging_bytes(work[0], Rules()) / alone > 1.4


def test_busy_times_and_overlap_are_computed():
    rates = OffloadRates(kv_s=1.0, x_s=0.5, recompute_s=0.5, other_s=1.0)
    timeline = ScheduleClock().run(plan_step(step_of(rates, 0, 10, 4)))

    assert busy_s(timeline, IN) == 40
    assert busy_s(timeline, DEVICE) == 4
    assert busy_fraction(timeline) == pytest.approx(4 / 41)
    assert timeline.stalls() == {TaskKind.KV_IN: 37}
    assert overlap(timeline) == pytest.approx(3 / 4)
    assert seconds_by_kind(timeline)[TaskKind.KV_IN] == 40


def test_invalid_values_raise():
    with pytest.raises(ConfigError, match="slots and chunks"):
        Rules(slots=0)
    with pytest.raises(ConfigError, match="no x_ring with serial"):
        Rules(x_ring=2, serial=True)
    with pytest.raises(ConfigError, match="x_on_device within x"):
        BatchTokens(rows=1, x=1, x_on_device=2)
    with pytest.raises(ConfigError, match="same number of batches"):
        StepWork(
            layers=((BatchTokens(rows=1),), ()),
            sizes=Sizes(kv_bytes=1, x_bytes=1),
            speeds=speeds_of(1.0),
        )
    with pytest.raises(InvariantError, match="needs"):
        Schedule((Operation(index=0, kind=TaskKind.KV_IN, lane=IN, layer=0, needs=(0,)),)).check()
