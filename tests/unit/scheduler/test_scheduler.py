"""Loads that once stalled the scheduler, step sizes, causes of waiting; rules of admission."""

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quire.api.llm import LLM
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import ConfigError, UnknownName
from quire.kv.memory import KVMemory
from quire.layout.eviction import DECODE, KEEP_ALL, EvictionSpec
from quire.plan.weights import MAX_BATCHES, WeightsPlacement
from quire.scheduler import waiting
from quire.scheduler.admission import RULES, Estimated, highest_point, make_admission
from quire.scheduler.peaks import Need, Peaks
from quire.scheduler.request import Request, RequestState
from quire.scheduler.schedule_config import ScheduleConfig
from quire.scheduler.scheduler import SCORED_TOKENS
from quire.scheduler.step import StepSize, max_batches
from schedule_files import DECODE_ONLY, WITH_PREFILL, recorded_calls, typical
from support.requests import make_request
from support.scheduler_load import (
    RetainsNewest,
    SchedulerLoad,
    Setting,
    advance,
    make_layout,
    make_scheduler,
)


class Load:
    """A scheduler over the smallest KV memory without bytes that admits the longest request.

    Args:
        room: multiple of that memory.
    """

    def __init__(self, *, page_tokens, window, eviction, longest, room=1, **schedule):
        self.eviction, self.config = eviction, ScheduleConfig(low_watermark=1.0, **schedule)
        self.layout = make_layout(page_tokens, window, evicting=eviction.cap is not None)
        total_bytes, fits = 4 * self.layout.smallest_sequence_bytes, False
        while not fits:
            total_bytes += total_bytes // 100 + 64
            self.open(total_bytes)
            fits = self.scheduler.peaks.fits_alone(Need(longest, eviction=eviction))
        self.open(room * total_bytes)
        self.arrivals = itertools.count()

    def open(self, total_bytes: int) -> None:
        self.memory = KVMemory(self.layout, total_bytes, self.config.max_num_seqs)
        self.scheduler = make_scheduler(self.memory, self.config, RetainsNewest(self.memory))

    def submit(self, prompt_tokens: int, max_tokens: int, **options) -> Request:
        params = SamplingParams(max_tokens=max_tokens, **options)
        own = {"arrival": next(self.arrivals), "eviction": self.eviction}
        request = make_request("r", [1] * prompt_tokens, params, **own)
        self.scheduler.submit(request)
        return request

    def run(self) -> None:
        while self.scheduler.has_work:
            assert advance(self.scheduler).requests, "no step can be planned"
        self.memory.check()
        assert not len(self.memory.live_rows)


def test_admission_counts_the_chunks_of_an_eviction_rule():
    """Above its cap a prompt is prefilled in chunks of `every` tokens, not of `chunk_tokens`."""
    rule, steps = EvictionSpec(cap=20, every=7), {"max_num_batched_tokens": 7, "chunk_tokens": 2}
    load = Load(page_tokens=2, window=9, eviction=rule, longest=60, **steps)
    load.submit(52, 9)

    load.run()


@pytest.mark.parametrize("seed", [1, 3])
def test_pages_scattered_over_slabs_do_not_stall_a_request_that_fits_alone(seed):
    """Two page classes, and short requests whose pages are between those of the long one.

    After the short ones are preempted, the long one's window pages occupy more slabs than they
    fill, and no slab is free for its other pages.
    """
    rng, rule = random.Random(seed), EvictionSpec(cap=300, every=5)
    longest, steps = 83 + 139 - 1, {"max_num_seqs": 40, "chunk_tokens": 16}
    load = Load(page_tokens=2, window=100, eviction=rule, longest=longest, **steps)
    load.submit(83, 139)
    for _ in range(39):
        load.submit(rng.randint(1, 40), rng.randint(1, 120))

    load.run()


