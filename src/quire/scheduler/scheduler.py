"""The scheduler: plans every step over one KV memory of a fixed number of bytes.

    a step's tokens | decoding rows, one token each | chunks of prompts (prefill) | new requests |
                    |<--------------------- at most max_num_batched_tokens --------------------->|

All planners share one `SchedulerComponents`. Torch-free: the scheduler uses only token counts,
pages and requests. The evictor selects the tokens to evict, because the selection depends on
tensors.
"""

from collections.abc import Collection, Iterator, Sequence

from quire.errors import NeverFits
from quire.scheduler.admission import Admission, UrgentAdmission
from quire.scheduler.components import SchedulerComponents
from quire.scheduler.forks import NEVER, Forks
from quire.scheduler.lanes import evicting_lanes, free_tokens, has_atomic_chunk
from quire.scheduler.lifecycle import Failure
from quire.scheduler.peaks import can_offload_request, need_of, refuse_if_never
from quire.scheduler.request import (
    PlannedFork,
    Request,
    RequestGroup,
    RequestState,
    dissolve,
    num_rows,
    prefillable_tokens,
    refuse_beams,
    same_group,
    together,
    whole_groups,
)
from quire.scheduler.sequence_memory import FINISHED
from quire.scheduler.step import StepPlan
from quire.scheduler.waiting import WaitingCauses

# ---- limits --------------------------------------------------------------------------------------


SCALED_DOWN = "memory use above scale_down_at"


class Limits:
    """Preempts requests that would exceed a limit in the next step.

    Args:
        components: the scheduler's components.
    """

    def __init__(self, components: SchedulerComponents) -> None:
        self._config, self._memory = components.config, components.sequence_memory.memory
        self._sharing = components.sequence_memory
        self._fairness, self._preempter = components.fairness, components.preempter
        self._lifecycle, self._running = components.lifecycle, components.state.running
        self._peaks = components.admission_rule.peaks

    def enforce(self) -> None:
        """Enforce all limits."""
        if self._config.high_watermark < 1:
            self._enforce_watermark(self._config.high_watermark * self._memory.total_bytes)
        if self._config.scale_down_at is not None:
            self._scale_down(self._config.scale_down_at * self._memory.total_bytes)
        for spec in self._fairness.accounts.specs:
            if spec.limit_bytes is not None:
                self._enforce_tenant(spec.name, spec.limit_bytes)

    @property
    def _used_bytes(self) -> int:
        return self._memory.total_bytes - self._sharing.available_bytes

    def _enforce_watermark(self, max_bytes: float) -> None:
        """Preempt requests while memory use is above the high watermark."""
        while len(self._running) > 1 and self._used_bytes > max_bytes:
            first = min(self._running, key=self._preempter.order)
            victim = self._preempter.victim(self._running, first)
            if victim is None:
                return
            self._lifecycle.preempt(victim, "memory use above the high watermark")

    def _scale_down(self, max_bytes: float) -> None:
        """Swap out requests, just resumed ones too, while memory use is above `scale_down_at`.

        The first request in scheduling order keeps running. A single request may use all memory.
        """
        while self._used_bytes > max_bytes:
            first = min(self._running, key=self._preempter.order, default=None)
            if first is None:
                return
            victim = self._preempter.victim(self._running, first)
            victim = victim or self._preempter.victim(self._running, first, even_resumed=True)
            if victim is None:
                return
            self._lifecycle.preempt(victim, SCALED_DOWN, swap_all=True)

    def _enforce_tenant(self, tenant: str, limit_bytes: int) -> None:
        """Preempt the last requests of a tenant that would exceed its limit.

        Its first request fits alone: requests that do not are refused at submission.
        """
        while True:
            theirs = [request for request in self._running if request.tenant == tenant]
            if not theirs or self._bytes_then(tenant, theirs) <= limit_bytes:
                return
            victim = self._last_of(theirs)
            if victim is None:
                return
            self._lifecycle.preempt(victim, "its tenant would exceed its limit")

    def _last_of(self, theirs: list[Request]) -> Request | None:
        first = min(theirs, key=self._preempter.order)
        others = [r for r in theirs if r is not first and not same_group(r, first)]
        victim = self._preempter.victim_among(others)
        return victim or self._preempter.victim_among(others, even_resumed=True)

    def _bytes_then(self, tenant: str, requests: list[Request]) -> int:
        """Bytes of a tenant once the KV of all known tokens of its requests is computed."""
        further = self._peaks.further_pages(requests, [request.num_tokens for request in requests])
        return self._fairness.accounts.held_bytes(tenant) + self._peaks.num_bytes(
            further.sum(axis=0)
        )


