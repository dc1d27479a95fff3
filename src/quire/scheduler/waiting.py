"""Why waiting requests wait: the checks of admission, without their effects."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from quire.scheduler.admission import Admission
from quire.scheduler.lifecycle import Lifecycle
from quire.scheduler.request import Request
from quire.scheduler.step import StepPlan
from quire.tenancy.accounts import Right

QUEUE, LIMIT, SLOTS, MEMORY, SLABS, PREFILL, TOKENS, BATCH, NEXT_STEP = (
    *("queue", "tenant_limit", "slots", "memory", "slabs"),
    *("prefill", "tokens", "batch", "next_step"),
)
CAUSES = (QUEUE, LIMIT, SLOTS, MEMORY, SLABS, PREFILL, TOKENS, BATCH, NEXT_STEP)
"""Causes of waiting.

queue: earlier requests of its tenant wait. tenant_limit: its tenant may hold no more KV. slots: all
batch slots are in use. memory: too few free bytes. slabs: enough bytes are free, but in slabs with
pages of other sizes. prefill: the prompt of a running request got no tokens in the last step.
tokens: the last step had no tokens left. batch: the batching rule admits no request now. next_step:
it fits and is tried in the next step.
"""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why a request waits.

    Attributes:
        cause: one of `CAUSES`.
        ahead: waiting requests of its tenant before it.
        needed_bytes: KV bytes of its known tokens; with the cause `slabs`, bytes of further slabs.
        promised_bytes: further bytes that must be free, promised to running requests.
        free_bytes: bytes that are free for all of these; None if they do not matter.
        after: the request that it waits for: the first of the queue, or the one in prefill.
    """

    cause: str
    ahead: int
    needed_bytes: int
    promised_bytes: int = 0
    free_bytes: int | None = None
    after: Request | None = None


class WaitingCauses:
    """Finds out why requests wait; admits and evicts nothing.

    Args:
        admission: the admission whose checks are repeated.
        lifecycle: the running and the waiting requests.
        plan: the plan of the last step.
    """

    def __init__(self, admission: Admission, lifecycle: Lifecycle, plan: StepPlan) -> None:
        self._admission, self._plan, self._free = admission, plan, admission.free
        self._rule, self._running = admission.rule, lifecycle.running
        self._waiting = lifecycle.waiting

    def first(self, most: int, tenant: str | None = None) -> Iterator[tuple[Request, Waiting]]:
        """Yield the first waiting requests of each tenant, best tenant first, with their causes.

        Args:
            most: maximum number of requests of each tenant.
            tenant: only the requests of this tenant; None: of all tenants.
        """
        for head in list(self._waiting.heads()):
            if tenant in (None, head.tenant):
                own = islice(self._waiting.of_tenant(head.tenant), most)
                for ahead, request in enumerate(own):
                    known_bytes = self._needed_bytes(request)
                    if ahead:
                        yield request, Waiting(QUEUE, ahead, known_bytes, after=head)
                    else:
                        yield request, self._of_head(Waiting(NEXT_STEP, 0, known_bytes), request)

    def _of_head(self, fits: Waiting, head: Request) -> Waiting:
        if self._admission.right(head) is Right.REFUSED:
            return replace(fits, cause=LIMIT)
        if not self._free.has_rows(head, self._running):
            return replace(fits, cause=SLOTS)
        for cause, (needed, free) in zip((MEMORY, SLABS), self._shortages(head), strict=False):
            if needed > free:
                own_bytes = needed if cause == SLABS else fits.needed_bytes
                promised_bytes = max(0, needed - own_bytes)
                return Waiting(cause, 0, own_bytes, promised_bytes, max(0, int(free)))
        unserved = self._plan.unserved
        if unserved is not None and unserved.is_running:
            return replace(fits, cause=PREFILL, after=unserved)
        if self._plan.is_full and self._running:
            return replace(fits, cause=TOKENS)
        return fits if self._admission.is_turn_of(head) else replace(fits, cause=BATCH)

    def _shortages(self, head: Request) -> Iterator[tuple[int, float]]:
        """Needed and free bytes; slabs count only for a request that was rejected for them."""
        if self._running:
            found = self._free.shortages(head)
            yield next(found)
            if self._admission.has_rejected(head):
                yield from found

    def _needed_bytes(self, request: Request) -> int:
        return self._rule.peaks.num_bytes(self._rule.new_request(request, request.num_tokens, 0))