def test_atomic_chunk_is_neither_starved_by_new_requests_nor_divided_among_tenants():
    """Its chunks of 10 tokens fill a step of 10: none is scheduled while other requests decode."""
    rule, steps = EvictionSpec(cap=20, every=10), {"max_num_batched_tokens": 10}
    load = Load(
        page_tokens=1, window=None, eviction=rule, longest=20, room=3, max_num_seqs=3, **steps
    )
    load.submit(1, 5)
    long = load.submit(60, 1)
    short = [load.submit(1, 4 + i % 3) for i in range(60)]

    while long.progress.state is not RequestState.FINISHED:
        assert advance(load.scheduler).requests

    assert sum(request.progress.state is RequestState.FINISHED for request in short) < 4
    load.run()

    # Under eviction a step of 7 tokens holds one chunk of 7, even if other tenants wait.
    setting = Setting(cap=20, pages=60, max_num_batched_tokens=7, max_num_seqs=2, guaranteed=0)
    load = SchedulerLoad(setting)
    for text in (1, 2, 1, 2):
        load.submit(load.request(60, 1, text=text))
    load.drain()
    assert load.scheduler.num_preemptions == 0
    assert load.processed_tokens == 4 * 60


def test_prompt_tokens_scored_per_step_are_bounded():
    shape = {"page_tokens": 16, "window": None, "eviction": EvictionSpec()}
    load = Load(**shape, longest=600, room=8, max_num_seqs=8)
    for max_tokens in (0, 1, 2, 0):
        load.submit(600, max_tokens, prompt_logprobs=0)
    load.submit(600, 1)
    commit = load.scheduler.commit

    def checked(plan):
        parts = zip(plan.requests, plan.tokens, strict=True)
        assert sum(n for r, n in parts if r.scores_prompt) <= SCORED_TOKENS
        return commit(plan)

    load.scheduler.commit = checked
    load.run()


def test_typical_step_passes_few_files():
    calls = recorded_calls()
    decoding, prefill = typical(calls[DECODE_ONLY]), typical(calls[WITH_PREFILL])
    of_scheduler = [name for name in prefill.functions if name.startswith("scheduler/")]
    assert len(decoding.functions) <= 10
    assert len(prefill.functions) <= 18
    assert len(of_scheduler) <= 10


# ---- step sizes ----------------------------------------------------------------------------------


def offloaded_layers(device_s=0.0):
    """Totals of a stand-in for the layer prefetch."""
    layers = {"layer_bytes": (100,) * 4, "offloaded_layers": (0, 1, 2, 3)}
    place = WeightsPlacement(other_bytes=0, **layers)
    return SimpleNamespace(device_s=device_s, copied_s=0.0, num_bytes=0, place=place)


def learn(size, layers, *, device_s, copy_s, tokens) -> int:
    layers.device_s += device_s
    layers.copied_s += copy_s
    layers.num_bytes += layers.place.host_bytes
    size.learn(tokens)
    return size.num_batches


def test_batches_of_a_step_follow_the_objective():
    layers = offloaded_layers()
    size = StepSize(64, "latency", layers)
    learn(size, layers, device_s=1.0, copy_s=5.0, tokens=64)
    sizes = (StepSize(64), StepSize(64, "throughput"), size)
    assert [each.tokens for each in sizes] == [64] * 3
    assert max_batches("latency", layers) == max_batches("auto", None) == 1
    assert StepSize(64, "throughput", offloaded_layers()).tokens == 64 * MAX_BATCHES
    with pytest.raises(ConfigError, match="auto, latency, throughput, got 'speed'"):
        ScheduleConfig(objective="speed")


@pytest.mark.parametrize("earlier_s", [0.0, 100.0])
def test_auto_objective_uses_as_many_batches_as_hide_the_copies(earlier_s):
    """Times from before the engine started, and of steps of few rows, are not counted."""
    layers = offloaded_layers(earlier_s)
    size = StepSize(64, "auto", layers)
    assert size.num_batches == 1
    assert learn(size, layers, device_s=1.0, copy_s=2.5, tokens=4) == 1
    assert learn(size, layers, device_s=1.0, copy_s=2.5, tokens=64) == 3
    assert learn(size, layers, device_s=1.0, copy_s=2.5, tokens=4) == 3
    assert learn(size, layers, device_s=3.0, copy_s=2.5, tokens=3 * 64) == 3  # one second a batch
    for _ in range(40):  # a slower device: one batch hides the copies
        learn(size, layers, device_s=4.0, copy_s=2.5, tokens=64)
    assert size.num_batches == 1


# ---- causes of waiting ---------------------------------------------------------------------------

