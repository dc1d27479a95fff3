"""What each step does: who decodes, which prompts are read on, who enters, who gives way.

    a step's tokens  | decoding rows, one token each | chunks of prompts being read | newcomers |
                     |<----------------------- step_tokens at most ------------------------->|

Torch-free: the scheduler knows token counts, pages and the memory's bookkeeping. Evicting is asked
of a callback, because which tokens leave depends on tensors; how many leave does not.
"""

from collections.abc import Callable, Iterator, Sequence

from quire.engine.admission.peaks import Peaks
from quire.engine.admission.registry import make_admission
from quire.engine.chunks import ChunkSizes
from quire.engine.fair_queue import FairQueue
from quire.engine.group import (
    NO_LIMIT,
    branch,
    copies_to_come,
    dissolve,
    due_forks,
    leave,
    num_rows,
    plan_reading,
    readable_tokens,
    refuse_beams,
    reserved_rows,
    together,
    whole_groups,
)
from quire.engine.preemption.preempter import Preempter
from quire.engine.request import PlannedFork, Request, RequestGroup, RequestState
from quire.engine.residency import Residency
from quire.engine.schedule_config import ScheduleConfig
from quire.engine.step_plan import StepPlan
from quire.errors import OutOfPages, PolicyError
from quire.kv.memory import KVMemory
from quire.kv.prefix import PrefixLease
from quire.spec.eviction import EvictionSpec

Evictor = Callable[[Request, int], None]  # (request, slots to keep in every evicting lane)


