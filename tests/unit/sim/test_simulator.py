"""The same run every time, nobody lost, times that can be added up by hand."""

import math
from dataclasses import astuple, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.memory.waste import longest_tokens, request_waste, run_contiguous
from quire.config.kv_config import KVConfig
from quire.errors import ConfigError
from quire.kv.memory import KVMemory
from quire.layout.eviction import EvictionSpec
from quire.layout.layout import layout_for
from quire.layout.model import LayerSpec
from quire.scheduler.schedule_config import ScheduleConfig
from quire.sim.metrics import by_tenant, summarise
from quire.sim.models import model_shape
from quire.sim.records import NEVER_FITS, TOO_LONG
from quire.sim.run import SimConfig, make_scheduler, make_simulator, make_timer, simulate
from quire.sim.simulator import Simulator
from quire.sim.stand_ins import TimedCopies, VirtualClock, folded_layout
from quire.sim.timing import StepTimer
from quire.sim.traces.base import Segment, TraceOptions
from quire.sim.traces.loading import load_trace
from support.kv_options import kv_config, kv_options
from unit.sim.test_timing import RATES
from unit.sim.traces import recorded, request, trace

TINY = model_shape("quire-tiny")
CONFIG = SimConfig(model=TINY, rates=RATES, kv=KVConfig(memory="2MiB"))
WINDOWED = replace(TINY, layers=tuple(LayerSpec(window=w) for w in (None, 64, 64, None) * 2))
CROWD = trace(*(request(i, i * 0.0005, 60 + i % 7 * 40, 30 + i % 5 * 20) for i in range(1, 26)))

rows_of_loads = st.lists(
    st.tuples(st.floats(0, 0.1), st.integers(1, 400), st.integers(0, 90), st.sampled_from("abc")),
    min_size=1,
    max_size=12,
)


def outcomes(result):
    return [astuple(record) for record in result.records]


# ---- one request -------------------------------------------------------------------------------


def test_one_request_takes_the_sum_of_its_steps():
    """A prompt of 5 and an answer of 3: one step of 5 tokens, then two of 1."""
    result = simulate(trace(request(1, 0, 5, 3)), CONFIG)
    [record] = result.records
    timer = StepTimer(TINY, RATES)
    steps = [seconds(timer, 5, 0), seconds(timer, 1, 5), seconds(timer, 1, 6)]

    assert result.num_steps == 3
    assert result.processed_tokens == 7
    assert record.first_token_s == pytest.approx(steps[0])
    assert record.finish_s == pytest.approx(sum(steps))
    assert record.tpot_s == pytest.approx((steps[1] + steps[2]) / 2)
    assert record.queue_s == 0.0


def seconds(timer, new, before):
    return timer.seconds(np.array([new]), np.array([before]), 1)


def test_a_request_waits_for_the_step_that_runs_when_it_comes():
    result = simulate(trace(request(1, 0, 100, 2), request(2, 0.0001, 5, 1)), CONFIG)
    first, second = result.records

    assert second.admitted_s == first.first_token_s
    assert second.queue_s == pytest.approx(first.first_token_s - 0.0001)


def test_time_passes_while_nothing_is_there():
    result = simulate(trace(request(1, 0, 5, 1), request(2, 100.0, 5, 1)), CONFIG)

    assert result.records[1].admitted_s == 100.0
    assert result.gauges.time_s == pytest.approx(result.records[1].finish_s)
    assert result.busy_s < 0.1


def test_an_answer_of_no_tokens_counts_as_one():
    [record] = simulate(trace(request(1, 0, 5, 0)), CONFIG).records

    assert record.answer_tokens == 1
    assert record.first_token_s == record.finish_s > 0
    assert math.isnan(record.tpot_s)


# ---- what cannot run ---------------------------------------------------------------------------


def test_answers_end_with_the_context_and_longer_prompts_are_refused():
    longest = TINY.max_positions
    result = simulate(
        trace(request(1, 0, longest - 2, 50), request(2, 0, longest, 1)),
        replace(CONFIG, kv=KVConfig(memory="auto")),
    )
    cut, refused = result.records

    assert (cut.answer_tokens, cut.cut_tokens) == (2, 48)
    assert refused.refused == TOO_LONG
    assert not refused.finished


