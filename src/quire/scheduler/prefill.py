"""Plans the prefill of a step: chunks of running requests' prompts, then new requests.

a step's budget   | chunks, the tenant served least first, a fraction per tenant | new requests |
"""

from collections.abc import Iterator

from quire.scheduler.admission.admission import Admission
from quire.scheduler.components import SchedulerComponents
from quire.scheduler.group import prefillable_tokens
from quire.scheduler.lane_slots import evicting_lanes, free_tokens, has_atomic_chunk
from quire.scheduler.request import Request
from quire.scheduler.step import StepPlan

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
