"""Urgent requests: they enter before the next step, in the place of others where they must."""

from collections.abc import Callable, Iterator

from quire.scheduler.admission.admission import Admission
from quire.scheduler.free_pages import FreePages
from quire.scheduler.request import Request
from quire.scheduler.scheduler_parts import SchedulerParts

Preempt = Callable[[Request, str], None]  # (request, why)
WHY = "an urgent request waits"


class Urgency:
    """Makes room for requests that do not wait for others.

    Only who has a lower priority gives way, of the same tenant where there are several; nobody does
    where that would not be enough. Before a step is planned: who gives way must not be part of it.

    Args:
        parts: the rules that are asked.
        running: those that are in; the scheduler's own list.
        admission: lets them in.
        preempt: takes a request out.
    """

    def __init__(
        self,
        parts: SchedulerParts,
        running: list[Request],
        admission: Admission,
        preempt: Preempt,
    ) -> None:
        self._room = FreePages(parts, running)
        self._urgent = parts.config.urgent
        self._fairness, self._preempter = parts.fairness, parts.preempter
        self._running, self._admission, self._preempt = running, admission, preempt

    def claim(self) -> None:
        """Let in all that are urgent and whose turn it is."""
        if self._urgent is None:
            return
        for head in list(self._fairness.waiting.heads()):
            request: Request | None = head
            while request is not None and self._enters(request):
                request = next(self._line(head.tenant), None)

    def _line(self, tenant: str) -> Iterator[Request]:
        waiting = self._fairness.waiting
        return waiting.of_tenant(tenant) if tenant in waiting.tenants else iter(())

    def _enters(self, request: Request) -> bool:
        assert self._urgent is not None
        if request.priority > self._urgent or not self._admission.is_turn_of(request):
            return False
        if self._admission.fetch(request):
            return True
        behind = self._behind(request)
        staying = [other for other in self._running if other not in behind]
        if not (behind and self._room.would_fit(request, 0, staying)):
            return False
        while behind:
            victim = self._preempter.victim_among(behind)
            victim = victim or self._preempter.victim_among(behind, even_returned=True)
            assert victim is not None, "there are candidates"
            self._preempt(victim, WHY)
            if self._admission.fetch(request):
                return True
            behind = self._behind(request)
        return False

    def _behind(self, request: Request) -> list[Request]:
        several = self._fairness.has_several
        return [
            other
            for other in self._running
            if other.priority > request.priority and (not several or other.tenant == request.tenant)
        ]