LONG = SamplingParams(max_tokens=100, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return LLM("quire-tiny", dtype="float32", kv=KVConfig(memory="4MiB"), verify=False).model


@pytest.fixture
def engine_of(model):
    made = []

    def make(memory="4MiB", kv=None, **schedule):
        made.append(
            Engine(model, KVConfig(memory=memory, **(kv or {})), ScheduleConfig(**schedule))
        )
        return made[-1]

    yield make
    for engine in made:
        for request in engine.requests():
            engine.cancel(request.request_id)
        while engine.has_work:
            engine.step()
        engine.check()


def submit(engine, prompts, tenant="default"):
    for number in range(prompts):
        ids = [(7 * number + i) % 200 + 10 for i in range(40)]
        engine.submit(GenerationRequest(ids, LONG, tenant=tenant))


def causes(engine, **options):
    found = list(engine.scheduler.waiting_causes.first(100, **options))
    return [(why.cause, why.ahead) for _, why in found]


def test_request_waits_for_the_next_step_or_for_a_batch_slot(engine_of):
    engine = engine_of(max_num_seqs=2)
    submit(engine, 4)
    queue = [(waiting.QUEUE, 1), (waiting.QUEUE, 2), (waiting.QUEUE, 3)]
    assert causes(engine) == [(waiting.NEXT_STEP, 0), *queue]
    engine.step()

    assert causes(engine) == [(waiting.SLOTS, 0), *queue[:1]]
    [(_, first), _] = engine.scheduler.waiting_causes.first(2)
    [running, _] = engine.scheduler.running
    assert first.needed_bytes == engine.scheduler.memory.row_bytes(running.memory.row)


def test_request_waits_for_a_step_pages_or_the_limit_of_its_tenant(engine_of):
    engine = engine_of(memory="2MiB")
    submit(engine, 8)
    engine.step()
    before, events = engine.stats().as_dict() | {"times": None}, engine.events.num_events

    found = causes(engine)
    assert found[0] == (waiting.MEMORY, 0)
    first, second = (why for _, why in engine.scheduler.waiting_causes.first(2))
    assert first.free_bytes < first.needed_bytes + first.promised_bytes
    assert second.after is next(engine.scheduler.fairness.waiting.heads())
    assert [cause for cause, _ in found[1:]] == [waiting.QUEUE] * (len(found) - 1)
    assert engine.stats().as_dict() | {"times": None} == before
    assert engine.events.num_events == events

    engine = engine_of(tenants="red:guaranteed=0,burst=1200KiB; blue")
    submit(engine, 4, tenant="red")
    submit(engine, 1, tenant="blue")
    engine.step()
    assert causes(engine, tenant="red")[0] == (waiting.LIMIT, 0)
    assert causes(engine, tenant="blue") == []


@pytest.mark.parametrize(
    ("cause", "memory", "kv", "schedule"),
    [
        (waiting.SLABS, "1200KiB", {"evict": "h2o:cap=64", "evict_allow": "all"}, {}),
        (waiting.PREFILL, "2MiB", {"evict": "recent:cap=64,every=16,sinks=4"}, {}),
        (waiting.TOKENS, "4MiB", {}, {"max_num_batched_tokens": 24}),
    ],
)
def test_request_that_would_fit_waits_for_another_reason(engine_of, cause, memory, kv, schedule):
    engine, found, waits = engine_of(memory, kv, **schedule), None, 0
    for number in range(14):
        own = ((7 * number + i) % 200 + 10 for i in range(20 + 40 * (number % 4)))
        engine.submit(GenerationRequest([*range(20, 68), *own], LONG))
    while found is None and engine.has_work:
        engine.step()
        for head, why in engine.scheduler.waiting_causes.first(1):
            found = why if why.cause == cause else None
            waits = waits + 1 if why.cause == waiting.NEXT_STEP else 0
            assert waits < 3, f"{head.request_id} was not tried in the next step"

    assert found.cause == cause
    if cause == waiting.SLABS:
        assert found.free_bytes < found.needed_bytes
    elif cause == waiting.PREFILL:
        assert found.after in engine.scheduler.running


# ---- admission -----------------------------------------------------------------------------------


def memory_of(pages, *, page_tokens=4, window=None, evicting=False, max_rows=32):
    layout = make_layout(page_tokens, window, evicting=evicting)
    return KVMemory(layout, layout.smallest_sequence_bytes * pages, max_rows)


def request_of(prompt, max_tokens, *, generated=0, arrival=0, eviction=KEEP_ALL, **params):
    params = SamplingParams(max_tokens=max_tokens, **params)
    ids = {"arrival": arrival, "eviction": eviction}
    request = make_request(f"r{arrival}", [1] * prompt, params, **ids)
    request.output_token_ids.extend([2] * generated)
    return request


def start(memory, request, slots):
    request.memory.row = memory.start()
    memory.grow(np.array([request.memory.row]), np.array([slots], dtype=np.int32))


def rule_over(name, memory):
    return make_admission(name, Peaks(memory, chunk_tokens=2048))


def test_pages_promised_by_each_admission_rule():
    """Two layers, 4 tokens per page.

    The new request: 8 known tokens in 4 pages, 8 + 40 - 1 final tokens in 24 pages. The running
    request: 11 of 8 + 40 - 1 tokens, 6 of 24 pages.
    """
    memory, other, new = memory_of(60), request_of(8, 40, generated=4), request_of(8, 40, arrival=1)
    start(memory, other, 11)
    other.progress.num_computed = 11
    promised = {
        name: int(rule_over(name, memory).promised(new, [other], 0).sum()) for name in RULES
    }

    assert promised == {"optimistic": 4, "reserved": 24 + 18, "estimated": 24 + 18 - 2}
    cached = rule_over("optimistic", memory).promised(request_of(21, 9), [], 16)
    assert cached.tolist() == [2 * (6 - 4)]  # shared pages are not promised again


def test_estimated_rule_starts_as_reserved_and_learns_output_lengths():
    rule, new_request = rule_over("estimated", memory_of(60)), request_of(8, 40)
    assert isinstance(rule, Estimated)
    assert rule.end_of(new_request) == new_request.final_tokens == 47
    for _ in range(100):
        rule.learn(request_of(8, 40, generated=10))

    assert rule.ratio == pytest.approx(0.25, abs=0.01)
    assert rule.end_of(new_request) == 8 + 12 - 1  # 1.2 * 0.25 * 40, the last without KV
    late, last = (request_of(8, 40, generated=n) for n in (30, 39))
    assert rule.end_of(late) == 8 + 30 + 1  # past the estimate: at least one more
    assert rule.end_of(last) == last.final_tokens


ENDS = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=8
)