# ---- decoding rows -------------------------------------------------------------------------------


class Decode:
    """Planner of decoding rows; preempts requests when the rows lack pages.

    Args:
        components: the scheduler's components.
    """

    def __init__(self, components: SchedulerComponents) -> None:
        self._sequence_memory = components.sequence_memory
        self._preempter, self._lifecycle = components.preempter, components.lifecycle
        self._capacities, self._batcher = components.capacities, components.batcher
        self._running, self._step_size = components.state.running, components.step_size

    def plan(self, plan: StepPlan) -> None:
        """Add the batch's decoding rows that have pages for their next token."""
        ready = [r for r in self._running if r.num_tokens - r.progress.num_computed == 1]
        self._add(plan, self._batcher.decoding(ready))

    def plan_group(self, plan: StepPlan, request: Request) -> None:
        """Add the decoding rows of a request's group, even if they are not in the batch.

        For a step without other rows, because beams can decode only here: a prefill chunk never
        computes the last token of a beam.
        """
        ready = [r for r in self._running if r.num_uncomputed == 1 and same_group(r, request)]
        self._add(plan, ready)

    def _add(self, plan: StepPlan, rows: list[Request]) -> None:
        decoding = self._within_step(whole_groups(rows))
        decoding = whole_groups(self._capacities.evict_to_capacity(decoding))
        decoding = self._grown(decoding)
        if decoding:
            plan.requests.extend(decoding)
            plan.tokens.extend([1] * len(decoding))
            plan.num_decoding = len(plan.requests)

    def _within_step(self, decoding: list[Request]) -> list[Request]:
        """The first rows in scheduling order, at most as many as the step has tokens."""
        if len(decoding) <= self._step_size.tokens:
            return decoding
        first = sorted(decoding, key=self._preempter.order)[: self._step_size.tokens]
        return whole_groups(first)

    def _grown(self, decoding: list[Request]) -> list[Request]:
        """Grow the rows that get a page for their next token, after evictions and preemptions."""
        while decoding and not self._sequence_memory.try_grow(decoding, [1] * len(decoding)):
            if not self._capacities.free_for(decoding, self._running):
                first = min(decoding, key=self._preempter.order)
                victim = self._preempter.victim(self._running, first)
                if victim is None:  # later requests have just resumed: the last one skips a step
                    decoding.remove(max(decoding, key=self._preempter.order))
                else:
                    self._lifecycle.preempt(victim, "no page for the next token")
            decoding = whole_groups([r for r in decoding if r.is_running])
        return decoding


# ---- prefill -------------------------------------------------------------------------------------


SCORED_TOKENS = 256  # maximum tokens of a step with prompt log-probabilities: bounds the logits


