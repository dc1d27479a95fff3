"""The scheduler under random load: no request lost, no page leaked, no watermark broken.

Torch-free: a memory without bytes, and an evictor that keeps slots by number.
"""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.engine.request import Request, RequestGroup, RequestState
from quire.engine.sampling_params import SamplingParams
from quire.engine.schedule_config import ScheduleConfig
from quire.engine.scheduler import Scheduler
from quire.errors import NeverFits, PolicyError, RequestError
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
            self.submit_one(self.request(prompt, answer, priority), breaks=breaks)

    def request(self, prompt, answer, priority) -> Request:
        self.arrivals += 1
        params = SamplingParams(max_tokens=answer, prompt_logprobs=0 if answer == 0 else None)
        return Request(
            request_id=f"r{self.arrivals}",
            prompt_token_ids=[1] * prompt,
            params=params,
            priority=priority,
            arrival=self.arrivals,
        )

    def submit_one(self, request, *, breaks=False) -> bool:
        try:
            self.scheduler.submit(request)
        except NeverFits:
            if request.group is None:
                needed = self.scheduler.peaks.peak_bytes(request.final_tokens)
                assert needed > self.memory.total_bytes - self.memory.arena.slab_bytes * 2
            return False
        self.requests[request.request_id] = request
        if breaks and self.arrivals % 7 == 0:
            self.broken.add(request.request_id)
        return True

    @rule(
        prompt=st.integers(1, 40),
        answer=st.integers(1, 30),
        priority=st.integers(-1, 1),
        width=st.integers(2, 4),
        atomic=st.booleans(),
    )
    def submit_group(self, prompt, answer, priority, width, atomic):
        members = [self.request(prompt, answer, priority) for _ in range(width)]
        group = RequestGroup(members[0].request_id, atomic=atomic)
        if atomic:
            group.members, group.spare = members[:1], members[1:]
        else:
            group.members = members
        for member in members:
            member.group = group
        if atomic and width > min(self.config.max_running, self.config.step_tokens):
            with pytest.raises(RequestError, match=r"max_running|step_tokens"):
                self.scheduler.submit(members[0])
        elif self.submit_one(members[0]):
            self.requests |= {member.request_id: member for member in group.members}
            assert not atomic or members[0].group is group

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
        copies = [planned.child for planned in self.scheduler.commit(plan)]
        ready = [r for r in [*plan.requests, *copies] if r.num_uncomputed == 0]
        for group in {id(r.group): r.group for r in ready if r.group and r.group.atomic}.values():
            assert all(member in ready for member in group.members)
            self.branch(group)
            ready = [*(r for r in ready if r.group is not group), *group.members]
        for request in ready:
            if request.state is RequestState.RUNNING:
                self.answer(request, stop_early=stop_early)
        return sum(plan.tokens) + len(failed)

    def branch(self, group: RequestGroup) -> None:
        """What beams do: some are continued twice, others by nobody."""
        width = group.num_rows
        heir = len(group.members[0].output_token_ids) % len(group.members)
        parents = [*range(len(group.members)), *[heir] * width][:width]
        parents[-1] = heir
        before = [list(member.output_token_ids) for member in group.members]
        for member in group.members:
            del self.requests[member.request_id]
        self.scheduler.branch(group, parents)
        self.requests |= {member.request_id: member for member in group.members}

        assert [member.output_token_ids for member in group.members] == [before[p] for p in parents]
        assert len({member.row for member in group.members}) == width

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
            # members of a group part at some token, or never
            place = request.group.members.index(request) if request.group else 0
            request.output_token_ids.append(2 + place * (len(request.output_token_ids) % 3))
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
        copies = [
            planned.child
            for group in {id(r.group): r.group for r in running if r.group}.values()
            for planned in group.forks
        ]
        units = {id(r.group or r) for r in waiting if r not in copies}
        assert self.scheduler.num_waiting == len(units)
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
