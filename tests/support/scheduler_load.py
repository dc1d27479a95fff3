"""A scheduler under load, with invariants that are checked after every step.

Torch-free: a KV memory without bytes, an evictor that retains the newest slots, and swap space
whose copies move no bytes and raise on request.
"""

import logging
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import numpy as np
import pytest

from quire.config.sampling_params import SamplingParams
from quire.errors import NeverFits, PolicyError, RequestError
from quire.kv.compaction import commit_compaction, plan_compaction
from quire.kv.memory import KVMemory
from quire.kv.prefix import PrefixIndex
from quire.layout.codec_names import codec_spec
from quire.layout.eviction import (
    KEEP_ALL,
    PREFILL_AND_DECODE,
    PRESSURE,
    SCHEDULES,
    UNLIMITED,
    EvictionSpec,
)
from quire.layout.layout import statistics_name, statistics_used
from quire.layout.model import StateSpec
from quire.layout.pages import NUMBERS, CacheLayout, LaneGroup, PageClass, PlaneSpec, kv_pages
from quire.layout.statistics import AttentionSum, QueryRing
from quire.offload.kv.offloaded_prefixes import OffloadedPrefixes
from quire.offload.kv.offloader import PrefixOffloader
from quire.offload.swap.host_pool import HostPool, NoCopies
from quire.plan.preemption_costs import LearnedCosts
from quire.plan.rates import CopyRate, CopyRates, Costs, PrefillRates
from quire.scheduler.batchers import parse_batcher
from quire.scheduler.events import EventLog
from quire.scheduler.eviction_trace import EvictionEntry
from quire.scheduler.forks import NO_PAGES
from quire.scheduler.lanes import Evicted, Evictor, Slots
from quire.scheduler.peaks import need_of
from quire.scheduler.preemption import Swapper
from quire.scheduler.request import (
    Request,
    RequestGroup,
    RequestState,
    distinct_bytes,
    have_moved_on,
)
from quire.scheduler.schedule_config import ScheduleConfig
from quire.scheduler.scheduler import SCALED_DOWN, Scheduler, scheduler_of
from quire.scheduler.sequence_memory import SequenceMemory
from quire.scheduler.step import StepPlan
from quire.tenancy.tenants import PUBLIC
from support.requests import make_request

COPIES = CopyRate(bytes_per_s=1e6, call_s=1e-4)  # equal cost in both directions
COSTS = Costs(
    copies=CopyRates(out=COPIES, back=COPIES), prefill=PrefillRates(token_s=1e-4), chunk_tokens=16
)
REASONS_WITHOUT_PROGRESS = (
    *("no running request could be scheduled", "another engine needs its guaranteed memory"),
    *("its tenant would exceed its limit", "an urgent request is waiting"),
    SCALED_DOWN,
    NO_PAGES,
)


SUMS, RING = AttentionSum(), QueryRing(window=4)
MIN_PAGES_WITH_STATISTICS = 8  # some are lost to rounding to slabs


