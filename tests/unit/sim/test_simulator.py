"""The simulator: complete, deterministic runs, times of steps by their parts, deadlines."""

import math
import random
from dataclasses import astuple, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.memory.simulated import request_waste
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import ConfigError, UnknownName
from quire.kv.memory import KVMemory
from quire.layout.eviction import PREFILL_END, EvictionSpec
from quire.layout.layout import layout_for
from quire.layout.model import HeadShape, LayerSpec, StateSpec
from quire.layout.statistics import AttentionMax, ScoringPass
from quire.plan.roofline import RowTokens, step_parts
from quire.scheduler.peaks import Need
from quire.scheduler.schedule_config import ScheduleConfig
from quire.sim.engine import SimulatedEngine, StepTimer, TimedCopies, VirtualClock, folded_layout
from quire.sim.machine import MachineConfig
from quire.sim.metrics import by_tenant, summarise
from quire.sim.models import CONFIGS, model_shape
from quire.sim.records import NEVER_FITS, TOO_LONG
from quire.sim.run import SimConfig, Simulator, make_scheduler, make_simulator, make_timer, simulate
from quire.sim.traces.base import TraceOptions, TraceSegment
from quire.sim.traces.loading import load_trace
from support.engines import load
from support.kv_options import kv_config, kv_options
from support.model_specs import CACHE_KINDS
from support.pairwise import every_pair
from support.sim_traces import RATES, recorded, request, trace

TINY = model_shape("quire-tiny")
CONFIG = SimConfig(model=TINY, rates=RATES, kv=KVConfig(memory="2MiB"))
AMPLE = replace(CONFIG, kv=KVConfig(memory="auto"))
WINDOWED = replace(TINY, layers=tuple(LayerSpec(window=w) for w in (None, 64, 64, None) * 2))
WIDE = HeadShape(query_heads=4, kv_heads=2, key_dim=64, value_dim=32)
KINDS = replace(
    TINY,
    layers=(
        *(LayerSpec(chunk=48), LayerSpec(window=64), LayerSpec(chunk=48), LayerSpec()),
        *(LayerSpec(heads=WIDE), LayerSpec(source=3), LayerSpec(window=64, source=1), LayerSpec()),
    ),
)
RECURRENT = LayerSpec(attends=False, state=StateSpec(conv=(16, 4), recurrent=(2, 8, 8)))
HYBRID = replace(TINY, layers=(RECURRENT, LayerSpec()) * 4)
OVERLOAD = trace(*(request(i, i * 0.0005, 60 + i % 7 * 40, 30 + i % 5 * 20) for i in range(1, 26)))

rows_of_loads = st.lists(
    st.tuples(st.floats(0, 0.1), st.integers(1, 400), st.integers(0, 90), st.sampled_from("abc")),
    min_size=1,
    max_size=12,
)


def outcomes(result):
    return [astuple(record) for record in result.records]


def seconds(timer, new, before):
    return timer.seconds(np.array([new]), np.array([before]), 1)


def test_request_time_is_the_sum_of_its_steps():
    """A prompt of 5 and an output of 3: one step of 5 tokens, then two of 1."""
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


def test_request_waits_for_the_running_step_and_has_one_token_or_more():
    result = simulate(trace(request(1, 0, 100, 2), request(2, 0.0001, 5, 1)), CONFIG)
    first, second = result.records

    assert second.admitted_s == first.first_token_s
    assert second.queue_s == pytest.approx(first.first_token_s - 0.0001)
    # time advances while idle
    result = simulate(trace(request(1, 0, 5, 1), request(2, 100.0, 5, 1)), CONFIG)

    assert result.records[1].admitted_s == 100.0
    assert result.gauges.time_s == pytest.approx(result.records[1].finish_s)
    assert result.busy_s < 0.1

    [record] = simulate(trace(request(1, 0, 5, 0)), CONFIG).records
    assert record.answer_tokens == 1
    assert record.first_token_s == record.finish_s > 0
    assert math.isnan(record.tpot_s)


