"""The scheduler: plans every step over one KV memory of a fixed number of bytes.

    a step's tokens | decoding rows, one token each | chunks of prompts (prefill) | new requests |
                    |<--------------------- at most max_num_batched_tokens --------------------->|

Each planner has a file: admission, prefill, decode, preemption (limits), forks, unblocking. All
planners share one `SchedulerComponents`. Torch-free: the scheduler uses only token counts, pages
and requests. The evictor selects the tokens to evict, because the selection depends on tensors.
"""

from collections.abc import Sequence

from quire.scheduler.admission.admission import Admission
from quire.scheduler.admission.need import need_of
from quire.scheduler.admission.never_fits import refuse_if_never
from quire.scheduler.admission.urgent import UrgentAdmission
from quire.scheduler.ahead import Ahead
from quire.scheduler.components import SchedulerComponents
from quire.scheduler.decode import Decode
from quire.scheduler.forks import Forks
from quire.scheduler.group import dissolve, num_rows, refuse_beams
from quire.scheduler.lifecycle import Failure
from quire.scheduler.preemption.limits import Limits
from quire.scheduler.prefill import Prefill
from quire.scheduler.request import PlannedFork, Request, RequestGroup
from quire.scheduler.request_parts import RequestState
from quire.scheduler.sequence_memory import FINISHED
from quire.scheduler.step import StepPlan
from quire.scheduler.unblocking import Unblocking
from quire.scheduler.waiting import WaitingCauses


