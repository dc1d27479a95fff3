"""The scheduler under random load: no request lost, no page leaked, no watermark broken.

Torch-free: a memory without bytes, and an evictor that keeps slots by number.
"""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.engine.request import Request, RequestState
from quire.engine.sampling_params import SamplingParams
from quire.engine.schedule_config import ScheduleConfig
from quire.engine.scheduler import Scheduler
from quire.errors import NeverFits, PolicyError
from quire.kv.compaction import commit_compaction, plan_compaction
from quire.kv.memory import KVMemory
from quire.spec.eviction import EvictionSpec
from quire.spec.pages import CacheLayout, LaneGroup, PageClass, codec_spec


def make_layout(page_tokens: int, window: int | None, *, evicting: bool) -> CacheLayout:
    numbers = codec_spec("float32")
    full = PageClass(
        key=numbers, value=numbers, head_dim=4, heads=2, tokens=page_tokens, positions=evicting
    )
    groups = [LaneGroup(name="full", page_class=full, layers=(0, 1), ordered=not evicting)]
    if window is not None:
        ordered = PageClass(key=numbers, value=numbers, head_dim=4, heads=2, tokens=page_tokens)
        groups.append(LaneGroup(name="window", page_class=ordered, layers=(2,), window=window))
    return CacheLayout(tuple(groups))


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        page_tokens=st.sampled_from([1, 3, 8]),
        window=st.sampled_from([None, 1, 5]),
        cap=st.sampled_from([None, 6, 20]),
        pages=st.integers(3, 12) | st.integers(12, 60),
        step_tokens=st.sampled_from([1, 5, 16, 200]),
        chunk_tokens=st.sampled_from([2, 200]),
        max_running=st.sampled_from([1, 3, 10]),
    )
    def build(self, page_tokens, window, cap, pages, step_tokens, chunk_tokens, max_running):
        every = 2 if cap == 6 else 7
        self.eviction = EvictionSpec() if cap is None else EvictionSpec(cap=cap, every=every)
        layout = make_layout(page_tokens, window, evicting=cap is not None)
        self.memory = KVMemory(layout, layout.smallest_sequence_bytes * pages, max_running)
        # a chunk under eviction is atomic: a step must have room for one
        budget = max(step_tokens, every) if cap is not None else step_tokens
        self.config = ScheduleConfig(
            max_running=max_running, step_tokens=budget, chunk_tokens=chunk_tokens
        )
        self.scheduler = Scheduler(self.memory, self.config, self.eviction, self.evict)
        self.requests: dict[str, Request] = {}
        self.broken: set[str] = set()
        self.arrivals = 0

    def evict(self, request: Request, keep: int) -> None:
        if request.request_id in self.broken:
            raise PolicyError("broken on purpose")
        table = self.memory.tables["full"]
        slots = int(table.num_slots[request.row].max())
        mask = np.zeros((table.group.num_lanes, slots), dtype=bool)
        mask[:, slots - keep :] = True
        commit_compaction(self.memory, plan_compaction(self.memory, "full", request.row, mask))

    @rule(
        prompt=st.integers(1, 6) | st.integers(1, 60),  # short ones enter together and outgrow
        answer=st.integers(0, 40),
        priority=st.integers(-1, 1),
        breaks=st.booleans(),
        count=st.integers(1, 3),
    )
    def submit(self, prompt, answer, priority, breaks, count):
        for _ in range(count):
            self.submit_one(prompt, answer, priority, breaks=breaks)

    def submit_one(self, prompt, answer, priority, *, breaks):
        self.arrivals += 1
        params = SamplingParams(max_tokens=answer, prompt_logprobs=0 if answer == 0 else None)
        request = Request(
            request_id=f"r{self.arrivals}",
            prompt_token_ids=[1] * prompt,
            params=params,
            priority=priority,
            arrival=self.arrivals,
        )
        try:
            self.scheduler.submit(request)
        except NeverFits:
            needed = self.scheduler.peaks.peak_bytes(request.final_tokens)
            assert needed > self.memory.total_bytes - self.memory.arena.slab_bytes * 2
            return
        self.requests[request.request_id] = request
        if breaks and self.arrivals % 7 == 0:
            self.broken.add(request.request_id)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data):
        key = data.draw(st.sampled_from(sorted(self.requests)))
        self.scheduler.finish(self.requests.pop(key))

    @rule(stop_early=st.booleans(), steps=st.integers(1, 8))
    def run(self, stop_early, steps):
        for _ in range(steps):
            self.step(stop_early=stop_early)

    def step(self, *, stop_early: bool) -> int:
        plan = self.scheduler.schedule()
        failed = self.scheduler.failures.copy()
        self.scheduler.failures.clear()
        for request, _ in failed:
            assert request.request_id in self.broken
            assert self.requests.pop(request.request_id).state is RequestState.FINISHED
        assert plan.requests or failed or not self.scheduler.has_work
        assert len(set(map(id, plan.requests))) == len(plan.requests)
        assert sum(plan.tokens) <= self.config.step_tokens
        self.check_plan(plan)
        self.scheduler.commit(plan)
        for request in plan.requests:
            if request.num_uncomputed == 0:
                self.answer(request, stop_early=stop_early)
        return sum(plan.tokens) + len(failed)

    def check_plan(self, plan) -> None:
        for request, tokens in zip(plan.requests, plan.tokens, strict=True):
            assert request.state is RequestState.RUNNING
            assert 1 <= tokens <= request.num_uncomputed
            assert self.memory.lengths[request.row] == request.num_computed + tokens
            held = self.memory.tables["full"].num_slots[request.row]
            cap = self.eviction.cap
            assert (held <= cap if cap else held == request.num_computed + tokens).all()

    def answer(self, request: Request, *, stop_early: bool) -> None:
        if request.params.max_tokens:
            request.output_token_ids.append(2)
        done = len(request.output_token_ids) >= request.params.max_tokens
        if done or (stop_early and len(request.output_token_ids) % 5 == 4):
            self.scheduler.finish(request)
            del self.requests[request.request_id]

    @invariant()
    def nothing_is_lost_or_leaked(self):
        if not hasattr(self, "scheduler"):
            return
        self.memory.check()
        running = self.scheduler.running
        waiting = [r for r in self.requests.values() if r.state is RequestState.WAITING]
        assert len(running) <= self.config.max_running
        assert {r.request_id for r in [*running, *waiting]} == set(self.requests)
        assert self.scheduler.num_waiting == len(waiting)
        assert sorted(r.row for r in running) == self.memory.live_rows.tolist()
        assert all(r.row == -1 for r in waiting)

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        idle = 0
        while self.scheduler.has_work:
            idle = 0 if self.step(stop_early=False) else idle + 1
            assert idle < 3, "no progress"
        assert not self.requests
        assert self.memory.arena.num_free_slabs == self.memory.arena.num_slabs


TestScheduler = SchedulerMachine.TestCase
