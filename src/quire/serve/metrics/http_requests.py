"""Counts HTTP requests by method, path and status; used in the event loop."""

from collections import Counter
from http import HTTPMethod

from starlette.types import Scope

from quire.serve.metrics.definitions import BY_NAME
from quire.serve.metrics.distribution import Distribution
from quire.serve.metrics.reading import Reading, buckets_of

OTHER = "other"
_METHODS = frozenset(method.value for method in HTTPMethod)


class HttpRequests:
    """Counts of HTTP requests."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._seconds = Distribution(BY_NAME["http_request_seconds"].buckets)

    def add(self, scope: Scope, status: int, seconds: float) -> None:
        """Count a request whose response has ended.

        Args:
            scope: of the request; its path counts as the path of the route, so that clients
                cannot create time series.
            status: status of the response.
            seconds: time from the request to the end of the response.
        """
        method = scope["method"] if scope["method"] in _METHODS else OTHER
        self._counts[method, _path(scope), str(status)] += 1
        self._seconds.add(seconds)

    def read_into(self, reading: Reading) -> None:
        """Add the counts to a reading."""
        reading.labelled["http_requests"] = {k: float(v) for k, v in self._counts.items()}
        reading.histograms["http_request_seconds"] = buckets_of(self._seconds)


def _path(scope: Scope) -> str:
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else OTHER