class Scheduler:
    """Queues requests for one KV memory and plans every step.

    Args:
        components: rules, accounts and state; see `make_components`.
    """

    def __init__(self, components: SchedulerComponents) -> None:
        self.components = components
        self.config, self.fairness = components.config, components.fairness
        self.sequence_memory, self.preempter = components.sequence_memory, components.preempter
        self.memory = components.sequence_memory.memory
        self.running, self.waiting = components.state.running, components.state.waiting
        self.capacities, self.lifecycle = components.capacities, components.lifecycle
        self.peaks, self.step_size = components.admission_rule.peaks, components.step_size
        self._batcher = components.batcher
        self._limits = Limits(components)
        self._admission = Admission(components)
        self._urgent = UrgentAdmission(components, self._admission)
        self._decode = Decode(components)
        self._prefill = Prefill(components, self._admission)
        self._forks = Forks(components)
        self.ahead = Ahead(components, self._decode, self._prefill)
        self._unblocking = Unblocking(components, self._decode, self._prefill, self._forks)
        self.waiting_causes = WaitingCauses(components, self._admission, self._prefill)

    # ---- a step --------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan a step and allocate its pages.

        Limits are enforced first, so that no preempted request is part of the step.
        """
        plan = StepPlan()
        self.fairness.recount(self.running)
        self._free_pages()
        self._admit()
        self._decode.plan(plan)
        self._prefill.plan(plan)
        self._unblock(plan)
        return plan

    def _free_pages(self) -> None:
        """Free pages: evict under pressure, then preempt requests that exceed a limit."""
        self.capacities.evict_while(self._admission.lacks_free_pages, self.running)
        self._limits.enforce()

    def _admit(self) -> None:
        """Admit requests that may preempt others, then swap requests as the batcher requires."""
        self._admission.reclaim()
        self._urgent.admit()
        swaps = self._batcher.begin()
        if swaps is not None:
            for request in swaps.swap_out:
                self.lifecycle.swap_out(request)
            for request in swaps.swap_in:
                self._admission.admit_now(request)

    def _unblock(self, plan: StepPlan) -> None:
        """If the plan is empty, let the batcher release rows, then preempt requests."""
        while plan.is_idle and self._batcher.stalled():
            self._decode.plan(plan)
        if plan.is_idle and self.running:
            self._unblocking.plan(plan)

    def commit(self, plan: StepPlan) -> list[PlannedFork]:
        """Record that the tokens of a step have been computed; return the new forks."""
        forks = self.note_launched(plan)
        self.note_inputs(plan)
        return forks

    def note_launched(self, plan: StepPlan) -> list[PlannedFork]:
        """Record that the tokens of a step are being computed; return the new forks.

        Operations on KV run in the order of their launches, so that the pages of the step may be
        shared, copied and freed at once.
        """
        for request, tokens in zip(plan.requests, plan.tokens, strict=True):
            request.progress.num_computed += tokens
        self.sequence_memory.sharing.confirm(plan.requests)
        return self._forks.make_due(plan.requests)

    def note_inputs(self, plan: StepPlan) -> None:
        """Record that the values of a launched step's input tokens are known.

        Decoding rows are charged, unless their request has ended with its input token. Blocks with
        tokens that were pending are published.
        """
        decoding = plan.requests[: plan.num_decoding]
        ended = RequestState.FINISHED
        self.fairness.charge_decoding([r for r in decoding if r.progress.state is not ended])
        if plan.pending is not None:
            self.sequence_memory.publish_known(plan.requests)

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """Update step size and prefill costs; prefill only from steps with a single chunk.

        Args:
            plan: the completed step.
            seconds: its duration.
        """
        self.step_size.learn(sum(plan.tokens))
        swapper = self.preempter.swapper
        if swapper is not None and len(plan.requests) == 1 and plan.tokens[0] > 1:
            swapper.costs.read(plan.tokens[0], plan.requests[0].progress.num_computed, seconds)

    def roll_back(self, plan: StepPlan) -> list[Request]:
        """Free and queue the requests of a failed step.

        Requests that share blocks which the step did not write are freed and queued too.

        Args:
            plan: the step's plan; if empty, planning failed and all running requests are queued.

        Returns:
            The requests of the step.
        """
        failed = [r for r in plan.requests or self.running if r.is_running]
        others = (r for r in self.running if r not in failed)
        sharing = [r for r in others if self.sequence_memory.sharing.shares_unwritten(r)]
        self.sequence_memory.sharing.withdraw()
        for request in failed + sharing:
            if request.is_running:  # otherwise it was queued with its group
                self.lifecycle.restart(request, "step failed")
        return failed

    # ---- requests ------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests."""
        return len(self.waiting)

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions since the start."""
        return self.preempter.num_preemptions

    @property
    def has_work(self) -> bool:
        """Whether there are running or waiting requests, or failures to report."""
        return bool(self.running or len(self.waiting) or self.lifecycle.failures)

    def submit(self, request: Request) -> None:
        """Queue a request, or a group by its first member.

        Raises:
            NeverFits: the request does not fit even alone, or exceeds the limit of its tenant.
            RequestError: a beam search with too many beams, or an unknown tenant.
        """
        refuse_beams(request, self.config)
        sequences = [request] if self._can_run_whole(request) else dissolve(request)
        refuse_if_never(self.peaks, request)
        self.fairness.admit(request, self._peak_bytes(request))
        for sequence in sequences:
            self.lifecycle.wait(sequence)

    def _can_run_whole(self, request: Request) -> bool:
        """Whether a request and its group can run together, in the memory and its tenant's limit.

        Members of one group are not preempted for each other, so the limit is checked here.
        """
        if request.group is None:
            return True
        if num_rows(request) > self.config.max_num_seqs or not self.peaks.fit_whole(request):
            return False
        return self.fairness.may_hold(request, self._peak_bytes(request))

    def _peak_bytes(self, request: Request) -> int:
        """Bytes of a request and its group at their peak."""
        need = need_of(request, request.final_tokens)
        return self.peaks.num_bytes(self.peaks.whole_counts(need, num_rows(request)))

    def finish(self, request: Request, reason: str = FINISHED) -> None:
        """End a request in any state and free its pages."""
        self.lifecycle.finish(request, reason)

    def take_failures(self) -> list[Failure]:
        """Return and clear the failures since the last call."""
        failures = list(self.lifecycle.failures)
        self.lifecycle.failures.clear()
        return failures

    def preempt_one(self) -> bool:
        """Free memory for another engine of a shared pool.

        Evicts cached prefixes that no request uses; if there are none, preempts the last request in
        scheduling order.

        Returns:
            False if there was no memory to free.
        """
        if self.sequence_memory.sharing.idle_bytes:
            self.sequence_memory.sharing.drop_cached()
            return True
        if self.running:
            last = max(self.running, key=self.preempter.order)
            self.lifecycle.preempt(last, "another engine needs its guaranteed memory")
            return True
        return False

    def branch(self, group: RequestGroup, parents: Sequence[int]) -> None:
        """Replace the members of a running group; see `Forks.branch`.

        Call it after the tokens of all other requests of the step are sampled, because some of them
        may be preempted.
        """
        self._forks.branch(group, parents)