class Prefill:
    """Planner of prompt chunks and of the admission of new requests.

    Args:
        components: the scheduler's components.
        admission: admits new requests.

    Attributes:
        unserved: a running request that got no tokens of the last step; none is admitted before it.
        is_full: whether the last step had no tokens left for a new request.
    """

    def __init__(self, components: SchedulerComponents, admission: Admission) -> None:
        self._config, self._step_size = components.config, components.step_size
        self._sequence_memory, self._preempter = components.sequence_memory, components.preempter
        self._loader = components.sequence_memory.prefix_loader
        self._fairness, self._capacities = components.fairness, components.capacities
        self._batcher, self._running = components.batcher, components.state.running
        self._lanes = evicting_lanes(components.sequence_memory.memory)
        self._admission = admission
        self.unserved: Request | None = None
        self.is_full = False

    def plan(self, plan: StepPlan, budget: int | None = None) -> None:
        """Add chunks of prompts to the step, then admit new requests.

        No request is admitted while a running prefill gets no tokens. Otherwise a chunk that must
        be computed as a whole could wait forever while new requests use the rest of every step.
        Exception: a request of the tenant served least is admitted before others' prompts.

        Args:
            plan: the step's plan.
            budget: maximum prefill tokens; default: decided by the batcher.
        """
        if budget is None:
            left = self._step_size.tokens - len(plan.requests)
            budget = self._batcher.prefill_tokens(left)
        if self._loader is not None:
            self._loader.begin_plan()
        self._plan(plan, budget)
        if self._loader is not None and self._loader.waits and not plan.requests:
            if self._loader.wait():
                self._plan(plan, budget)
            plan.waits = not plan.requests

    def _plan(self, plan: StepPlan, budget: int) -> None:
        queue = sorted(self._unplanned(plan), key=self._fairness.prefill_order, reverse=True)
        self.unserved, self.is_full = None, False
        while budget > 0:
            new_request = None
            if (not queue and self.unserved is None) or (queue and self._is_before(queue[-1])):
                new_request = self._admission.admit(budget)
            if new_request is None and not queue:
                return
            request = new_request or queue.pop()
            if not request.is_running:  # its group has failed
                continue
            if request is new_request and not self._batcher.may_compute(request):
                continue  # it was swapped in completely and waits for a batch row
            tokens = self.chunk(plan, request, min(budget, self._fraction(request, queue)))
            budget -= tokens
            if not (tokens or self._waits_for_prefix(request)):
                self.unserved = request
        self.is_full = True

    def _waits_for_prefix(self, request: Request) -> bool:
        """Whether a request gets no tokens because its prefix is being loaded."""
        return self._loader is not None and self._loader.is_waiting(request)

    def _fraction(self, request: Request, others: list[Request]) -> int:
        """Tokens of a step that its tenant may prefill; an atomic chunk is not divided."""
        if self.is_atomic(request):
            return self._step_size.tokens
        return self._fairness.step_part(request, others, self._step_size.tokens)

    def _is_before(self, request: Request) -> bool:
        """Whether a request of a tenant that was served less than this one's is waiting."""
        if not self._fairness.has_several:
            return False
        queue = self._fairness.waiting
        head = next(queue.heads(), None)
        if head is None or head.tenant == request.tenant:
            return False
        return queue.virtual_time(head.tenant) < queue.virtual_time(request.tenant)

    def _unplanned(self, plan: StepPlan) -> Iterator[Request]:
        """Yield the running requests in prefill that are not part of the plan."""
        planned = set(map(id, plan.requests))
        left = (r for r in self._running if id(r) not in planned)
        return (r for r in left if prefillable_tokens(r) > 0 and self._batcher.may_compute(r))

    # ---- one chunk -----------------------------------------------------------------------------

    def chunk(self, plan: StepPlan, request: Request, budget: int) -> int:
        """Add a prompt's next chunk, as large as the budget and pages allow; return its tokens."""
        budget = self._up_to_tail(request, budget)
        if self._loader is not None:
            budget = self._loader.may_read(request, budget)
        tokens, atomic = self.chunk_tokens(plan, request, budget), self.is_atomic(request)
        if not tokens or not self._capacities.evict_to_capacity([request]):
            return 0
        if not self._has_pages(plan, request, tokens):
            if atomic or not request.is_running:
                return 0
            tokens = self._largest_fitting(request, tokens)
        if tokens:
            self._add(plan, request, tokens)
        return tokens

    def _add(self, plan: StepPlan, request: Request, tokens: int) -> None:
        self._sequence_memory.grow([request], [tokens])
        self._fairness.charge_prefill(request, tokens)
        kv_bytes = self._sequence_memory.memory.row_bytes(request.memory.row)
        self._sequence_memory.events.emit("chunk", request, tokens=tokens, kv_bytes=kv_bytes)
        plan.add(request, tokens)

    def is_atomic(self, request: Request) -> bool:
        """Whether its next chunk, after an eviction, must be computed as a whole."""
        return self._lanes is not None and has_atomic_chunk(request)

    def chunk_tokens(self, plan: StepPlan, request: Request, budget: int) -> int:
        """Tokens of its next chunk within a budget.

        If its lanes have a cap, chunks fill the lanes up to the cap. Then each chunk has `every`
        tokens (or the rest of the prompt) after one eviction, as a whole or not at all. So the
        output does not depend on the rest of the batch.
        """
        most = min(prefillable_tokens(request), free_tokens(request, self._lanes))
        if self.is_atomic(request):
            return most if most <= budget else 0
        budget = min(budget, self._config.longest_chunk)
        if request.params.prompt_logprobs is not None:
            budget = min(budget, max(0, SCORED_TOKENS - plan.num_scored))
        return min(most, budget, _to_snapshot(request))

    def _has_pages(self, plan: StepPlan, request: Request, tokens: int) -> bool:
        """Whether there are pages for a chunk; requests outside of the plan may evict for it."""
        while not self._sequence_memory.can_grow([request], [tokens]):
            planned = set(map(id, plan.requests))
            others = [r for r in self._running if id(r) not in planned]
            freed = self._capacities.free_for([request], others)
            if not freed or not request.is_running:
                return False
        return True

    def _up_to_tail(self, request: Request, budget: int) -> int:
        """Limit the budget to the start of a swapped-out tail; swap the tail in once it is reached.

        Returns:
            The tokens that the request may compute; 0 if there are no pages for its tail.
        """
        head_tokens = self._preempter.head_tokens(request)
        if head_tokens is None:
            return budget
        if request.progress.num_computed < head_tokens:
            return min(budget, head_tokens - request.progress.num_computed)
        return budget if self._preempter.swap_in_tail(request) else 0

    def _largest_fitting(self, request: Request, tokens: int) -> int:
        """The largest chunk below `tokens` that has pages, by bisection."""
        low, high = 0, tokens
        while high - low > 1:
            middle = (low + high) // 2
            fits = self._sequence_memory.can_grow([request], [middle])
            low, high = (middle, high) if fits else (low, middle)
        return low


