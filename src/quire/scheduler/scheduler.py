"""What each step does: who decodes, which prompts are read on, who enters, who gives way.

    a step's tokens  | decoding rows, one token each | chunks of prompts being read | newcomers |
                     |<----------------------- max_num_batched_tokens at most
                     ------------------------->|

Torch-free: the scheduler knows token counts, pages and the memory's bookkeeping. Evicting is asked
of a callback, because which tokens leave depends on tensors; how many leave does not.
"""

from collections.abc import Sequence
from functools import partial

from quire.errors import QuireError
from quire.kv.memory import KVMemory
from quire.scheduler.admission.admission import Admission
from quire.scheduler.admission.need import need_of
from quire.scheduler.admission.refusal import refuse_if_never
from quire.scheduler.batchers.base import Moves
from quire.scheduler.decode import Decode
from quire.scheduler.forks import Forks
from quire.scheduler.group import dissolve, leave, num_rows, refuse_beams, together
from quire.scheduler.lane_capacities import Evictor, LaneCapacities
from quire.scheduler.limits import Limits
from quire.scheduler.prefill import Prefill
from quire.scheduler.prefix_sharing import PrefixSharing
from quire.scheduler.request import PlannedFork, Request, RequestGroup, RequestState
from quire.scheduler.schedule_config import ScheduleConfig
from quire.scheduler.scheduler_parts import SchedulerParts, make_batcher, make_parts
from quire.scheduler.sequence_memory import FINISHED, SequenceMemory
from quire.scheduler.step_plan import StepPlan
from quire.scheduler.unblocking import Unblocking
from quire.scheduler.urgency import Urgency