def test_what_never_fits_is_counted():
    page_bytes = 8 * 2 * 4 * 32 * 16 * 2  # layers, K and V, heads, dim, tokens, bytes
    config = replace(CONFIG, kv=KVConfig(memory=4 * page_bytes))
    result = simulate(trace(request(1, 0, 70, 1), request(2, 0, 30, 5)), config)

    assert [record.refused for record in result.records] == [NEVER_FITS, None]
    assert summarise(result)["refused_never_fits"] == 1


# ---- runs --------------------------------------------------------------------------------------


def test_a_run_is_the_same_every_time():
    first, again = (simulate(CROWD, CONFIG) for _ in range(2))

    assert outcomes(first) == outcomes(again)
    assert summarise(first) == summarise(again)
    assert sum(record.preemptions for record in first.records) > 0


@given(rows=rows_of_loads, memory=st.sampled_from(["auto", 300_000, 1_000_000]))
@settings(max_examples=25)
def test_every_request_is_finished_or_refused(rows, memory):
    load = trace(
        *(
            request(line, at, prompt, answer, tenant=tenant)
            for line, (at, prompt, answer, tenant) in enumerate(sorted(rows), start=1)
        )
    )
    config = replace(CONFIG, kv=KVConfig(memory=memory))
    config = replace(config, schedule=ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=64))

    result = simulate(load, config)

    assert len(result.records) == len(load.requests)
    for record, requested in zip(result.records, load.requests, strict=True):
        assert record.finished == (record.refused is None)
        if record.finished:
            assert record.answer_tokens == max(1, requested.answer.tokens)
            assert (
                requested.arrival_s <= record.admitted_s < record.first_token_s <= record.finish_s
            )
    numbers = summarise(result)
    assert numbers["recomputed_tokens"] >= 0
    if not numbers["preemptions"]:
        assert numbers["recomputed_tokens"] == 0
    assert 0 <= numbers["kv_mean_share"] <= numbers["kv_peak_share"] <= 1
    assert 0 <= numbers["waste_fraction"] < 1


def test_a_memory_that_never_runs_full_preempts_nobody():
    result = simulate(CROWD, replace(CONFIG, kv=KVConfig(memory="auto")))
    numbers = summarise(result)

    assert numbers["preemptions"] == numbers["recomputed_tokens"] == 0
    assert numbers["kv_peak_share"] <= 1


def test_one_table_for_all_layers_makes_the_same_decisions():
    """The reference keeps a table entry for every layer, as the engine does."""
    layout = layout_for(TINY, codec="bfloat16", page_tokens=16)
    folded = folded_layout(TINY, codec="bfloat16", page_tokens=16)
    total_bytes = 40 * folded.smallest_sequence_bytes
    config = replace(CONFIG, schedule=ScheduleConfig(max_num_seqs=16))
    results = []
    for of in (layout, folded):
        clock = VirtualClock()
        copies = TimedCopies(1e9)
        scheduler = make_scheduler(KVMemory(of, total_bytes, 16), config, clock, copies)
        simulator = Simulator(CROWD, scheduler, make_timer(config), clock, copies)
        results.append(simulator.run())

    assert results[0].memory_bytes == results[1].memory_bytes
    assert outcomes(results[0]) == outcomes(results[1])
    assert summarise(results[0]) == summarise(results[1])
    assert summarise(results[0])["preemptions"] > 0


@pytest.mark.parametrize("evicting", [False, True])
@pytest.mark.parametrize("codec", ["bfloat16", "int8", "int4_outliers+sinks=1+plain=bfloat16"])
@pytest.mark.parametrize("model", [TINY, WINDOWED], ids=["full", "windows"])
def test_folded_lanes_hold_the_bytes_of_all_layers(model, codec, evicting):
    """Pages of 3 tokens are no whole cache lines: each layer has padding, and positions."""
    whole, folded = (
        make(model, codec=codec, page_tokens=3, evicting=evicting)
        for make in (layout_for, folded_layout)
    )

    for one, all_layers in zip(folded.groups, whole.groups, strict=True):
        assert one.bytes_at_most(100, 7) == all_layers.bytes_at_most(100, 7)
        one_class, layer_class = one.page_class, all_layers.page_class
        assert one_class.slot_bytes == len(all_layers.layers) * layer_class.slot_bytes
    assert folded.smallest_sequence_bytes == whole.smallest_sequence_bytes
    assert [group.num_lanes for group in folded.groups] == [1] * len(whole.groups)