def test_outputs_are_truncated_or_refused_and_runs_deterministic():
    longest = TINY.max_positions
    load = trace(request(1, 0, longest - 2, 50), request(2, 0, longest, 1))
    cut, refused = simulate(load, AMPLE).records

    assert (cut.answer_tokens, cut.cut_tokens) == (2, 48)
    assert refused.refused == TOO_LONG
    assert not refused.finished
    page_bytes = 8 * 2 * 4 * 32 * 16 * 2  # layers, K and V, heads, dim, tokens, bytes
    config = replace(CONFIG, kv=KVConfig(memory=4 * page_bytes))
    result = simulate(trace(request(1, 0, 70, 1), request(2, 0, 30, 5)), config)

    assert [record.refused for record in result.records] == [NEVER_FITS, None]
    assert summarise(result)["refused_never_fits"] == 1

    first, second = (simulate(OVERLOAD, CONFIG) for _ in range(2))

    assert outcomes(first) == outcomes(second)
    assert summarise(first) == summarise(second)
    assert sum(record.preemptions for record in first.records) > 0
    ample = summarise(simulate(OVERLOAD, AMPLE))
    assert ample["preemptions"] == ample["recomputed_tokens"] == 0
    assert ample["kv_peak_share"] <= 1


@given(rows=rows_of_loads, memory=st.sampled_from(["auto", 300_000, 1_000_000]))
@settings(max_examples=25)
def test_every_request_is_finished_or_refused(rows, memory):
    lines = enumerate(sorted(rows), start=1)
    load = trace(*(request(line, *row[:3], tenant=row[3]) for line, row in lines))
    schedule = ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=64)
    config = replace(CONFIG, kv=KVConfig(memory=memory), schedule=schedule)

    result = simulate(load, config)

    assert len(result.records) == len(load.requests)
    for record, expected in zip(result.records, load.requests, strict=True):
        assert record.finished == (record.refused is None)
        if record.finished:
            assert record.answer_tokens == max(1, expected.answer.tokens)
            assert expected.arrival_s <= record.admitted_s < record.first_token_s <= record.finish_s
    summary = summarise(result)
    assert summary["recomputed_tokens"] >= 0
    if not summary["preemptions"]:
        assert summary["recomputed_tokens"] == 0
    assert 0 <= summary["kv_mean_share"] <= summary["kv_peak_share"] <= 1
    assert 0 <= summary["waste_fraction"] < 1


@pytest.mark.parametrize(("model", "sequences"), [(TINY, 40), (KINDS, 400)])
def test_folded_layout_gives_the_same_schedule(model, sequences):
    """The reference has a table entry for every layer, as the engine does.

    Pages of several sizes lose other bytes of slabs, so the second memory is ample.
    """
    layout = layout_for(model, codec="bfloat16", page_tokens=16)
    folded = folded_layout(model, codec="bfloat16", page_tokens=16)
    total_bytes = sequences * folded.smallest_sequence_bytes
    config = replace(CONFIG, model=model, schedule=ScheduleConfig(max_num_seqs=16))
    results = []
    for tested in (layout, folded):
        clock = VirtualClock()
        copies = TimedCopies(1e9)
        scheduler = make_scheduler(KVMemory(tested, total_bytes, 16), config, clock, copies)
        engine = SimulatedEngine(OVERLOAD, scheduler, make_timer(config), clock, copies)
        results.append(Simulator(OVERLOAD, engine).run())

    assert outcomes(results[0]) == outcomes(results[1])
    if model == TINY:
        assert results[0].memory_bytes == results[1].memory_bytes
        assert summarise(results[0]) == summarise(results[1])
    assert (summarise(results[0])["preemptions"] > 0) == (model == TINY)


