"""Admits urgent requests before the next step, preempting requests of lower priority if needed."""

from collections.abc import Iterator

from quire.scheduler.admission.admission import Admission
from quire.scheduler.admission.free_pages import FreePages
from quire.scheduler.components import SchedulerComponents
from quire.scheduler.request import Request

URGENT_WAITING = "an urgent request is waiting"


class UrgentAdmission:
    """Admits urgent requests.

    Only requests of lower priority are preempted; with several tenants, only those of the same
    tenant. None is preempted if that would not free enough memory.

    Args:
        components: the scheduler's components.
        admission: admits the requests.
    """

    def __init__(self, components: SchedulerComponents, admission: Admission) -> None:
        self._free, self._urgent = FreePages(components), components.config.urgent
        self._fairness, self._preempter = components.fairness, components.preempter
        self._running, self._lifecycle = components.state.running, components.lifecycle
        self._admission = admission

    def admit(self) -> None:
        """Admit all urgent requests that the batcher accepts; call before a step is planned."""
        if self._urgent is None:
            return
        for head in list(self._fairness.waiting.heads()):
            request: Request | None = head
            while request is not None and self._admit(request, self._urgent):
                request = next(self._queue(head.tenant), None)

    def _queue(self, tenant: str) -> Iterator[Request]:
        waiting = self._fairness.waiting
        return waiting.of_tenant(tenant) if tenant in waiting.tenants else iter(())

    def _admit(self, request: Request, urgent: int) -> bool:
        if request.priority > urgent or not self._admission.is_turn_of(request):
            return False
        if self._admission.admit_now(request):
            return True
        later = self._later_requests(request)
        staying = [other for other in self._running if other not in later]
        if not (later and self._free.would_fit(request, 0, staying)):
            return False
        return self._preempt_until_admitted(request)

    def _preempt_until_admitted(self, request: Request) -> bool:
        while later := self._later_requests(request):
            victim = self._preempter.victim_among(later)
            victim = victim or self._preempter.victim_among(later, even_resumed=True)
            assert victim is not None, "there are candidates"
            self._lifecycle.preempt(victim, URGENT_WAITING)
            if self._admission.admit_now(request):
                return True
        return False

    def _later_requests(self, request: Request) -> list[Request]:
        several = self._fairness.has_several
        return [
            other
            for other in self._running
            if other.priority > request.priority and (not several or other.tenant == request.tenant)
        ]