def test_windows_and_eviction_are_simulated():
    """A cap of 64 tokens in 4 of 8 layers, windows of 64 in the others: KV stays small."""
    load = trace(*(request(i, 0, 500, 40) for i in range(1, 5)))
    config = replace(
        CONFIG, model=WINDOWED, eviction=EvictionSpec(cap=64, every=16), kv=KVConfig(memory="auto")
    )

    capped = summarise(simulate(load, config))
    whole = summarise(simulate(load, replace(config, model=TINY, eviction=EvictionSpec())))

    assert capped["finished"] == whole["finished"] == 4
    assert capped["kv_peak_bytes"] < whole["kv_peak_bytes"] / 2


@pytest.mark.parametrize("mode", ["swap", "hybrid", "auto", "recompute"])
def test_preemption_by_swapping_loses_nothing_and_takes_its_time(mode):
    schedule = ScheduleConfig(preempt=mode)
    kv = replace(CONFIG.kv, swap_space="0" if mode == "recompute" else "64MiB")
    simulator = make_simulator(CROWD, replace(CONFIG, kv=kv, schedule=schedule))
    result = simulator.run()
    numbers = summarise(result)

    assert numbers["preemptions"] > 0
    assert numbers["swaps_in"] == numbers["swaps_out"]
    if mode == "swap":
        assert numbers["swaps_out"] == numbers["preemptions"]
        assert numbers["recomputed_tokens"] == numbers["lost_tokens"] == 0
    if mode == "recompute":
        assert numbers["swaps_out"] == 0
    copied_s = numbers["swapped_bytes"] / RATES.copy_bytes_per_s
    assert simulator.copies() == pytest.approx(copied_s)


@pytest.mark.parametrize(
    ("kv", "schedule", "says"),
    [
        (
            {"offload_memory": "1GiB"},
            {},
            "--kv-offload-memory: a simulation has no KV offload",
        ),
        (
            {"offload_recompute": "0.5"},
            {},
            "--kv-offload-recompute: a simulation has no KV offload",
        ),
        ({"disk_memory": "1GiB", "disk_path": "x"}, {}, "--disk-kv-memory: a simulation has"),
        ({"remote": "a:1"}, {}, "--remote-kv: a simulation has no prefixes on disk"),
        ({"swap_space": "1MiB"}, {"preempt": "recompute"}, "--preempt recompute swaps no requests"),
        ({}, {"objective": "throughput"}, "all weights are on the device"),
    ],
)
def test_options_that_a_simulation_knows_nothing_of_are_refused(kv, schedule, says):
    config = replace(
        CONFIG, kv=replace(CONFIG.kv, **kv_options(kv)), schedule=ScheduleConfig(**schedule)
    )

    with pytest.raises(ConfigError, match=says):
        make_simulator(CROWD, config)


# ---- waste -------------------------------------------------------------------------------------


def test_waste_is_weighted_by_time():
    """One sequence in pages of 16 while it grows from 10 to 12 tokens: 6, 5 and 4 of 16 empty."""
    simulator = make_simulator(trace(request(1, 0, 10, 3)), CONFIG)
    result = simulator.run()
    timer = simulator.timer
    times = [seconds(timer, 10, 0), seconds(timer, 1, 10), seconds(timer, 1, 11)]

    expected = sum(t * n for t, n in zip(times, (6, 5, 4), strict=True)) / (16 * sum(times))
    assert result.gauges.waste_fraction == pytest.approx(expected)


def test_contiguous_pieces_waste_what_sequences_do_not_fill():
    """Pieces of 400 slots for sequences that end with 99: 301 of 400 are empty at the end."""
    load = trace(*(request(i, 0, 90, 10) for i in range(1, 6)), request(6, 0, 500, 10))

    run = run_contiguous(load, CONFIG, 400)

    assert (run.max_tokens, run.num_dropped) == (400, 1)
    assert run.request_waste_fraction == pytest.approx(301 / 400)
    assert 301 / 400 < run.waste_fraction < 310 / 400  # while they grow, more is empty
    assert run.result.memory_bytes == simulate(load, CONFIG).memory_bytes
    assert longest_tokens(load) == 510