@pytest.mark.parametrize(
    "name", ["gemma2", "gemma3n", "gemma4", "gemma4_unified", "llama4", "qwen3_next"]
)
def test_the_engine_holds_the_bytes_of_the_simulation_in_every_step(name):
    """The same requests in a memory for two of them: pages of every kind and preemptions."""
    model = load(name)
    schedule = ScheduleConfig(max_num_seqs=8, chunk_tokens=12, admission="optimistic")
    kv = kv_config(memory="256KiB", page_tokens=4, enable_prefix_caching=False)
    need_bytes = Engine(model, kv, schedule).scheduler.peaks.peak_bytes(Need(40))
    kv = replace(kv, memory=2 * need_bytes)
    engine = Engine(model, kv, schedule)
    lengths = [(20, 14), (9, 30), (3, 35), (4, 36)]
    load_of_trace = trace(*(request(i, 0, *each) for i, each in enumerate(lengths, start=1)))
    for prompt, output in lengths:
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        engine.submit(GenerationRequest([5 + i for i in range(prompt)], params))
    layout = layout_for(model.spec, codec="float32", page_tokens=4)
    config = replace(CONFIG, model=model.spec, kv=kv, schedule=schedule, dtype="float32")
    clock, copies = VirtualClock(), TimedCopies(1e9)
    held = engine.pool.kv.memory
    memory = KVMemory(layout, held.total_bytes, schedule.num_rows)
    scheduler = make_scheduler(memory, config, clock, copies)
    simulated = SimulatedEngine(load_of_trace, scheduler, make_timer(config), clock, copies)
    for number, each in enumerate(load_of_trace.requests):
        simulated.deliver(simulated.open_job(each, number))

    while simulated.begin_step():
        simulated.end_step()
        engine.step()
        assert held.used_bytes == memory.used_bytes
        assert held.arena_peak_bytes == memory.arena_peak_bytes
    assert not engine.has_work
    assert engine.scheduler.num_preemptions == scheduler.num_preemptions > 0


@every_pair(
    evicting=[False, True],
    codec=["bfloat16", "int8", "int4_outliers+sinks=1+plain=bfloat16"],
    model=[TINY, WINDOWED, KINDS],
)
def test_folded_lanes_have_the_bytes_of_all_layers(model, codec, evicting):
    """Pages of 3 tokens are not whole cache lines: each layer has padding and positions."""
    options = {"codec": codec, "page_tokens": 3, "evicting": evicting}
    full, folded = layout_for(model, **options), folded_layout(model, **options)

    for single, all_layers in zip(folded.groups, full.groups, strict=True):
        assert single.bytes_at_most(100, 7) == all_layers.bytes_at_most(100, 7)
        single_class, layer_class = single.page_class, all_layers.page_class
        assert single_class.slot_bytes == len(all_layers.layers) * layer_class.slot_bytes
    assert folded.smallest_sequence_bytes == full.smallest_sequence_bytes
    assert [group.num_lanes for group in folded.groups] == [1] * len(full.groups)


def test_windows_evictions_and_scoring_passes_are_simulated():
    """A cap of 64 tokens in 4 of 8 layers, windows of 64 in the others: KV stays small."""
    load = trace(*(request(i, 0, 500, 40) for i in range(1, 5)))
    config = replace(AMPLE, model=WINDOWED, eviction=EvictionSpec(cap=64, every=16))

    capped = summarise(simulate(load, config))
    full = summarise(simulate(load, replace(config, model=TINY, eviction=EvictionSpec())))

    assert capped["finished"] == full["finished"] == 4
    assert capped["kv_peak_bytes"] < full["kv_peak_bytes"] / 2

    # A prompt of 300 tokens, repeated in chunks of 200 + 8 and 100 + 8 tokens
    scores = AttentionMax(of=ScoringPass("", "", "", "", chunk_tokens=200, overlap=0))
    spec = EvictionSpec(cap=64, when=PREFILL_END, statistics=(scores,))
    load = trace(request(1, 0, 300, 5))
    specs = (spec, replace(spec, statistics=()))
    scored, plain = (simulate(load, replace(AMPLE, eviction=each)) for each in specs)

    new, before = np.array([[300, 158, 158], [0, 300, 300]])
    timer = make_timer(CONFIG)
    together, alone = timer.seconds(new, before, 1), timer.seconds(new[:1], before[:1], 1)
    assert spec.scoring_tokens(300) == 2 * 158
    assert scored.busy_s - plain.busy_s == pytest.approx(together - alone)
    assert scored.gauges.peak_used_bytes > plain.gauges.peak_used_bytes
    assert summarise(scored)["finished"] == 1


