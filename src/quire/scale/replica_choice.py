"""The choice of replicas for a proxy: a router, the loads of the replicas, and open requests.

A proxy asks for a ranking, sends the request to the first replica that accepts it, and says when
the request has ended. The replicas report their loads now and then; `LoadView` adds the requests
that were sent since. Not thread-safe.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from quire.scale.routing.base import ReplicaLoad, RoutedRequest, Router
from quire.scale.routing.loads import LoadView

_MAX_RANKED = 3
"""Replicas that are ranked one by one; the others follow in any order."""

RECEIVED, REPORT = "received", "report"
"""Keys of a report: requests that the replica has received, and the number of the report."""


_LOAD_FIELDS = {field.name for field in fields(ReplicaLoad)} - {"replica_id"}


@dataclass(slots=True)
class _Open:
    request: RoutedRequest
    replica_id: str
    is_accepted: bool = False


@dataclass(slots=True)
class _Replica:
    report: int = -1  # number of its last report; -1: none
    num_sent: int = 0  # requests that this proxy sent to it
    num_refused: int = 0  # those of them that it did not accept
    num_before: int | None = None  # received from others before its first report; None: no report

    def num_ended_sends(self, num_received: int) -> int:
        """Requests of this proxy that a report includes or that were refused."""
        if num_received and self.num_before is None:
            self.num_before = max(0, num_received - self.num_sent)
        return num_received - (self.num_before or 0) + self.num_refused


class ReplicaChoice:
    """Chooses replicas and counts the requests that it sent to them."""

    def __init__(self, router: Router) -> None:
        self._router, self._loads = router, LoadView()
        self._open: dict[str, _Open] = {}  # by the id of the proxy
        self._replicas: dict[str, _Replica] = {}

    def rank(
        self, request_id: str, request: RoutedRequest, reports: Mapping[str, Mapping[str, Any]]
    ) -> list[str]:
        """Rank the replicas of a request, and count it for the first one.

        A second call for a request that has not ended moves it to its new first replica.
        """
        self.ended(request_id)
        self._take(reports)
        loads = self._loads.loads()
        left = {name: loads[name] for name in reports}
        ranked: list[str] = []
        while left and len(ranked) < _MAX_RANKED:
            best = self._router.choose(request, list(left.values()))
            ranked.append(best)
            del left[best]
        self._sent(request_id, request, ranked[0])
        return [*ranked, *left]

    def accepted(self, request_id: str, replica_id: str) -> None:
        found = self._open.get(request_id)
        if found is None:
            return
        if found.replica_id != replica_id:
            self.ended(request_id)
            self._sent(request_id, found.request, replica_id)
        self._open[request_id].is_accepted = True

    def ended(self, request_id: str, replica_id: str | None = None) -> None:
        """Finished, failed or aborted; ignored for unknown and moved requests."""
        found = self._open.get(request_id)
        if found is None or replica_id not in (None, found.replica_id):
            return
        del self._open[request_id]
        self._replicas[found.replica_id].num_refused += not found.is_accepted
        self._router.note_finished(found.request, found.replica_id)

    def lost(self, replica_ids: Iterable[str]) -> None:
        """Forget replicas that died or were removed."""
        for replica_id in replica_ids:
            for request_id, found in list(self._open.items()):
                if found.replica_id == replica_id:
                    self.ended(request_id)
            self._replicas.pop(replica_id, None)
            self._loads.remove(replica_id)
            self._router.note_lost(replica_id)

    @property
    def num_open(self) -> int:
        return len(self._open)

    def _sent(self, request_id: str, request: RoutedRequest, replica_id: str) -> None:
        self._open[request_id] = _Open(request, replica_id)
        self._replicas.setdefault(replica_id, _Replica()).num_sent += 1
        self._loads.sent(replica_id, self._router.uncached_tokens(request, replica_id))
        self._router.note_sent(request, replica_id)

    def _take(self, reports: Mapping[str, Mapping[str, Any]]) -> None:
        for replica_id, report in reports.items():
            replica = self._replicas.setdefault(replica_id, _Replica())
            number = report.get(REPORT, 0)  # 0: the replica has not reported yet
            if number == replica.report:
                continue
            replica.report = number
            values = {name: report[name] for name in _LOAD_FIELDS & report.keys()}
            load = ReplicaLoad(replica_id=replica_id, **values)
            self._loads.report(load, replica.num_ended_sends(report.get(RECEIVED, 0)))
