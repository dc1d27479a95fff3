"""Why waiting requests wait: the checks of admission, without their effects."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from quire.scheduler.admission import Admission, FreePages
from quire.scheduler.components import SchedulerComponents
from quire.scheduler.request import Request
from quire.tenancy.accounts import Right

if TYPE_CHECKING:
    from quire.scheduler.scheduler import Prefill

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
        components: the scheduler's components.
        admission: the admission whose checks are repeated.
    """

    def __init__(
        self, components: SchedulerComponents, admission: Admission, prefill: "Prefill"
    ) -> None:
        self._fairness, self._admission = components.fairness, admission
        self._running, self._peaks = components.state.running, components.admission_rule.peaks
        self._rule, self._free = components.admission_rule, FreePages(components)
        self._prefill = prefill

    def first(self, most: int, tenant: str | None = None) -> Iterator[tuple[Request, Waiting]]:
        """Yield the first waiting requests of each tenant, best tenant first, with their causes.

        Args:
            most: maximum number of requests of each tenant.
            tenant: only the requests of this tenant; None: of all tenants.
        """
        for head in list(self._fairness.waiting.heads()):
            if tenant in (None, head.tenant):
                own = islice(self._fairness.waiting.of_tenant(head.tenant), most)
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
        unserved = self._prefill.unserved
        if unserved is not None and unserved.is_running:
            return replace(fits, cause=PREFILL, after=unserved)
        if self._prefill.is_full and self._running:
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
        return self._peaks.num_bytes(self._rule.new_request(request, request.num_tokens, 0))