@pytest.mark.parametrize("mode", ["swap", "hybrid", "auto", "recompute"])
def test_swap_preemption_recomputes_nothing_and_is_timed(mode):
    schedule = ScheduleConfig(preempt=mode)
    kv = replace(CONFIG.kv, swap_space="0" if mode == "recompute" else "64MiB")
    simulator = make_simulator(OVERLOAD, replace(CONFIG, kv=kv, schedule=schedule))
    result = simulator.run()
    summary = summarise(result)

    assert summary["preemptions"] > 0
    assert summary["swaps_in"] == summary["swaps_out"]
    if mode == "swap":
        assert summary["swaps_out"] == summary["preemptions"]
        assert summary["recomputed_tokens"] == summary["lost_tokens"] == 0
    if mode == "recompute":
        assert summary["swaps_out"] == 0
    copied_s = summary["swapped_bytes"] / RATES.copy_bytes_per_s
    assert simulator.engine.copies() == pytest.approx(copied_s)


@pytest.mark.parametrize(
    ("kv", "schedule", "message"),
    [
        (
            {"offload_memory": "1GiB"},
            {},
            "--kv-offload-memory has no effect: a simulation has no KV",
        ),
        (
            {"offload_recompute": "0.5"},
            {},
            "--kv-offload-recompute has no effect: a simulation has",
        ),
        ({"disk_memory": "1GiB", "disk_path": "x"}, {}, "--disk-kv-memory has no effect"),
        ({"remote": "redis://a:1"}, {}, "--remote-kv has no effect: a simulation has no prefixes"),
        ({"swap_space": "1MiB"}, {"preempt": "recompute"}, "--preempt recompute swaps no requests"),
        ({}, {"objective": "throughput"}, "all weights are on the device"),
    ],
)
def test_unsupported_options_are_refused(kv, schedule, message):
    kv = replace(CONFIG.kv, **kv_options(kv))
    config = replace(CONFIG, kv=kv, schedule=ScheduleConfig(**schedule))
    with pytest.raises(ConfigError, match=message):
        make_simulator(OVERLOAD, config)


def test_waste_is_weighted_by_time():
    """One sequence in pages of 16 while it grows from 10 to 12 tokens: 6, 5 and 4 of 16 empty."""
    simulator = make_simulator(trace(request(1, 0, 10, 3)), CONFIG)
    result = simulator.run()
    timer = simulator.engine.timer
    times = [seconds(timer, 10, 0), seconds(timer, 1, 10), seconds(timer, 1, 11)]

    expected = sum(t * n for t, n in zip(times, (6, 5, 4), strict=True)) / (16 * sum(times))
    assert result.gauges.waste_fraction == pytest.approx(expected)

    # of requests in whole pages
    result = simulate(trace(request(1, 0, 10, 3), request(2, 0, 16, 1)), CONFIG)
    assert request_waste(result, 16) == pytest.approx(1 - (12 + 16) / 32)


# ---- shared prefixes ---------------------------------------------------------------------------

CONVERSATIONS = trace(
    *(request(i, i * 0.05, 9, 20, shared=[(i % 3, 64), (10 + i % 6, 32)]) for i in range(1, 19))
)


