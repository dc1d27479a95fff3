"""Why waiting requests wait: the checks of admission, without their effects."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from quire.scheduler.admission.admission import Admission
from quire.scheduler.admission.free_pages import FreePages
from quire.scheduler.components import SchedulerComponents
from quire.scheduler.request import Request
from quire.tenancy.accounts import Right

QUEUE, LIMIT, SLOTS, MEMORY, BATCH, NEXT_STEP = (
    *("queue", "tenant_limit", "slots", "memory", "batch", "next_step"),
)
CAUSES = (QUEUE, LIMIT, SLOTS, MEMORY, BATCH, NEXT_STEP)
"""Causes of waiting.

queue: earlier requests of its tenant wait. tenant_limit: its tenant may hold no more KV. slots: all
batch slots are in use. memory: too few free pages. batch: the batching rule admits no request now.
next_step: it fits and is tried in the next step.
"""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why a request waits.

    Attributes:
        cause: one of `CAUSES`.
        ahead: waiting requests of its tenant before it.
        needed_bytes: KV bytes of its known tokens.
    """

    cause: str
    ahead: int
    needed_bytes: int


class WaitingCauses:
    """Finds out why requests wait; admits and evicts nothing.

    Args:
        components: the scheduler's components.
        admission: the admission whose checks are repeated.
    """

    def __init__(self, components: SchedulerComponents, admission: Admission) -> None:
        self._fairness, self._admission = components.fairness, admission
        self._running, self._peaks = components.state.running, components.admission_rule.peaks
        self._rule, self._free = components.admission_rule, FreePages(components)

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
                    cause = QUEUE if ahead else self._cause(request)
                    yield request, Waiting(cause, ahead, self._needed_bytes(request))

    def _cause(self, head: Request) -> str:
        if self._admission.right(head) is Right.REFUSED:
            return LIMIT
        if not self._free.has_rows(head, self._running):
            return SLOTS
        if not self._free.would_fit(head, 0, self._running):
            return MEMORY
        return NEXT_STEP if self._admission.is_turn_of(head) else BATCH

    def _needed_bytes(self, request: Request) -> int:
        return self._peaks.num_bytes(self._rule.new_request(request, request.num_tokens, 0))
