"""Plans a step while the output tokens of the last step are pending (asynchronous scheduling).

The tokens of the last step are sampled and not read, so that the planner does not know their
values, nor which requests end with them. A plan must be right for all values. It contains decoding
rows, chunks of prompts and new requests. It preempts and evicts nothing, because a request that
ends would have freed its pages. If a step must preempt or evict, the engine reads the tokens first.
"""

from collections.abc import Collection

from quire.scheduler.components import SchedulerComponents
from quire.scheduler.decode import Decode
from quire.scheduler.prefill import Prefill
from quire.scheduler.request import Request
from quire.scheduler.request_parts import RequestState
from quire.scheduler.step import StepPlan

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