def _to_snapshot(request: Request) -> int:
    """Count the tokens before the next snapshot of statistics for the prefix cache; at least 1."""
    ahead = [end - request.progress.num_computed for end in request.memory.snapshot_ends]
    return min((tokens for tokens in ahead if tokens > 0), default=request.num_uncomputed)


# ---- ahead of the last tokens --------------------------------------------------------------------


BEAMS, EVICTION, FAILURE = "beam search", "eviction", "failed request"
NO_PAGES, NO_ROWS, PREEMPTED = "too few free pages", "no rows", "preempted request"
TENANTS = "several tenants"


class Ahead:
    """Planner of steps whose input tokens may be pending.

    Args:
        components: the scheduler's components.
        decode: plans decoding rows.
        prefill: plans chunks of prompts and new requests.
    """

    def __init__(self, components: SchedulerComponents, decode: Decode, prefill: Prefill) -> None:
        self._running, self._fairness = components.state.running, components.fairness
        self._lifecycle, self._capacities = components.lifecycle, components.capacities
        self._sequence_memory = components.sequence_memory
        self._decode, self._prefill = decode, prefill

    def plan(self, pending: Collection[Request]) -> StepPlan | str:
        """Plan a step and allocate its pages.

        Args:
            pending: requests of the last step, whose tokens are pending.

        Returns:
            The plan, with at least one request; or why the tokens must be read before. Then no
            running request has changed. Cached prefixes that no request uses may be evicted, and
            requests admitted without a chunk.
        """
        reason = self._why_not(pending)
        if reason is not None:
            return reason
        plan = StepPlan()
        self._decode.plan(plan)
        self._prefill.plan(plan)
        return plan if plan.requests else NO_ROWS

    def _why_not(self, pending: Collection[Request]) -> str | None:
        self._fairness.recount(self._running)
        if self._lifecycle.failures:
            return FAILURE
        if self._fairness.has_several:  # requests may be preempted for another tenant
            return TENANTS
        if any(r.progress.state is RequestState.WAITING for r in pending):
            return PREEMPTED
        if any(r.group is not None and r.group.atomic for r in self._running):
            return BEAMS
        if self._capacities.may_evict(self._running):
            return EVICTION
        decoding = [r for r in self._running if r.num_uncomputed == 1]
        tokens = [1] * len(decoding)
        if decoding and not self._sequence_memory.can_grow(decoding, tokens):
            return NO_PAGES  # requests are preempted, unless one of them ends
        return None