def test_large_memory_reuses_all_reusable_prefixes_of_a_tenant():
    summary = summarise(simulate(CONVERSATIONS, AMPLE))

    assert 0.7 < summary["prefix_hit_fraction"] < 1
    assert summary["prefix_hit_fraction"] == summary["reusable_token_fraction"]
    assert summary["recomputed_tokens"] == 0
    requests = tuple(replace(r, tenant=f"t{r.line}") for r in CONVERSATIONS.requests)
    separate = summarise(simulate(replace(CONVERSATIONS, requests=requests), AMPLE))
    assert separate["cached_tokens"] == 0

    kv = kv_config(memory="auto", enable_prefix_caching=False)
    summary = summarise(simulate(CONVERSATIONS, replace(CONFIG, kv=kv)))
    assert summary["cached_tokens"] == 0
    assert summary["reusable_token_fraction"] > 0.7


@pytest.mark.parametrize(("interval", "cached_tokens"), [(0, 0), (32, 64)])
def test_conversation_reuses_its_earlier_outputs_and_checkpoints(interval, cached_tokens):
    """The later prompt is the first one, its output, and 16 tokens: 64 + 32 are cached, but the
    last output token was never processed, so its page is incomplete.

    A hybrid has a checkpoint for a prompt that has only 64 tokens in common with an earlier one.
    """
    kv = kv_config(memory="16MiB", state_checkpoint_interval=interval)
    config = replace(CONFIG, model=HYBRID, kv=kv)
    first = replace(request(1, 0, 0, 32, shared=[(1, 64)]), answer=TraceSegment(2, 32))
    later = request(2, 10, 16, 1, shared=[(1, 64), (2, 32)])
    other = request(2, 10, 40, 1, shared=[(1, 64)])
    before = request(1, 0, 40, 1, shared=[(1, 64)])
    for each in (CONFIG, config):
        assert simulate(trace(first, later), each).records[1].cached_tokens == 64 + 16
    assert simulate(trace(before, other), config).records[1].cached_tokens == cached_tokens


def test_metrics_are_reported_per_tenant():
    load = trace(*(request(i, 0, 40, 10, tenant="a" if i % 3 else "b") for i in range(1, 31)))
    result = simulate(load, replace(CONFIG, schedule=ScheduleConfig(max_num_seqs=2)))
    found = by_tenant(result)
    assert (found["a"]["finished"], found["b"]["finished"]) == (20, 10)
    # one tenant sends twice as much, and is served equally while both wait
    assert summarise(result)["jain_index"] >= 0.98


def test_recorded_conversations_are_reused_with_small_waste():
    options = TraceOptions(requests=120, length_scale=0.125)
    loaded = load_trace(recorded("mooncake_conversation_trace.jsonl"), options)
    kv = KVConfig(memory="auto", page_tokens=64)
    summary = summarise(simulate(loaded, replace(CONFIG, kv=kv, model=model_shape("llama-3.1-8b"))))

    reusable = summary["reusable_token_fraction"]
    assert reusable > 0.03
    assert summary["prefix_hit_fraction"] == pytest.approx(reusable, abs=0.001)

    loaded = load_trace(recorded("AzureLLMInferenceTrace_conv.csv"), TraceOptions(requests=150))
    config = replace(CONFIG, model=model_shape("llama-3.1-8b"), kv=KVConfig(memory="8GiB"))

    summary = summarise(simulate(loaded, config))

    assert summary["finished"] == 150
    assert 0 < summary["waste_fraction"] <= 0.02


# ---- deadlines and urgent requests ---------------------------------------------------------------


ROWS = 4
BETWEEN_STEPS = ("continuous", "orca", "baton_pd", "baton_pd_best_fit", "baton_pd:hold=host")


def config(batcher="continuous", *, memory="2MiB", urgent=None):
    sizes = {"max_num_seqs": ROWS, "max_num_batched_tokens": 128}
    schedule = ScheduleConfig(batcher=batcher, urgent=urgent, **sizes)
    kv = kv_config(memory=memory, swap_space="4MiB", enable_prefix_caching=False)
    return SimConfig(model=TINY, rates=RATES, kv=kv, schedule=schedule)