@pytest.mark.parametrize("store", ["paged", "contiguous_max", "contiguous_growing"])
def test_every_store_can_be_simulated(store):
    kv = kv_config(memory="auto", store=store, store_tokens=600, enable_prefix_caching=False)
    numbers = summarise(simulate(CROWD, replace(CONFIG, kv=kv)))

    assert numbers["finished"] == len(CROWD.requests)
    assert numbers["preemptions"] == 0


def test_nothing_is_served_where_everything_is_too_long():
    run = run_contiguous(trace(request(1, 0, 90, 10)), CONFIG, 50)

    assert (run.num_dropped, run.result, run.waste_fraction) == (1, None, 0.0)


def test_waste_of_requests_counts_whole_pages():
    result = simulate(trace(request(1, 0, 10, 3), request(2, 0, 16, 1)), CONFIG)

    assert request_waste(result, 16) == pytest.approx(1 - (12 + 16) / 32)


# ---- shared prefixes ---------------------------------------------------------------------------

TALKS = trace(
    *(request(i, i * 0.05, 9, 20, shared=[(i % 3, 64), (10 + i % 6, 32)]) for i in range(1, 19))
)


def test_a_memory_that_never_runs_full_hits_all_that_can_be_reused():
    numbers = summarise(simulate(TALKS, replace(CONFIG, kv=KVConfig(memory="auto"))))

    assert 0.7 < numbers["prefix_hit_fraction"] < 1
    assert numbers["prefix_hit_fraction"] == numbers["reusable_token_fraction"]
    assert numbers["recomputed_tokens"] == 0


def test_without_the_cache_nothing_is_found():
    kv = kv_config(memory="auto", enable_prefix_caching=False)
    numbers = summarise(simulate(TALKS, replace(CONFIG, kv=kv)))

    assert numbers["cached_tokens"] == 0
    assert numbers["reusable_token_fraction"] > 0.7


def test_tenants_do_not_find_each_others_prefixes():
    apart = replace(
        TALKS,
        requests=tuple(replace(r, tenant=f"t{r.line}") for r in TALKS.requests),
    )
    numbers = summarise(simulate(apart, replace(CONFIG, kv=KVConfig(memory="auto"))))

    assert numbers["cached_tokens"] == 0


def test_a_conversation_finds_its_own_answers():
    """The second prompt is the first one, its answer, and 16 tokens: 64 + 32 are there, but the
    answer's last token was never processed, so its page is not whole."""
    first = request(1, 0, 0, 32, shared=[(1, 64)])
    first = replace(first, answer=Segment(2, 32))
    second = request(2, 10, 16, 1, shared=[(1, 64), (2, 32)])

    [_, record] = simulate(trace(first, second), CONFIG).records

    assert record.cached_tokens == 64 + 16


# ---- tenants -----------------------------------------------------------------------------------


def test_tenants_are_told_apart():
    load = trace(*(request(i, 0, 40, 10, tenant="a" if i % 3 else "b") for i in range(1, 31)))
    result = simulate(load, replace(CONFIG, schedule=ScheduleConfig(max_num_seqs=2)))
    found = by_tenant(result)

    assert (found["a"]["finished"], found["b"]["finished"]) == (20, 10)
    # one sends twice as much as the other, and gets no more of it while both wait
    assert summarise(result)["jain_index"] >= 0.98


# ---- recorded traces ---------------------------------------------------------------------------


def test_recorded_blocks_are_found_as_often_as_they_can_be():
    loaded = load_trace(
        recorded("mooncake_conversation_trace.jsonl"),
        TraceOptions(requests=120, length_scale=0.125),
    )
    kv = KVConfig(memory="auto", page_tokens=64)
    numbers = summarise(simulate(loaded, replace(CONFIG, kv=kv, model=model_shape("llama-3.1-8b"))))

    assert numbers["reusable_token_fraction"] > 0.03
    assert numbers["prefix_hit_fraction"] == pytest.approx(
        numbers["reusable_token_fraction"], abs=0.001
    )


def test_paged_waste_on_recorded_conversations_is_small():
    loaded = load_trace(recorded("AzureLLMInferenceTrace_conv.csv"), TraceOptions(requests=150))
    config = replace(CONFIG, model=model_shape("llama-3.1-8b"), kv=KVConfig(memory="8GiB"))

    numbers = summarise(simulate(loaded, config))

    assert numbers["finished"] == 150
    assert 0 < numbers["waste_fraction"] <= 0.02