class Scheduler:
    """Queues of requests over one KV memory.

    Args:
        memory: the pool.
        config: step and queue sizes.
        eviction: how many tokens a lane may hold, and how many leave at a time.
        evict: called before a request's lane would pass its cap.
        residency: requests' rows in the pool; by default nothing is shared.
        preempter: takes requests out that give way; by default they are computed again.
    """

    def __init__(
        self,
        memory: KVMemory,
        config: ScheduleConfig,
        eviction: EvictionSpec,
        evict: Evictor,
        *,
        residency: Residency | None = None,
        preempter: Preempter | None = None,
    ) -> None:
        self.memory, self.config, self.eviction = memory, config, eviction
        self.residency = residency or Residency(memory)
        self.chunks = ChunkSizes(config, eviction)
        self.peaks = Peaks(self.memory, eviction, self.chunks.longest)
        self.admission = make_admission(config.admission, self.peaks)
        self.preempter = preempter or Preempter(self.residency)
        self.running: list[Request] = []
        self.waiting = FairQueue()
        self.failures: list[tuple[Request, PolicyError]] = []  # for the engine to report
        self._evict = evict
        self._refused: tuple[object, ...] = ()  # when admission last said no

    # ---- queues --------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests that wait for room."""
        return len(self.waiting)

    @property
    def num_preemptions(self) -> int:
        """Times a request was taken out to make room."""
        return self.preempter.num_preemptions

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.running or len(self.waiting))

    def submit(self, request: Request) -> None:
        """Queue a request, or a group by its first member.

        Raises:
            NeverFits: it could not run even alone.
            RequestError: a search has more beams than can ever run.
        """
        refuse_beams(request, self.config, self.memory)
        shares = self.memory.placement.shares and num_rows(request) <= self.config.max_running
        sequences = [request] if shares and self.peaks.fit_whole(request) else dissolve(request)
        self.peaks.refuse_if_never(request)
        for sequence in sequences:
            self._wait(sequence)

    def finish(self, request: Request, reason: str = "finished") -> None:
        """End a request wherever it is, and free its pages at once."""
        queued = request in self.waiting
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
            self.residency.leave(request, reason)
            self.admission.learn(request)
        elif request.state is RequestState.WAITING:
            self.waiting.discard(request)
            self.preempter.forget(request)
        request.state = RequestState.FINISHED
        copies_wait = leave(request)
        if request.group is not None and request.group.members and (queued or copies_wait):
            self._leave_all(request, reason)  # another member is first now
            self._wait(request)

    def _leave_all(self, request: Request, reason: str) -> None:
        """Take what a request and its group hold away."""
        for member in together(request):
            if member.state is RequestState.RUNNING:
                self.running.remove(member)
                self.residency.leave(member, reason)

    def _preempt(self, request: Request, reason: str) -> None:
        """Take a request out to wait again: with its KV on the host, or to be read again.

        A group goes as one: pages that others still refer to would not come free.
        """
        for member in together(request):
            if member.state is RequestState.RUNNING:
                self.running.remove(member)
                self.preempter.take_out(member, reason)
        self._wait(request)

    def _wait(self, request: Request) -> None:
        """Let a request wait; a group waits in the place of its first member."""
        for member in together(request):
            member.state = RequestState.WAITING
        self.waiting.push(together(request)[0])

    def give_way(self) -> bool:
        """Free memory for another engine of a shared pool: cached prefixes, then who goes last.

        Returns:
            False when nothing is left to free.
        """
        if self.residency.idle_bytes:
            self.residency.drop_cached()
            return True
        last = max(self.running, key=lambda r: r.order, default=None)
        if last is not None:
            self._preempt(last, "another engine asked for its memory")
        return last is not None

    def take_back(self, plan: StepPlan) -> list[Request]:
        """A step has failed: those whose KV it was to write wait again, without KV.

        Args:
            plan: of the step; an empty one means that planning failed, which may be anybody's.

        Returns:
            The requests of the step.
        """
        failed = [r for r in plan.requests or self.running if r.state is RequestState.RUNNING]
        borrowed = [r for r in self.running if r not in failed and self._borrows_unwritten(r)]
        self.residency.withdraw()
        for request in failed + borrowed:
            if request.state is RequestState.RUNNING:  # else it went with its group
                self._leave_all(request, "step failed")
                self._wait(request)
        return failed

    def _borrows_unwritten(self, request: Request) -> bool:
        prefix, lease = self.residency.prefix, request.lease
        return prefix is not None and isinstance(lease, PrefixLease) and prefix.is_pending(lease)

    # ---- a step --------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan a step and make room for it. Rows that decode come first.

        Nobody enters while one that is in gets nothing: a chunk that must be read whole would wait
        for ever behind newcomers that take the rest of every step.
        """
        plan = StepPlan()
        self._respect_watermark()
        self._schedule_decoding(plan)
        budget = self.config.step_tokens - len(plan.requests)
        all_served = True
        for request in sorted(self._reading(plan), key=lambda r: r.order):
            tokens = self._schedule_chunk(plan, request, budget)
            budget -= tokens
            all_served &= tokens > 0
        while budget > 0 and all_served and (newcomer := self._let_in()) is not None:
            tokens = self._schedule_chunk(plan, newcomer, budget)
            budget -= tokens
            all_served = tokens > 0
        if not plan.requests and self.running:
            self._unblock(plan)
        return plan

    def commit(self, plan: StepPlan) -> list[PlannedFork]:
        """Note that the step's tokens have been processed; return the copies made then."""
        for request, tokens in zip(plan.requests, plan.tokens, strict=True):
            request.num_computed += tokens
        self.residency.confirm(plan.requests)
        made = [planned for request in plan.requests for planned in due_forks(request)]
        for planned in made:
            self.residency.copy(planned.parent, planned.child)
            self.running.append(planned.child)
        return made

    def branch(self, group: RequestGroup, parents: Sequence[int]) -> None:
        """Let member i of a running group become what member `parents[i]` is; see `group.branch`.

        Raises:
            OutOfPages: no pages for what cannot be shared.
        """
        for member in group.members:
            self.running.remove(member)
        branch(group, parents, self._drop, self.residency.copy)
        self.running.extend(group.members)

    def _drop(self, request: Request) -> None:
        self.residency.leave(request, "beam dropped")

    def _reading(self, plan: StepPlan) -> Iterator[Request]:
        """Running requests not yet in the plan that still read their prompt."""
        planned = set(map(id, plan.requests))
        return (r for r in self.running if id(r) not in planned and readable_tokens(r) > 0)

    # ---- decoding ------------------------------------------------------------------------------

    def _schedule_decoding(self, plan: StepPlan) -> None:
        decoding = whole_groups([r for r in self.running if r.num_tokens - r.num_computed == 1])
        if len(decoding) > self.config.step_tokens:
            decoding = sorted(decoding, key=lambda r: r.order)[: self.config.step_tokens]
            decoding = whole_groups(decoding)
        decoding = self._make_room(whole_groups(self._evict_full_lanes(decoding)))
        if decoding:
            ones = [1] * len(decoding)
            self.residency.grow(decoding, ones)
            plan.requests.extend(decoding)
            plan.tokens.extend(ones)

    def _make_room(self, decoding: list[Request]) -> list[Request]:
        """Take out as few as it takes for the others to get their next token's page."""
        while decoding and not self.residency.can_grow(decoding, [1] * len(decoding)):
            first = min(decoding, key=lambda r: r.order)
            victim = self.preempter.victim(self.running, first)
            if victim is None:  # those behind have just come back: the last ones miss a step
                decoding.remove(max(decoding, key=lambda r: r.order))
            else:
                self._preempt(victim, "no page for the next token")
            decoding = whole_groups([r for r in decoding if r.state is RequestState.RUNNING])
        return decoding

    def _respect_watermark(self) -> None:
        """Above the high watermark somebody gives way before memory runs out."""
        most_bytes = self.config.high_watermark * self.memory.total_bytes
        while self.config.high_watermark < 1 and len(self.running) > 1:
            if self.memory.total_bytes - self.residency.available_bytes <= most_bytes:
                return
            first = min(self.running, key=lambda r: r.order)
            victim = self.preempter.victim(self.running, first)
            if victim is None:
                return
            self._preempt(victim, "above the high watermark")

    def _evict_full_lanes(self, requests: list[Request]) -> list[Request]:
        """Bring lanes at their cap down; return the requests whose policy did what it must."""
        cap = self.eviction.cap
        if cap is None:
            return requests
        full = [r for r in requests if self._held_tokens(r) >= cap]
        failed = [r for r in full if not self._try_evict(r, cap - self.eviction.every)]
        return [r for r in requests if r not in failed] if failed else requests

    def _try_evict(self, request: Request, keep: int) -> bool:
        """Evict; False where the policy failed, or private copies of shared pages found no room."""
        self.residency.stop_sharing(request)
        request.exact = False
        try:
            self._evict_sharing(request, keep)
        except OutOfPages:
            return False
        except PolicyError as error:
            self.failures.append((request, error))
            self.finish(request, "policy error")
            return False
        return True

    def _evict_sharing(self, request: Request, keep: int) -> None:
        """Evict; where copies of shared pages find no room, after the cached prefixes are gone."""
        try:
            self._evict(request, keep)
        except OutOfPages:
            self.residency.drop_cached()
            self._evict(request, keep)

    def _held_tokens(self, request: Request) -> int:
        """Most slots any evicting lane of the request holds."""
        tables = self.memory.tables.values()
        return max(
            (int(t.num_slots[request.row].max()) for t in tables if not t.group.ordered), default=0
        )

    # ---- prompts -------------------------------------------------------------------------------

    def _schedule_chunk(self, plan: StepPlan, request: Request, budget: int) -> int:
        """Plan the next chunk of a prompt, as large as budget and pages allow; return its size."""
        tokens = self.chunks.tokens(plan, request, budget)
        atomic = self.chunks.is_atomic(request)
        if tokens and atomic and not self._evict_full_lanes([request]):
            return 0
        if tokens and not self.residency.can_grow([request], [tokens]):
            tokens = 0 if atomic else self._largest_fitting(request, tokens)
        if tokens:
            self.residency.grow([request], [tokens])
            plan.add(request, tokens)
        return tokens

    def _largest_fitting(self, request: Request, tokens: int) -> int:
        """Largest chunk below `tokens` whose pages are there, by bisection."""
        low, high = 0, tokens
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.residency.can_grow([request], [middle])
            low, high = (middle, high) if fits else (low, middle)
        return low

    # ---- entering ------------------------------------------------------------------------------

    def _let_in(self) -> Request | None:
        """Let the next one in, if it may enter; return it."""
        request = next(iter(self.waiting.ordered()), None)
        if request is None or not self._has_rows(request):
            return None
        state = (request, self.residency.available_bytes, len(self.running))
        if state == self._refused:
            return None  # nothing has changed since admission said no to it
        first = plan_reading(request, self.eviction.cap or NO_LIMIT)
        lease = self.residency.look_up(first)
        if not self._may_enter(first, 0 if lease is None else lease.tokens):
            self.residency.give_back(lease)
            self._refused = state
            return None
        self.residency.enter(first, lease)
        self.waiting.pop(request)
        first.state = RequestState.RUNNING
        self.running.append(first)
        return first

    def _has_rows(self, request: Request) -> bool:
        needed = num_rows(request) + reserved_rows(self.running)
        return needed <= min(self.config.max_running - len(self.running), self.memory.num_free_rows)

    def _may_enter(self, request: Request, cached_tokens: int) -> bool:
        """What is promised must fit, with a part left below the low watermark.

        A request that would be alone needs no such part.
        """
        if not self.running:
            return True
        promised = self.admission.promised(request, self.running, cached_tokens)
        for copy in copies_to_come([request, *self.running]):
            promised += self.admission.promised(copy, [], self.peaks.shared_tokens(copy))
        left_bytes = self.residency.available_bytes - self.peaks.num_bytes(promised)
        if left_bytes < (1 - self.config.low_watermark) * self.memory.total_bytes:
            return False
        return self.residency.make_room(self.peaks.by_class(promised))

    # ---- when nobody gets a page ---------------------------------------------------------------

    def _unblock(self, plan: StepPlan) -> None:
        """Nobody got a page: let the first in line have the others' pages, one by one."""
        first = min(self.running, key=lambda r: r.order)
        while not plan.requests:
            victim = self.preempter.victim(self.running, first, even_returned=True)
            if victim is not None:
                self._preempt(victim, "nobody could move")
            else:
                self.preempter.pack(first)
            self._serve(plan, first)
            if victim is None:
                break

    def _serve(self, plan: StepPlan, first: Request) -> None:
        """Plan what a request, or the first of its group that can move, has left to do."""
        if first.group is not None:
            self._schedule_decoding(plan)
        for request in together(first):
            if request.state is RequestState.RUNNING and not plan.requests:
                self._schedule_chunk(plan, request, self.config.step_tokens)