def jobs(count, seed):
    """(prompt tokens, output tokens, deadline in units of service time), short and long mixed."""
    rng = random.Random(seed)
    short = [(rng.randint(5, 30), rng.randint(4, 12), 3.0) for _ in range(count)]
    long = [(rng.randint(40, 120), rng.randint(60, 120), 12.0) for _ in range(count // 3)]
    mixed = short + long
    rng.shuffle(mixed)
    return mixed


def arrivals(load, seed, count=60):
    """Poisson arrivals at a fraction of the machine's capacity, each with a deadline."""
    mixed = jobs(count, seed)
    at_once = trace(*(request(i, 0, p, a) for i, (p, a, _) in enumerate(mixed, 1)))
    capacity_s = simulate(at_once, config()).gauges.time_s / len(mixed)
    rng, now_s, found = random.Random(seed + 1), 0.0, []
    for number, (prompt, output, slack) in enumerate(mixed, 1):
        deadline_s = slack * ROWS * capacity_s * (output + prompt / 16) / 30
        requests = request(number, now_s, prompt, output)
        found.append(replace(requests, deadline_s=deadline_s))
        now_s += rng.expovariate(load / capacity_s)
    return trace(*found)


def met(load, batcher, *, known):
    num_met = total = 0
    for seed in range(2):
        requests = arrivals(load, seed)
        hidden = trace(*(replace(r, deadline_s=None) for r in requests.requests))
        visible = requests if known else hidden
        result = simulate(visible, config(batcher))
        for record, wanted in zip(result.records, requests.requests, strict=True):
            num_met += record.finish_s <= wanted.arrival_s + wanted.deadline_s
            total += 1
    return num_met / total


@pytest.mark.parametrize(
    ("batcher", "load"),
    [
        ("continuous", 1.1),
        *(
            pytest.param(batcher, load, marks=pytest.mark.slow)
            for batcher in ("continuous", "orca", "baton_pd")
            for load in (0.5, 0.8, 1.1)
            if (batcher, load) != ("continuous", 1.1)
        ),
    ],
)
def test_more_deadlines_are_met_than_first_come_first_served(batcher, load):
    """Fraction of 160 deadlines met, by load; right columns: first come, first served.

    batcher      0.5             0.8             1.1
    continuous   1.000  0.950    1.000  0.806    0.938  0.450
    orca         1.000  0.950    0.981  0.806    0.963  0.450
    baton_pd     1.000  0.963    0.963  0.812    0.825  0.456
    """
    assert met(load, batcher, known=True) > met(load, batcher, known=False)


def test_summary_reports_the_fraction_of_deadlines_met():
    late = replace(request(1, 0, 50, 20), deadline_s=1e-6)
    early = replace(request(2, 0, 50, 20), deadline_s=1e6)

    numbers = summarise(simulate(trace(late, early, request(3, 0, 5, 5)), config()))

    assert numbers["deadlines_met_fraction"] == 0.5


class RecordingTimer:
    def __init__(self, timer):
        self.timer, self.model, self.longest_s = timer, timer.model, 0.0

    def seconds(self, *step):
        seconds = self.timer.seconds(*step)
        self.longest_s = max(self.longest_s, seconds)
        return seconds


def longest_wait(batcher, memory, urgent):
    """The longest queue time of urgent requests among long ones, and the longest step."""
    rng = random.Random(5)
    requests = []
    for number in range(1, 24):
        prompt, output = rng.randint(5, 90), rng.randint(40, 90)
        requests.append(request(number, 0.0005 * number, prompt, output))
    for number in range(40, 46):
        arrival_s = 0.005 * (number - 39) + 0.002 * rng.random()  # at most four at once
        requests.append(replace(request(number, arrival_s, rng.randint(5, 60), 8), priority=-1))
    requests.sort(key=lambda r: r.arrival_s)
    simulator = make_simulator(trace(*requests), config(batcher, memory=memory, urgent=urgent))
    simulator.engine.timer = RecordingTimer(simulator.engine.timer)
    records = simulator.run().records
    waits = [r.queue_s for r, a in zip(records, requests, strict=True) if a.priority == -1]
    return max(waits), simulator.engine.timer.longest_s


@pytest.mark.parametrize("memory", ["2MiB", "700KiB"])
@pytest.mark.parametrize("batcher", BETWEEN_STEPS)
def test_urgent_request_waits_for_at_max_one_step(batcher, memory):
    wait_s, step_s = longest_wait(batcher, memory, urgent=-1)
    plain_s, _ = longest_wait(batcher, memory, urgent=None)
    assert wait_s <= step_s
    assert plain_s > step_s


@pytest.mark.parametrize("batcher", ["static", "pd"])
def test_static_batches_admit_no_urgent_request_between_steps(batcher):
    wait_s, step_s = longest_wait(batcher, "2MiB", urgent=-1)
    assert wait_s > 3 * step_s


# ---- the time of a step --------------------------------------------------------------------------


WINDOWED_SHAPE = replace(TINY, layers=tuple(LayerSpec(window=w) for w in (None, 4, 4, 9) * 2))
rows_of_steps = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=6)


def by_parts(model, rows, sampled_rows):
    """The plain reference: the floor of each part of the whole step."""
    tokens = [RowTokens(new=new, before=before) for new, before in rows]
    parts = step_parts(model, tokens, sampled_rows=sampled_rows)
    floors = [part.floor_s(RATES.read_bytes_per_s, RATES.flops_per_s) for part in parts]
    return RATES.overhead_s + sum(floors)


def timed(timer, rows, sampled_rows):
    new, before = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    return timer.seconds(new, before, sampled_rows)


@pytest.mark.parametrize("model", [TINY, WINDOWED_SHAPE, *CACHE_KINDS.values()])
@given(rows=rows_of_steps, sampled=st.integers(0, 6))
def test_step_time_is_the_sum_of_the_floors_of_its_parts(model, rows, sampled):
    timer = StepTimer(model, RATES)
    assert timed(timer, rows, sampled) == pytest.approx(by_parts(model, rows, sampled), rel=1e-12)
    assert timed(timer, rows, sampled) == timed(timer, rows, sampled)  # cached


def test_copy_time_is_bytes_divided_by_rate():
    [group] = folded_layout(TINY, codec="bfloat16", page_tokens=16).groups
    copies, pages = TimedCopies(1e6), np.arange(3, dtype=np.int32)

    copies.save(group.page_class, pages, 0)
    copies.load(group.page_class, pages, 0)

    assert copies() == copies.unpaid_s() == pytest.approx(6 * group.page_class.page_bytes / 1e6)
    assert copies.unpaid_s() == 0.0


def test_named_model_shapes_can_be_timed_and_have_the_published_number_of_parameters():
    for name in (*CONFIGS, "quire-tiny"):
        assert timed(StepTimer(model_shape(name), RATES), [(1, 10)], 1) > RATES.overhead_s, name
    billions = {"llama-3-8b": 8.03, "llama-3.1-70b": 70.6, "llama-3.2-1b": 1.24}
    for name, number in (billions | {"qwen2.5-7b": 7.62, "opt-6.7b": 6.66}).items():
        found = model_shape(name).num_parameters / 1e9
        assert found == pytest.approx(number, rel=0.005), name


def test_machines_are_scaled_by_efficiency_or_refused():
    peak = MachineConfig(efficiency=1.0).rates()
    assert MachineConfig().rates().read_bytes_per_s == pytest.approx(0.6 * peak.read_bytes_per_s)
    assert MachineConfig(name="profile").rates(RATES).flops_per_s == RATES.flops_per_s
    assert MachineConfig(step_overhead_ms=5).rates().overhead_s == 0.005

    for options in ({"name": "a10"}, {"efficiency": 0.0}, {"efficiency": 1.5}):
        with pytest.raises(ConfigError):
            MachineConfig(**options)
    with pytest.raises(ConfigError):
        MachineConfig(step_overhead_ms=-1.0)
    with pytest.raises(ConfigError, match="flops_per_s"):
        replace(RATES, flops_per_s=0.0)
    with pytest.raises(UnknownName, match="llama-3-8b"):
        model_shape("llama3-8b")
