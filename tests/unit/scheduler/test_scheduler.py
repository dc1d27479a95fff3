"""Loads that once stalled the scheduler: a request that fits alone completes, in order."""

import itertools
import random

import pytest

from quire.config.sampling_params import SamplingParams
from quire.kv.memory import KVMemory
from quire.layout.eviction import EvictionSpec
from quire.scheduler.peaks import Need
from quire.scheduler.request import Request, RequestState
from quire.scheduler.schedule_config import ScheduleConfig
from quire.scheduler.scheduler import SCORED_TOKENS
from quire.scheduler.step import StepPlan
from schedule_files import DECODE_ONLY, WITH_PREFILL, recorded_calls, typical
from support.requests import make_request
from support.scheduler_load import RetainsNewest, make_layout, make_scheduler


class Load:
    """A scheduler over the smallest KV memory without bytes that admits the longest request.

    Args:
        room: multiple of that memory.
    """

    def __init__(self, *, page_tokens, window, eviction, longest, room=1, **schedule):
        self.eviction, config = eviction, ScheduleConfig(low_watermark=1.0, **schedule)
        layout = make_layout(page_tokens, window, evicting=eviction.cap is not None)
        total_bytes = 4 * layout.smallest_sequence_bytes
        fits = False
        while not fits:
            total_bytes += total_bytes // 100 + 64
            self.memory = KVMemory(layout, total_bytes, config.max_num_seqs)
            self.scheduler = make_scheduler(self.memory, config, RetainsNewest(self.memory))
            fits = self.scheduler.peaks.fits_alone(Need(longest, eviction=eviction))
        if room > 1:
            self.memory = KVMemory(layout, room * total_bytes, config.max_num_seqs)
            self.scheduler = make_scheduler(self.memory, config, RetainsNewest(self.memory))
        self.arrivals = itertools.count()

    def submit(self, prompt_tokens: int, max_tokens: int, **options) -> Request:
        request = make_request(
            request_id="r",
            prompt_token_ids=[1] * prompt_tokens,
            params=SamplingParams(max_tokens=max_tokens, **options),
            arrival=next(self.arrivals),
            eviction=self.eviction,
        )
        self.scheduler.submit(request)
        return request

    def step(self) -> int:
        plan = self.scheduler.schedule()
        self.process(plan)
        return sum(plan.tokens)

    def process(self, plan: StepPlan) -> None:
        self.scheduler.commit(plan)
        for request in plan.requests:
            if request.num_uncomputed == 0:
                request.output_token_ids.append(2)
                if len(request.output_token_ids) >= request.params.max_tokens:
                    self.scheduler.finish(request)

    def run(self) -> None:
        while self.scheduler.has_work:
            assert self.step(), "requests are running, but no step can be planned"
        self.memory.check()
        assert not len(self.memory.live_rows)


def test_admission_counts_the_chunks_of_an_eviction_rule():
    """Above its cap a prompt is prefilled in chunks of `every` tokens, not of `chunk_tokens`."""
    load = Load(
        page_tokens=2,
        window=9,
        eviction=EvictionSpec(cap=20, every=7),
        longest=60,
        max_num_batched_tokens=7,
        chunk_tokens=2,
    )
    load.submit(52, 9)

    load.run()


@pytest.mark.parametrize("seed", [1, 3])
def test_pages_scattered_over_slabs_do_not_stall_a_request_that_fits_alone(seed):
    """Two page classes, and short requests whose pages are between those of the long one.

    After the short ones are preempted, the long one's window pages occupy more slabs than they
    fill, and no slab is free for its other pages.
    """
    rng = random.Random(seed)
    load = Load(
        page_tokens=2,
        window=100,
        eviction=EvictionSpec(cap=300, every=5),
        longest=83 + 139 - 1,
        max_num_seqs=40,
        chunk_tokens=16,
    )
    load.submit(83, 139)
    for _ in range(39):
        load.submit(rng.randint(1, 40), rng.randint(1, 120))

    load.run()


def test_new_requests_do_not_starve_an_atomic_chunk():
    """Its chunks of 10 tokens fill a step of 10: none is scheduled while other requests decode."""
    load = Load(
        page_tokens=1,
        window=None,
        eviction=EvictionSpec(cap=20, every=10),
        longest=20,
        room=3,
        max_num_seqs=3,
        max_num_batched_tokens=10,
    )
    load.submit(1, 5)
    long = load.submit(60, 1)
    short = [load.submit(1, 4 + i % 3) for i in range(60)]

    while long.progress.state is not RequestState.FINISHED:
        assert load.step()

    assert sum(request.progress.state is RequestState.FINISHED for request in short) < 4
    load.run()


def test_prompt_tokens_scored_per_step_are_bounded():
    load = Load(
        page_tokens=16, window=None, eviction=EvictionSpec(), longest=600, room=8, max_num_seqs=8
    )
    for max_tokens in (0, 1, 2, 0):
        load.submit(600, max_tokens, prompt_logprobs=0)
    load.submit(600, 1)

    while load.scheduler.has_work:
        plan = load.scheduler.schedule()
        parts = zip(plan.requests, plan.tokens, strict=True)
        assert sum(n for r, n in parts if r.scores_prompt) <= SCORED_TOKENS
        load.process(plan)


def test_typical_step_passes_few_files():
    calls = recorded_calls()
    decoding, prefill = typical(calls[DECODE_ONLY]), typical(calls[WITH_PREFILL])
    of_scheduler = [name for name in prefill.functions if name.startswith("scheduler/")]

    assert len(decoding.functions) <= 10
    assert len(prefill.functions) <= 18
    assert len(of_scheduler) <= 10
