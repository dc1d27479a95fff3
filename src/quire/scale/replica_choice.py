"""The choice of replicas for a proxy: a router, the loads of the replicas, and open requests.

A proxy asks for a ranking, sends the request to the first replica that accepts it, and says when
the request has ended. The replicas report their loads now and then; `LoadView` adds the requests
that were sent since. Not thread-safe.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from quire.scale.routing.base import ReplicaLoad, RoutedRequest, Router
from quire.scale.routing.loads import LoadView

_MOST_RANKED = 3
"""Replicas that are ranked one by one; the others follow in any order."""

REPORT = "report"
"""Key of the number of a report, which grows with each report of a replica."""


class ReplicaChoice:
    """Chooses replicas and counts the requests that it sent to them.

    Args:
        router: the router.
    """

    def __init__(self, router: Router) -> None:
        self._router, self._loads = router, LoadView()
        self._open: dict[str, tuple[RoutedRequest, str]] = {}  # by the id of the proxy
        self._reports: dict[str, int] = {}  # number of the last report of each replica

    def rank(
        self, request_id: str, request: RoutedRequest, reports: Mapping[str, Mapping[str, Any]]
    ) -> list[str]:
        """Rank the replicas of a request, and count it for the first one.

        A second call for a request that has not ended moves it to its new first replica.

        Args:
            request_id: the proxy's id of the request.
            request: the request.
            reports: last report of each replica that accepts requests; at least one.
        """
        self.ended(request_id)
        self._take(reports)
        loads = {load.replica_id: load for load in self._loads.loads()}
        left = {name: loads.get(name, ReplicaLoad(replica_id=name)) for name in reports}
        ranked: list[str] = []
        while left and len(ranked) < _MOST_RANKED:
            best = self._router.choose(request, list(left.values()))
            ranked.append(best)
            del left[best]
        self._sent(request_id, request, ranked[0])
        return [*ranked, *left]

    def routed(self, request_id: str, replica_id: str) -> None:
        """Note the replica that has accepted a request."""
        request, counted = self._open.get(request_id, (None, replica_id))
        if request is not None and counted != replica_id:
            self.ended(request_id)
            self._sent(request_id, request, replica_id)

    def ended(self, request_id: str, replica_id: str | None = None) -> None:
        """Note that a request has finished, failed or was aborted; unknown ones are ignored.

        Args:
            request_id: the proxy's id of the request.
            replica_id: ignore the call if the request was moved from this replica; None: never.
        """
        request, counted = self._open.get(request_id, (None, ""))
        if request is None or replica_id not in (None, counted):
            return
        del self._open[request_id]
        self._loads.finished(request, counted)
        self._router.note_finished(request, counted)

    def lost(self, replica_ids: Iterable[str]) -> None:
        """Forget replicas that died or were removed."""
        for replica_id in replica_ids:
            for request_id, (_, counted) in list(self._open.items()):
                if counted == replica_id:
                    self.ended(request_id)
            self._reports.pop(replica_id, None)
            self._loads.lost(replica_id)
            self._router.note_lost(replica_id)

    @property
    def num_open(self) -> int:
        """Number of requests that were sent and have not ended."""
        return len(self._open)

    def _sent(self, request_id: str, request: RoutedRequest, replica_id: str) -> None:
        self._open[request_id] = (request, replica_id)
        self._loads.sent(request, replica_id)
        self._router.note_sent(request, replica_id)

    def _take(self, reports: Mapping[str, Mapping[str, Any]]) -> None:
        """Take the reports that are new."""
        for replica_id, report in reports.items():
            number = report.get(REPORT)
            if number is None or number == self._reports.get(replica_id):
                continue
            self._reports[replica_id] = number
            values = {name: value for name, value in report.items() if name != REPORT}
            self._loads.report(ReplicaLoad(replica_id=replica_id, **values))