def test_highest_point_of_a_single_sequence_has_no_rounding_error():
    """14 pages in 25 steps are 0.56 per step; 25 times that exceeds 14 in floating point."""
    steps, owed = (x.ravel() for x in np.meshgrid(np.arange(1, 100), np.arange(100)))

    found = [
        highest_point(np.array([n]), *[np.array([[pages]])] * 2)
        for n, pages in zip(steps, owed, strict=True)
    ]

    assert np.array_equal(np.concatenate(found), owed)


@given(ENDS)
@example([(0, 0, 2), (1, 1, 0), (1, 1, 0)])
def test_highest_point_equals_step_by_step_simulation(ends):
    """Each sequence grows evenly to its peak and frees all its pages after its last step.

    A sequence that ends in the next step still holds its pages in that step, while others grow.
    """
    steps, owed, held = (np.array(column) for column in zip(*ends, strict=True))
    best = 0.0
    for now in range(max(1, int(steps.max())) + 1):
        level = 0.0
        for left, still, has in zip(np.maximum(steps, 1), owed, held, strict=True):
            if left < now:
                level -= has
            else:
                level += still * (now / left)
        best = max(best, level)
    found = highest_point(steps, owed[:, None], (owed + held)[:, None])

    assert best - 1e-6 <= found[0] <= np.ceil(best - 1e-6) + owed.max(initial=0)


def test_names_of_rules_and_the_order_of_watermarks():
    peaks = Peaks(memory_of(8), chunk_tokens=2048)
    assert make_admission("auto", peaks, can_swap=True).name == "optimistic"
    assert make_admission("auto", peaks).name == "estimated"
    with pytest.raises(UnknownName, match="did you mean reserved"):
        rule_over("reservd", memory_of(8))
    for low, high in ((0.0, 1.0), (0.9, 0.8), (0.5, 1.5), (float("nan"), 1.0)):
        with pytest.raises(ConfigError, match="low_watermark"):
            ScheduleConfig(low_watermark=low, high_watermark=high)


