"""Eviction traces of requests, including finished requests that recorded them."""

from collections import OrderedDict
from collections.abc import Iterable

from quire.errors import RequestError
from quire.scheduler.eviction_trace import EvictionEntry, RetainedSets, retained_sets
from quire.scheduler.request import Request

KEPT_TRACES = 256


class Traces:
    """Traces of recorded requests, the newest `KEPT_TRACES` of them."""

    def __init__(self) -> None:
        self._recorded: OrderedDict[str, list[EvictionEntry]] = OrderedDict()

    def follow(self, sequences: Iterable[Request]) -> None:
        """Store the traces of requests that record evictions."""
        for request in sequences:
            if request.spec.records_evictions:
                self._recorded[request.request_id] = request.eviction.trace
                self._recorded.move_to_end(request.request_id)
        while len(self._recorded) > KEPT_TRACES:
            self._recorded.popitem(last=False)

    def of(self, request_id: str, unfinished: Iterable[Request]) -> list[RetainedSets]:
        """Return the retained tokens of a request after each eviction.

        Raises:
            RequestError: no trace of the request is stored.
        """
        running = {request.request_id: request.eviction.trace for request in unfinished}
        trace = running.get(request_id, self._recorded.get(request_id))
        if trace is None:
            raise RequestError(
                f"no eviction trace of request {request_id!r} is stored; query the trace while the "
                "request runs, or submit the request with record_evictions"
            )
        return list(retained_sets(trace))