class Scheduler:
    """Queues of requests over one KV memory.

    Args:
        memory: the pool.
        config: step and queue sizes.
        evictor: asked before a request's lane would pass its cap; None where no lane has one.
        parts: rows, rules and books; by default the config's, with nothing shared.
    """

    def __init__(
        self,
        memory: KVMemory,
        config: ScheduleConfig,
        evictor: Evictor | None = None,
        *,
        parts: SchedulerParts | None = None,
    ) -> None:
        parts = parts or make_parts(config, SequenceMemory(PrefixSharing(memory)))
        self.memory, self.config = memory, config
        self.sequence_memory, self.preempter = parts.sequence_memory, parts.preempter
        self.admission, self.step = parts.admission, parts.step
        self.peaks = parts.admission.peaks
        self.fairness = parts.fairness
        self.running, self.waiting = parts.state.running, parts.state.waiting
        self.failures: list[tuple[Request, QuireError]] = []  # for the engine to report
        self.caps = LaneCapacities(parts.sequence_memory, evictor, self._fail)
        scale_out = partial(self._preempt, whole=True)
        self._limits = Limits(parts, self.running, self._preempt, scale_out)
        self.batcher = make_batcher(config, parts.state)
        self._admission = Admission(parts, self.running, self.batcher, self._preempt)
        self._urgency = Urgency(parts, self.running, self._admission, self._preempt)
        self._decoding = Decode(parts, self.running, self.caps, self.batcher, self._preempt)
        self._reading = Prefill(parts, self.running, self.caps, self._admission, self.batcher)
        self._forks = Forks(
            parts,
            self.running,
            self.caps,
            preempt=self._preempt,
            recompute=partial(self._preempt, recompute=True),
            wait=self._wait,
            fail=self._fail,
        )

        self._unblocking = Unblocking(
            parts,
            self.running,
            decoding=self._decoding,
            reading=self._reading,
            part=self._forks.part,
            preempt=self._preempt,
            fail=self._fail,
        )

    # ---- queues --------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests that wait for room."""
        return len(self.waiting)

    @property
    def num_preemptions(self) -> int:
        """Times requests were taken out to make room."""
        return self.preempter.num_preemptions

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything, or has to report a failure."""
        return bool(self.running or len(self.waiting) or self.failures)

    def submit(self, request: Request) -> None:
        """Queue a request, or a group by its first member.

        Raises:
            NeverFits: it could not run even alone.
            RequestError: a search has more beams than can ever run, or an unknown tenant.
        """
        refuse_beams(request, self.config, self.memory)
        shares = self.memory.placement.shares and num_rows(request) <= self.config.max_num_seqs
        sequences = [request] if shares and self.peaks.fit_whole(request) else dissolve(request)
        refuse_if_never(self.peaks, request)
        self.fairness.admit(request, self.peaks.peak_bytes(need_of(request, request.final_tokens)))
        for sequence in sequences:
            self._wait(sequence)

    def finish(self, request: Request, reason: str = FINISHED) -> None:
        """End a request wherever it is, and free its pages at once.

        Admission learns from those that ended by themselves, as FINISHED says.
        """
        queued = request in self.waiting
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
            self.sequence_memory.leave(request, reason)
            if reason == FINISHED:
                self.admission.learn(request)
        elif request.state is RequestState.WAITING:
            self.waiting.discard(request)
        self.preempter.forget(request)
        request.state = RequestState.FINISHED
        copies_wait = leave(request)
        if request.group is not None and request.group.members and (queued or copies_wait):
            for member in together(request) if copies_wait else ():
                self.preempter.give_up(member)  # who is copied from whom is planned anew
            self._leave_all(request, reason)
            if together(request)[0] not in self.waiting:  # another member is first now
                self._wait(request)

    def _fail(self, request: Request, error: QuireError) -> None:
        self.failures.append((request, error))
        self.finish(request, "policy error")

    def _leave_all(self, request: Request, reason: str) -> None:
        """Take what a request and its group hold away."""
        for member in together(request):
            if member.state is RequestState.RUNNING:
                self.running.remove(member)
                self.fairness.finalize(member)
                self.sequence_memory.leave(member, reason)

    def _preempt(
        self, request: Request, reason: str, *, whole: bool = False, recompute: bool = False
    ) -> None:
        """Take a request out to wait again: with its KV on the host, or to be read again.

        A group goes as one: pages that others still refer to would not come free.

        Args:
            request: runs.
            reason: for people.
            whole: all of its KV goes to the host where that has room, whatever it costs.
            recompute: nothing of it goes to the host.
        """
        leaving = [m for m in together(request) if m.state is RequestState.RUNNING]
        for member in leaving:
            self.running.remove(member)
        self.fairness.preempted(leaving)
        self.preempter.take_out(leaving, reason, whole=whole, recompute=recompute)
        self._wait(request)
        self.fairness.recount(self.running)

    def _wait(self, request: Request) -> None:
        """Let a request wait; a group waits in the place of its first member."""
        for member in together(request):
            member.state = RequestState.WAITING
            member.queued_s = self.sequence_memory.events.now_s()
        self.waiting.push(together(request)[0])

    def preempt(self) -> bool:
        """Free memory for another engine of a shared pool: cached prefixes, then who goes last.

        Returns:
            False when nothing is left to free.
        """
        if self.sequence_memory.sharing.idle_bytes:
            self.sequence_memory.sharing.drop_cached()
            return True
        if self.running:
            last = max(self.running, key=self.preempter.order)
            self._preempt(last, "another engine asked for its memory")
            return True
        return False

    def take_back(self, plan: StepPlan) -> list[Request]:
        """A step has failed: those whose KV it was to write wait again, without KV.

        Args:
            plan: of the step; an empty one means that planning failed, which may be anybody's.

        Returns:
            The requests of the step.
        """
        failed = [r for r in plan.requests or self.running if r.state is RequestState.RUNNING]
        others = (r for r in self.running if r not in failed)
        borrowed = [r for r in others if self.sequence_memory.sharing.borrows_unwritten(r)]
        self.sequence_memory.sharing.withdraw()
        for request in failed + borrowed:
            if request.state is RequestState.RUNNING:  # else it went with its group
                self._leave_all(request, "step failed")
                self._wait(request)
        return failed

    # ---- a step --------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan a step and make room for it. Rows that decode come first."""
        plan = StepPlan()
        self.fairness.recount(self.running)
        self.caps.relieve_while(lambda: self._admission.lacks_free_pages, self.running)
        self._limits.respect()
        self._admission.claim()
        self._urgency.claim()
        moves = self.batcher.begin()
        if moves is not None:
            self._move(moves)
        self._decoding.plan(plan)
        budget = self.step.tokens - len(plan.requests)
        self._reading.plan(plan, self.batcher.prefill_tokens(budget))
        while not (plan.requests or plan.waits) and self.batcher.stalled():
            self._decoding.plan(plan)
        if not (plan.requests or plan.waits) and self.running:
            self._unblocking.plan(plan)
        return plan

    def _move(self, moves: Moves) -> None:
        """Let prefilled requests leave for the host, and come back, as far as there is room."""
        for request in moves.out:
            leaving = [m for m in together(request) if m.state is RequestState.RUNNING]
            if self.preempter.set_aside(leaving):
                for member in leaving:
                    self.running.remove(member)
                    self.fairness.finalize(member)
                self._wait(request)
        for request in moves.back:
            self._admission.fetch(request)

    def commit(self, plan: StepPlan) -> list[PlannedFork]:
        """Note that the step's tokens have been processed; return the forks made then."""
        for request, tokens in zip(plan.requests, plan.tokens, strict=True):
            request.num_computed += tokens
        self.sequence_memory.sharing.confirm(plan.requests)
        self.fairness.charge_decoding(plan.requests[: plan.num_decoding])
        return self._forks.make_due(plan.requests)

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """Learn what steps cost, and reading from those that only read a piece of one prompt."""
        self.step.learn(sum(plan.tokens))
        swapper = self.preempter.swapper
        if swapper is not None and len(plan.requests) == 1 and plan.tokens[0] > 1:
            swapper.costs.read(plan.tokens[0], plan.requests[0].num_computed, seconds)

    def branch(self, group: RequestGroup, parents: Sequence[int]) -> None:
        """Let member i of a running group become what member `parents[i]` is; see `Forks.branch`.

        Every request outside of the group has its tokens of the step by now: some may be preempted.
        """
        self._forks.branch(group, parents)