def run_load(admission, *, stop_share=1.0, **schedule):
    """Run random requests to the end; return preemptions and the maximum number running."""
    rng, memory, most = random.Random(7), memory_of(80), 0
    config = ScheduleConfig(admission=admission, max_num_batched_tokens=64, **schedule)
    scheduler = make_scheduler(memory, config)
    for arrival in range(60):
        scheduler.submit(request_of(rng.randint(1, 20), rng.randint(8, 40), arrival=arrival))
    while scheduler.has_work:
        assert advance(scheduler, stop_share).requests
        most = max(most, len(scheduler.running))
    memory.check()
    return scheduler.num_preemptions, most, memory.arena_peak_bytes


def test_reserved_runs_fewer_requests_than_optimistic_and_preempts_none():
    reserved, optimistic = (run_load(name) for name in ("reserved", "optimistic"))
    assert 0 == reserved[0] < optimistic[0]
    assert reserved[1] < optimistic[1]
    reserved, estimated, optimistic = (
        run_load(name, stop_share=0.3) for name in ("reserved", "estimated", "optimistic")
    )

    assert 0 == reserved[0] <= estimated[0] <= optimistic[0]
    assert reserved[1] < estimated[1] <= optimistic[1]


def test_watermarks_keep_memory_free_and_fixed_outputs_teach_nothing():
    free = run_load("optimistic", low_watermark=1.0)
    half = run_load("optimistic", low_watermark=0.5, high_watermark=1.0)
    assert half < free
    assert half[1] < free[1]
    below = run_load("reserved", low_watermark=0.5, high_watermark=0.6)
    assert below[0] == 0
    assert below[1] <= run_load("reserved", low_watermark=0.5)[1]
    preempted, _, peak_bytes = run_load("optimistic", low_watermark=0.5, high_watermark=0.6)
    assert preempted > 0
    memory = memory_of(80)
    step_bytes = 2 * len(memory.lengths) * memory.layout.smallest_sequence_bytes
    assert peak_bytes <= 0.6 * memory.total_bytes + step_bytes

    rule = rule_over("estimated", memory_of(60))
    for _ in range(10):
        rule.learn(request_of(8, 40, generated=4))
    ratio, fixed = rule.ratio, request_of(8, 40, ignore_eos=True)
    stopped = request_of(8, 40, ignore_eos=True, stop_token_ids=(5,))
    rule.learn(request_of(8, 40, generated=40, ignore_eos=True))

    assert rule.ratio == ratio == pytest.approx((1 + 10 * 0.1) / 11)
    assert rule.end_of(fixed) == fixed.final_tokens
    assert rule.end_of(stopped) < stopped.final_tokens


@pytest.mark.parametrize("admission", ["auto", "reserved", "estimated"])
def test_outputs_of_known_length_fill_the_memory_without_preemption(admission):
    """4 requests of 32 tokens fill the memory; 16 take as many steps as 4 waves of 4."""
    config = ScheduleConfig(admission=admission, max_num_batched_tokens=64)
    scheduler, num_steps = make_scheduler(memory_of(4 * 8), config), 0
    for arrival in range(16):
        scheduler.submit(request_of(17, 16, arrival=arrival, ignore_eos=True))
    while scheduler.has_work:
        advance(scheduler)
        num_steps += 1
    assert scheduler.num_preemptions == 0
    assert num_steps <= 4 * 16 + 4


def test_estimates_and_promises_stay_within_accepted_peaks():
    """A cap of 8 in decoding: a prompt of 40 tokens needs 20 pages once, then 4."""
    memory, spec = memory_of(60, evicting=True), EvictionSpec(cap=8, every=4, when=DECODE)
    decoding = request_of(40, 20, generated=1, eviction=spec)
    waiting = request_of(40, 20, arrival=1, eviction=spec)
    start(memory, decoding, 8)
    decoding.progress.state, decoding.progress.num_computed = RequestState.RUNNING, 40
    rule = rule_over("reserved", memory)

    assert rule.peaks.further_pages([decoding], [59]).sum() == 0
    assert rule.promised(waiting, [decoding], 0).sum() == 20

    # 49 tokens fit in smaller steps, so their peak is below that of 47 tokens in whole chunks
    memory = memory_of(35, page_tokens=1, window=5, max_rows=10)
    rule = make_admission("optimistic", Peaks(memory, chunk_tokens=200))
    assert rule.peaks.counts([Need(35), Need(49)]).ravel().tolist() == [105, 104]
    assert rule.promised(request_of(35, 15), [], 0).tolist() == [104]