def make_layout(
    page_tokens: int,
    window: int | None,
    *,
    evicting: bool,
    with_statistics: bool = False,
    with_states: bool = False,
) -> CacheLayout:
    numbers = codec_spec("float32")
    plain = partial(kv_pages, key=numbers, value=numbers, head_dim=4, heads=2, tokens=page_tokens)
    full = plain(positions=evicting)
    groups = [LaneGroup(name="full", page_class=full, layers=(0, 1), ordered=not evicting)]
    if window is not None:
        groups.append(LaneGroup(name="window", page_class=plain(), layers=(2,), window=window))
    if with_statistics:
        shape = PageClass(planes=(PlaneSpec(NUMBERS, numbers, 1, 2),), tokens=page_tokens)
        sums, ring = (statistics_name("full", statistic) for statistic in (SUMS, RING))
        groups += [
            LaneGroup(name=sums, page_class=shape, layers=(0, 1), of="full", statistic=SUMS),
            LaneGroup(name=ring, page_class=shape, layers=(0, 1), records=4, statistic=RING),
        ]
    if with_states:
        state = StateSpec(conv=(6, 3), recurrent=(2, 5, 4))
        planes = tuple(
            PlaneSpec(name, numbers, shape[-1], prod(shape[:-1]) // 2)
            for name, shape in state.shapes.items()
        )
        pages, lanes = PageClass(planes=planes, tokens=1), {"lanes_per_layer": 2, "records": 1}
        states = LaneGroup(name="state", page_class=pages, layers=(3, 4), state=state, **lanes)
        groups.append(states)
    return CacheLayout(tuple(groups))


class FailingCopies(NoCopies):
    """Copies that raise once, after `fail_after` calls."""

    def __init__(self) -> None:
        self.fail_after: int | None = None

    def wait(self) -> None:
        if self.fail_after is not None:
            self.fail_after -= 1
            if self.fail_after < 0:
                self.fail_after = None
                raise OSError("the link failed")


class RetainsNewest(Evictor):
    """An evictor that retains the newest slots; the policies of `broken` request ids raise."""

    def __init__(self, memory: KVMemory, broken: Container[str] = ()) -> None:
        self.memory, self.broken = memory, broken

    def evict(
        self, request: Request, keep: Slots, *, min_gain: int | None = None
    ) -> Evicted | None:
        if request.request_id in self.broken:
            raise PolicyError("broken on purpose")
        held = self.memory.tables["full"].num_slots[request.memory.row]
        keep = np.where(keep < 0, held, keep)
        assert ((keep > 0) & (keep <= held))[held > 0].all()
        counts = (held - keep).astype(np.int32)
        if not self._evict_oldest(request, counts, min_gain):
            return None
        left = np.zeros(counts.sum(), dtype=np.int32)
        computed = int(self.memory.lengths[request.memory.row])
        return Evicted(len(left), len(counts), EvictionEntry(computed, counts, left))

    def repeat(self, request: Request, entry: EvictionEntry) -> None:
        assert entry.num_computed == request.progress.num_computed
        assert self._evict_oldest(request, entry.counts, None)

    def finalize(self, request: Request) -> None:
        """Bound every second lane by the cap, and none of the others."""
        spec = request.eviction.spec
        assert spec.from_prompt, "other caps are final already"
        if spec.lane_capacities is not None:
            caps = tuple(
                UNLIMITED if lane % 2 else spec.cap or 0
                for lane in range(len(spec.lane_capacities))
            )
            request.eviction.spec = replace(spec, lane_capacities=caps)

    def _evict_oldest(self, request: Request, counts: Slots, min_gain: int | None) -> bool:
        slots = np.arange(self.memory.tables["full"].num_slots[request.memory.row].max())
        mask = slots >= counts[:, None]
        plan = plan_compaction(self.memory, "full", request.memory.row, mask)
        if min_gain is not None and plan.gain_bytes < min_gain:
            return False
        commit_compaction(self.memory, plan)
        return True


def make_scheduler(
    memory: KVMemory, config: ScheduleConfig, evictor: Evictor | None = None
) -> Scheduler:
    return scheduler_of(config, SequenceMemory(memory), evictor)


def advance(scheduler: Scheduler, share: float = 1.0) -> StepPlan:
    """Run one step of single requests, whose outputs end at `share` of `max_tokens`."""
    plan = scheduler.schedule()
    scheduler.commit(plan)
    for request in plan.requests:
        if request.num_uncomputed == 0:
            request.output_token_ids.append(2)
            if len(request.output_token_ids) >= share * request.params.max_tokens:
                scheduler.finish(request)
    return plan


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Options of one scheduler and its KV memory.

    Attributes:
        mixed: requests have eviction rules of their own, with all schedules.
        pages, host_pages: arena and swap space in sequences of one page of tokens.
        shares: whether there is a prefix cache.
        guaranteed, burst: memory of tenants a and b in percent of the arena; None: one tenant.
        offload_bytes: memory for offloaded KV; 0: no KV offload.
        checkpoints: most checkpoints of states and statistics at once; None: no limit.
        checkpoint_blocks: blocks between checkpoints; 0: only those of `SequenceMemory`.
    """

    page_tokens: int = 3
    window: int | None = None
    cap: int | None = None
    mixed: bool = False
    with_statistics: bool = False
    pages: int = 20
    max_num_batched_tokens: int = 16
    chunk_tokens: int = 200
    max_num_seqs: int = 10
    shares: bool = False
    host_pages: int = 0
    preempt: str = "auto"
    guaranteed: int | None = None
    burst: int = 100
    admission: str = "optimistic"
    high_watermark: float = 1.0
    batcher: str = "continuous"
    urgent: int | None = None
    scale_down_at: float | None = None
    offload_bytes: int = 0
    with_states: bool = False
    checkpoints: int | None = None
    checkpoint_blocks: int = 0


class SchedulerLoad:
    """Drives a scheduler and checks its invariants.

    Attributes:
        requests: unfinished requests by id.
        without_progress: preemptions of requests that had computed no token since they resumed.
    """

    def __init__(self, setting: Setting, memory: KVMemory | None = None) -> None:
        every, cap = 2 if setting.cap == 6 else 7, setting.cap
        with_statistics = setting.with_statistics and cap is not None
        statistics = (SUMS, RING) if with_statistics else ()
        spec = partial(EvictionSpec, every=every, statistics=statistics)
        self.evictions = [KEEP_ALL if cap is None else spec(cap=cap)]
        if setting.mixed and cap is not None:
            schedules = [spec(cap=cap + 2, when=when) for when in SCHEDULES]
            self.evictions += [KEEP_ALL, *schedules]
        self.memory = memory or self._make_memory(setting, with_statistics=with_statistics)
        self.config = self._config(setting, every)
        self.copies = FailingCopies()
        pool_bytes = self.memory.layout.smallest_sequence_bytes * setting.host_pages
        self.pool = HostPool(pool_bytes, self.copies) if pool_bytes else None
        self.broken: set[str] = set()
        self._branching: RequestGroup | None = None
        self.scheduler = self._scheduler(setting)
        self.requests: dict[str, Request] = {}
        self.arrivals = self.num_steps = self.processed_tokens = self.without_progress = 0
        # copy errors are intended
        logging.getLogger("quire.scheduler.preemption").disabled = True

    def _make_memory(self, setting: Setting, *, with_statistics: bool) -> KVMemory:
        kinds = {"with_statistics": with_statistics, "with_states": setting.with_states}
        evicts = setting.cap is not None
        layout = make_layout(setting.page_tokens, setting.window, evicting=evicts, **kinds)
        rows = parse_batcher(setting.batcher).num_rows(setting.max_num_seqs)
        pages = max(setting.pages, MIN_PAGES_WITH_STATISTICS) if with_statistics else setting.pages
        return KVMemory(layout, layout.smallest_sequence_bytes * pages, rows)

    def _config(self, setting: Setting, every: int) -> ScheduleConfig:
        # a chunk under eviction is atomic: a step must be able to hold one
        budget = max(setting.max_num_batched_tokens, 0 if setting.cap is None else every)
        tenants, percent = "", self.memory.total_bytes // 100
        if setting.guaranteed is not None:
            guaranteed_bytes, burst_bytes = percent * setting.guaranteed, percent * setting.burst
            tenants = f"a:weight=2,guaranteed={guaranteed_bytes}B;b:burst={burst_bytes}B"
        same = ("max_num_seqs", "chunk_tokens", "admission", "high_watermark", "batcher")
        return ScheduleConfig(
            **{name: getattr(setting, name) for name in (*same, "scale_down_at")},
            max_num_batched_tokens=budget,
            tenants=tenants,
            low_watermark=min(0.99, setting.high_watermark),
            preempt=setting.preempt if setting.host_pages else "recompute",
            urgent=setting.urgent if budget > setting.max_num_seqs else None,
        )

    def _scheduler(self, setting: Setting) -> Scheduler:
        memory, config = self.memory, self.config
        prefix = None
        if setting.shares:
            private = (g.bytes_at_most(1, 1) for g in memory.layout.groups if g.private)
            most = None if setting.checkpoints is None else setting.checkpoints * sum(private)
            prefix = PrefixIndex(memory, snapshot_bytes=most)
        checkpoint_tokens = setting.checkpoint_blocks * setting.page_tokens
        sequence_memory = SequenceMemory(memory, prefix, checkpoint_tokens=checkpoint_tokens)
        running = list[Request]()
        prefix_offloader = self._prefix_offloader(setting.offload_bytes, sequence_memory, running)
        sequence_memory.attach(prefix_offloader=prefix_offloader)
        swapper = Swapper(memory, self.pool, LearnedCosts(COSTS), config.preempt)
        evictor = RetainsNewest(memory, self.broken)
        scheduler = scheduler_of(config, sequence_memory, evictor, swapper, running=running)
        preempt = scheduler.preempter.preempt

        def checked_preempt(requests: list[Request], reason: str, **options: bool) -> None:
            if not all(map(self._has_moved_on, requests)):
                self.without_progress += 1
                assert reason in REASONS_WITHOUT_PROGRESS
            preempt(requests, reason, **options)

        scheduler.preempter.preempt = checked_preempt
        return scheduler

    def _has_moved_on(self, request: Request) -> bool:
        """Whether a request has computed tokens since it resumed.

        Beams that branch have: their sampled tokens are appended after the branch, also if they are
        preempted because there are no pages for the forks.
        """
        branches = self._branching is not None and request.group is self._branching
        return branches or have_moved_on(request)

    def _prefix_offloader(
        self, offload_bytes: int, sequence_memory: SequenceMemory, running: list[Request]
    ) -> PrefixOffloader | None:
        if not offload_bytes:
            return None
        prefixes = OffloadedPrefixes(self.memory, HostPool(offload_bytes, NoCopies()))
        parts = {"sequence_memory": sequence_memory, "running": running}
        bounds = {"offload_bytes": offload_bytes}
        return PrefixOffloader(self.memory, prefixes, EventLog(), **parts, **bounds)

    # ---- requests ------------------------------------------------------------------------------

    def request(
        self, prompt_tokens: int, max_tokens: int, priority: int = 0, *, text: int = 1
    ) -> Request:
        """Make a request; prompts of equal length have the same first half.

        `text` is the token id of the second half, and selects the tenant; 0 `max_tokens` requests
        prompt logprobs.
        """
        self.arrivals += 1
        half, prompt_logprobs = prompt_tokens // 2, 0 if max_tokens == 0 else None
        eviction = self.evictions[self.arrivals % len(self.evictions)]
        return make_request(
            request_id=f"r{self.arrivals}",
            prompt_token_ids=[1] * half + [text] * (prompt_tokens - half),
            params=SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs),
            priority=priority,
            arrival=self.arrivals,
            tenant="ab"[text % 2] if self.config.tenants else "default",
            eviction=eviction,
            statistics=statistics_used(self.memory.layout, eviction.statistics),
        )

    def submit(self, request: Request, *, policy_raises: bool = False) -> bool:
        """Submit a request; return False if it is refused, and check that it can never fit."""
        try:
            self.scheduler.submit(request)
        except NeverFits:
            self._check_refusal(request)
            return False
        self.requests[request.request_id] = request
        if policy_raises and self.arrivals % 7 == 0:
            self.broken.add(request.request_id)
        return True

    def _check_refusal(self, request: Request) -> None:
        needed = self.scheduler.peaks.peak_bytes(need_of(request, request.final_tokens))
        limit = self.scheduler.fairness.accounts.spec(request.tenant).limit_bytes
        too_much = self.memory.total_bytes - self.memory.arena.slab_bytes * 2
        bounded = limit is not None and needed > limit
        assert request.group is not None or needed > too_much or bounded

    def submit_group(self, members: list[Request], *, atomic: bool) -> None:
        group = RequestGroup(members[0].request_id, atomic=atomic)
        if atomic:
            group.members, group.spare = members[:1], members[1:]
        else:
            group.members = members
        for member in members:
            member.group, member.eviction.spec = group, members[0].eviction.spec
            member.memory.statistics = members[0].memory.statistics
        limits = self.config.max_num_seqs, self.config.max_num_batched_tokens
        if atomic and len(members) > min(limits):
            with pytest.raises(RequestError, match=r"max_num_seqs|max_num_batched_tokens"):
                self.scheduler.submit(members[0])
        elif self.submit(members[0]):
            submitted = group.members if members[0].group is group else members
            self.requests |= {member.request_id: member for member in submitted}
            assert not atomic or members[0].group is group

    def cancel(self, pick: int) -> None:
        key = sorted(self.requests)[pick % len(self.requests)]
        self.scheduler.finish(self.requests.pop(key))

    # ---- steps ---------------------------------------------------------------------------------

    def step(self, *, stop_early: bool = False, served: dict[str, float] | None = None) -> int:
        """Run a step; return its scheduled tokens and failed requests; add up `served`."""
        plan, num_failed = self._schedule()
        for request, tokens in zip(plan.requests, plan.tokens, strict=True):
            if served is not None:
                served[request.tenant] += tokens
        try:
            copies = [planned.child for planned in self.scheduler.commit(plan)]
        except PolicyError:  # raised while the layers of a prompt were cut
            assert self.scheduler.fail_by_layer(plan)
            self._take_failures()
            return sum(plan.tokens)
        ready = [r for r in [*plan.requests, *copies] if _is_ready(r)]
        beams = _beams_of(ready)
        for request in ready:
            if request.group not in beams:
                self._append_output(request, stop_early=stop_early)
        for group in beams:
            if all(map(_is_ready, group.members)):  # false if a member has failed
                assert all(member in ready for member in group.members)
                self._branch(group)
                for member in list(group.members):
                    self._append_output(member, stop_early=stop_early)
        self.processed_tokens += sum(plan.tokens)
        return sum(plan.tokens) + num_failed

    def _schedule(self) -> tuple[StepPlan, int]:
        self.num_steps += 1
        plan = self.scheduler.schedule()
        failed = self._take_failures()
        assert plan.requests or failed or not self.scheduler.has_work
        assert len(set(map(id, plan.requests))) == len(plan.requests)
        # a prompt that is computed layer by layer is one chunk of any size
        whole = plan.by_layer is not None and len(plan.requests) == plan.num_decoding + 1
        assert whole or sum(plan.tokens) <= self.config.max_num_batched_tokens
        assert plan.num_decoding <= self.config.max_num_seqs
        self._check_plan(plan)
        return plan, failed

    def _take_failures(self) -> int:
        failed = self.scheduler.take_failures()
        for failure in failed:
            request_id = failure.request.request_id
            assert request_id in self.broken
            assert self.requests.pop(request_id).progress.state is RequestState.FINISHED
        return len(failed)

    def fail_step(self, *, planning: bool) -> None:
        """Roll back a step that raised while it ran, or while it was planned."""
        plan, _ = self._schedule()
        self.scheduler.roll_back(StepPlan() if planning else plan)

    def _branch(self, group: RequestGroup) -> None:
        """Branch beams: one parent is continued several times, others may be dropped."""
        width = group.num_rows
        repeated = len(group.members[0].output_token_ids) % len(group.members)
        parents = [*range(len(group.members)), *[repeated] * width][:width]
        parents[-1] = repeated
        before = [list(member.output_token_ids) for member in group.members]
        for member in group.members:
            del self.requests[member.request_id]
        self._branching = group
        self.scheduler.branch(group, parents)
        self._branching = None
        self.requests |= {member.request_id: member for member in group.members}

        assert [member.output_token_ids for member in group.members] == [before[p] for p in parents]
        rows = [member.memory.row for member in group.members if member.memory.row >= 0]
        together = len(set(rows)) == width
        assert together or not rows  # without pages for a fork all members wait
        assert all((m.progress.state is RequestState.RUNNING) == together for m in group.members)

    def _check_plan(self, plan: StepPlan) -> None:
        if plan.by_layer is not None:  # it allocates its pages while the step runs
            assert self.memory.fits(plan.by_layer.promised_pages)
        for request, tokens in zip(plan.requests, plan.tokens, strict=True):
            assert request.progress.state is RequestState.RUNNING
            assert 1 <= tokens <= request.num_uncomputed
            held = tokens + plan.scoring.get(request, 0)
            assert self.memory.lengths[request.memory.row] == request.progress.num_computed + held
            self._check_lanes(request, request.progress.num_computed + held)

    def _check_lanes(self, request: Request, tokens: int) -> None:
        """Check that no lane exceeds its eviction schedule, and that others hold all tokens."""
        held = self.memory.tables["full"].num_slots[request.memory.row]
        if request.eviction.spec.cap is None:
            assert (held == tokens).all()
        elif request.eviction.spec.when != PRESSURE:
            spec, prompt_tokens = request.eviction.spec, len(request.prompt_token_ids)
            caps = spec.lane_capacities or (spec.cap,) * len(held)
            peaks = [spec.lane_peak_tokens(cap, tokens, prompt_tokens) for cap in caps]
            assert (held <= peaks).all()
        if request.eviction.spec.when == PREFILL_AND_DECODE and request.eviction.spec.cap:
            assert (held <= request.eviction.spec.cap).all()

    def _append_output(self, request: Request, *, stop_early: bool) -> None:
        if request.params.max_tokens:
            # outputs of a group differ from some token on, or never; beams always differ
            index = request.group.members.index(request) if request.group else 0
            is_beam = bool(request.group and request.group.atomic)
            step = 1 if is_beam else len(request.output_token_ids) % 3
            request.output_token_ids.append(2 + index * step)
        done = len(request.output_token_ids) >= request.params.max_tokens
        if done or (stop_early and len(request.output_token_ids) % 5 == 4):
            self.scheduler.finish(request)
            del self.requests[request.request_id]

    # ---- invariants ----------------------------------------------------------------------------

    def check(self) -> None:
        """Check that no request is lost and no page is leaked or held twice."""
        self.memory.check()
        self._check_queues()
        self._check_host()
        self._check_accounts()
        self._check_snapshots()

    def _check_snapshots(self) -> None:
        """Check that every snapshot in the prefix cache is counted once, within the limit."""
        prefix = self.scheduler.sequence_memory.prefix
        if prefix is None:
            return
        found = [copy for node in prefix.nodes() for copy in node.statistics.values()]
        tables, limit_bytes = self.memory.tables, prefix.snapshots.max_bytes
        num_bytes = sum(
            numbers.size * tables[name].group.page_class.page_bytes
            for copy in found
            for name, numbers in copy.pages.items()
        )
        assert (len(found), num_bytes) == (len(prefix.snapshots), prefix.snapshots.num_bytes)
        assert limit_bytes is None or num_bytes <= limit_bytes
        assert prefix.snapshots.free_bytes == num_bytes  # none is pinned between steps

    def _check_queues(self) -> None:
        running = self.scheduler.running
        waiting = [r for r in self.requests.values() if r.progress.state is RequestState.WAITING]
        assert len(running) <= self.config.num_rows
        assert {r.request_id for r in [*running, *waiting]} == set(self.requests)
        groups = {id(r.group): r.group for r in running if r.group}.values()
        copies = [planned.child for group in groups for planned in group.forks]
        units = {id(r.group or r) for r in waiting if r not in copies}
        assert self.scheduler.num_waiting == len(units)
        assert sorted(r.memory.row for r in running) == self.memory.live_rows.tolist()
        assert all(r.memory.row == -1 for r in waiting)

    def _check_host(self) -> None:
        """Check that all swapped KV belongs to an unfinished request and is counted once."""
        memories = [r.memory for r in self.requests.values()]
        swapped = {id(m.swapped): m.swapped for m in memories if m.swapped}
        if self.pool is None:
            assert not swapped
            return
        self.pool.check()
        for request in self.scheduler.running:  # may have a swapped tail, with its head recomputed
            assert request.memory.swapped is None or request.memory.swapped.keep_from
        assert self.pool.used_bytes == sum(s.num_bytes for s in swapped.values())
        if not self.requests:
            assert not self.pool.used_bytes

    def _check_accounts(self) -> None:
        """Check that tenants' accounts add up to all referenced pages, each counted once."""
        fairness, running = self.scheduler.fairness, self.scheduler.running
        fairness.recount(running)
        if fairness.has_several:
            held = sum(map(fairness.accounts.held_bytes, ["a", "b", PUBLIC]))
            assert held == distinct_bytes(self.memory, [r.memory.row for r in running])

    def drain(self) -> None:
        idle_steps, limit = 0, self.num_steps + self._step_limit()
        while self.scheduler.has_work:
            idle_steps = 0 if self.step() else idle_steps + 1
            assert idle_steps < 3, "no progress"
            assert self.num_steps < limit, "thrashing"
        assert not self.requests
        self.check()
        self.scheduler.sequence_memory.drop_cached()
        assert self.memory.arena.num_free_slabs == self.memory.arena.num_slabs
        assert not self.memory.cached_references
        assert self.pool is None or not self.pool.used_bytes

    def _step_limit(self) -> int:
        """A step count that is ample even if requests ran one after the other."""
        return 100 + 20 * sum(request.final_tokens for request in self.requests.values())


def _is_ready(request: Request) -> bool:
    return request.progress.state is RequestState.RUNNING and request.num_uncomputed == 0


def _beams_of(requests: Iterable[Request]) -> list[RequestGroup]:
    groups = {id(r.group): r.group for r in requests if r.group and r.group.atomic}
    return list(groups.values())