# ---- unblocking ----------------------------------------------------------------------------------


class Unblocking:
    """Planner of steps in which only the first request in scheduling order runs.

    Args:
        components: the scheduler's components.
        decode: plans decoding rows.
        prefill: plans chunks of prompts.
        forks: splits groups.
    """

    def __init__(
        self, components: SchedulerComponents, decode: Decode, prefill: Prefill, forks: Forks
    ) -> None:
        self._preempter, self._lifecycle = components.preempter, components.lifecycle
        self._offloader = components.sequence_memory.prefix_offloader
        self._running = components.state.running
        self._step_tokens = components.config.max_num_batched_tokens
        self._decode, self._prefill, self._forks = decode, prefill, forks

    def plan(self, plan: StepPlan) -> None:
        """Plan a step for the first request; preempt the others one by one.

        The first request is the first by `Request.order`, regardless of tenants' shares. Shares
        change with the running requests, so two requests could preempt each other forever.
        """
        first = min(self._running, key=lambda request: request.order)
        self._plan_first(plan, first)
        while not plan.requests:
            victim = self._preempter.victim(self._running, first, even_resumed=True)
            if victim is None:
                break
            self._lifecycle.preempt(victim, "no running request could be scheduled")
            self._plan_first(plan, first)
        if not plan.requests and self._preempter.free_offloaded():
            self._plan_first(plan, first)
        for free_pages in (self._preempter.compact, self._preempter.halve_staging):
            if not plan.requests:
                free_pages(first)
                self._plan_first(plan, first)
        while not plan.requests and self._forks.split_off(first):
            self._plan_first(plan, first)
        if not plan.requests and first.is_running:
            self._recompute_or_fail(plan, first)

    def _plan_first(self, plan: StepPlan, first: Request) -> None:
        """Plan the tokens of a request, or of the first member of its group that has pages."""
        if first.group is not None:
            self._decode.plan(plan)
            if not plan.requests:
                self._decode.plan_group(plan, first)
        for request in together(first):
            if request.is_running and not plan.requests:
                self._prefill.chunk(plan, request, self._step_tokens)

    def _recompute_or_fail(self, plan: StepPlan, first: Request) -> None:
        """Recompute or fail a request that does not fit in the whole KV memory.

        If it cannot evict because its offloaded pages cannot be loaded back, it is recomputed
        without KV offload, so that it evicts in time. The first time, this begins after its
        recorded evictions: as many tokens as they need may fit only with KV offload.
        """
        stops = self._offloader is not None and self._offloader.stops_evicting(first)
        if not (stops and can_offload_request(first)):
            self._lifecycle.fail(first, NeverFits(NEVER))
            return
        first.memory.may_offload_replays = first.memory.may_offload
        first.memory.may_offload = False
        reason = "its offloaded pages cannot be loaded back"
        self._lifecycle.preempt(first, reason, recompute=True)
        self._prefill.plan(plan, self._step_tokens)


# ---- the scheduler -------------------------------------------------------------------------------


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
        self.sequence_memory.confirm(plan.requests)
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
        sharing = [r for r in others if self.sequence_memory.shares_unwritten(r)]
        self.sequence_memory.withdraw()
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
        if self.sequence_memory.idle_bytes:
            self.sequence_memory.drop_cached()
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
