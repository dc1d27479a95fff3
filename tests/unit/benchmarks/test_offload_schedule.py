"""Schedules on the virtual clock: equal to the formulas, valid in every layout."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common.kvpr import paper_split
from benchmarks.offload.schedule import (
    IN,
    BatchTokens,
    Rules,
    Sizes,
    Speeds,
    StepWork,
    TaskKind,
    even_layers,
    plan_step,
    run_clock,
)
from quire.offload.split import OffloadRates, pipelined_seconds, pipelined_split
from quire.plan.rates import CopyRate
from support.offload_formulas import step_seconds

SECONDS = st.floats(0.01, 10)
ONE_BYTE_A_SECOND = CopyRate(bytes_per_s=1.0)


def speeds_of(recompute_s, *, layer_s=0.0):
    return Speeds(
        inward=ONE_BYTE_A_SECOND,
        outward=ONE_BYTE_A_SECOND,
        project_token_s=recompute_s,
        layer_s=layer_s,
    )


def step_of(rates: OffloadRates, x: int, kv: int, layers: int, **more) -> StepWork:
    sizes = Sizes(kv_bytes=rates.kv_s, x_bytes=rates.x_s, **more)
    batch = BatchTokens(rows=1, x=x, kv=kv)
    return StepWork(
        layers=even_layers((batch,), layers, embedded=False),
        sizes=sizes,
        speeds=speeds_of(rates.recompute_s, layer_s=rates.other_s),
    )


def check(timeline):
    """Each lane runs one operation at a time, each after the operations that it needs."""
    for lane in timeline.schedule.lanes:
        free_s = 0.0
        for span in timeline.of(lane):
            assert all(need < span.operation.index for need in span.operation.needs)
            needed_s = max((timeline.spans[n].end_s for n in span.operation.needs), default=0.0)
            assert max(free_s, needed_s) <= span.start_s <= span.end_s
            free_s = span.end_s


def copied_bytes(schedule, *kinds):
    return sum(op.num_bytes for op in schedule.operations if op.kind in kinds)


def seconds_of(work: StepWork, **rules) -> float:
    timeline = run_clock(plan_step(work, Rules(**rules)))
    check(timeline)
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

    loaded = replace(rates, link_s=weights / batches)
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
        (TaskKind.X_IN, 0),
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
    chunks = [op.tokens for op in schedule.operations if op.kind == TaskKind.X_IN]
    assert chunks[:4] == [2, 2, 2, 2]


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
    check(run_clock(schedule))


@given(
    st.lists(
        st.lists(
            st.builds(
                BatchTokens,
                rows=st.integers(1, 3),
                x=st.integers(0, 9),
                kv=st.integers(0, 9),
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
        fine_weights=st.booleans(),
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
        layers=tuple(map(tuple, layers)), sizes=sizes, speeds=speeds_of(0.5, layer_s=0.2)
    )

    schedule = plan_step(work, rules)

    timeline = run_clock(schedule)
    check(timeline)
    all_batches = [batch for batches in layers for batch in batches]
    assert copied_bytes(schedule, TaskKind.KV_IN) == 3 * sum(b.kv for b in all_batches)
    assert copied_bytes(schedule, TaskKind.X_IN) == 2 * sum(b.x for b in all_batches)
    assert copied_bytes(schedule, TaskKind.WEIGHTS_IN) == pytest.approx(
        27 * len(layers), abs=4 * len(layers)
    )


def test_x_ring_costs_no_steady_state_time():
    """With c below the chunks that the ring holds ahead."""
    rates = OffloadRates(kv_s=1.0, x_s=0.5, recompute_s=0.58, other_s=20.0)
    split = pipelined_split(rates, 960)
    short_s, long_s = (
        seconds_of(step_of(rates, split, 960 - split, layers), x_chunks=16, x_ring=3)
        for layers in (10, 30)
    )

    assert (long_s - short_s) / 20 == pytest.approx(pipelined_seconds(rates, 960, split), rel=0.01)
