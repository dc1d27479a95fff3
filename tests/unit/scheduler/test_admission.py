"""Admission rules: the pages that each reserves, and their effect under load."""

import random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quire.config.sampling_params import SamplingParams
from quire.errors import ConfigError, UnknownName
from quire.kv.memory import KVMemory
from quire.layout.eviction import DECODE, KEEP_ALL, EvictionSpec
from quire.scheduler.admission import RULES, Estimated, highest_point, make_admission
from quire.scheduler.peaks import Need, Peaks
from quire.scheduler.request import RequestState
from quire.scheduler.schedule_config import ScheduleConfig
from support.requests import make_request
from support.scheduler_load import advance, make_layout, make_scheduler


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
    """Let a request hold these slots in the memory."""
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


def test_names_of_rules():
    peaks = Peaks(memory_of(8), chunk_tokens=2048)
    assert make_admission("auto", peaks, can_swap=True).name == "optimistic"
    assert make_admission("auto", peaks).name == "estimated"
    with pytest.raises(UnknownName, match="did you mean reserved"):
        rule_over("reservd", memory_of(8))


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.9, 0.8), (0.5, 1.5), (float("nan"), 1.0)])
def test_watermarks_outside_their_order_are_rejected(low, high):
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
    """If outputs end early, estimated admission runs more than reserved."""
    reserved, optimistic = (run_load(name) for name in ("reserved", "optimistic"))
    assert 0 == reserved[0] < optimistic[0]
    assert reserved[1] < optimistic[1]
    reserved, estimated, optimistic = (
        run_load(name, stop_share=0.3) for name in ("reserved", "estimated", "optimistic")
    )

    assert 0 == reserved[0] <= estimated[0] <= optimistic[0]
    assert reserved[1] < estimated[1] <= optimistic[1]


def test_watermarks_keep_memory_free():
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


def test_outputs_of_fixed_length_are_known_and_teach_nothing():
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


def test_prompt_evicted_after_prefill_is_not_promised_again():
    """A cap of 8 in decoding: a prompt of 40 tokens needs 20 pages once, then 4."""
    memory, spec = memory_of(60, evicting=True), EvictionSpec(cap=8, every=4, when=DECODE)
    decoding = request_of(40, 20, generated=1, eviction=spec)
    waiting = request_of(40, 20, arrival=1, eviction=spec)
    start(memory, decoding, 8)
    decoding.progress.state, decoding.progress.num_computed = RequestState.RUNNING, 40
    rule = rule_over("reserved", memory)

    assert rule.peaks.further_pages([decoding], [59]).sum() == 0
    assert rule.promised(waiting, [decoding], 0).sum() == 20


def test_estimate_never_exceeds_the_peak_that_was_accepted():
    """49 tokens fit in smaller steps, so their peak is below that of 47 tokens in whole chunks."""
    memory = memory_of(35, page_tokens=1, window=5, max_rows=10)
    rule = make_admission("optimistic", Peaks(memory, chunk_tokens=200))
    assert rule.peaks.counts([Need(35), Need(49)]).ravel().tolist() == [105, 104]
    assert rule.promised(request_of(35, 15), [], 0).tolist() == [104]
