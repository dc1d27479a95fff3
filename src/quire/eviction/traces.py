"""Finds what has left requests, those that have ended included where somebody wants to know."""

from collections import OrderedDict
from collections.abc import Iterable

from quire.errors import RequestError
from quire.scheduler.eviction_trace import EvictionEntry, RetainedSets, retained_sets
from quire.scheduler.request import Request

KEPT_TRACES = 256


class Traces:
    """The traces of recorded requests, the newest `KEPT_TRACES` of them."""

    def __init__(self) -> None:
        self._recorded: OrderedDict[str, list[EvictionEntry]] = OrderedDict()

    def follow(self, sequences: Iterable[Request]) -> None:
        """Keep what leaves these sequences, where that was asked for."""
        for request in sequences:
            if request.spec.records_evictions:
                self._recorded[request.request_id] = request.eviction.trace
                self._recorded.move_to_end(request.request_id)
        while len(self._recorded) > KEPT_TRACES:
            self._recorded.popitem(last=False)

    def of(self, request_id: str, unfinished: Iterable[Request]) -> list[RetainedSets]:
        """What stayed of a request after each eviction.

        Raises:
            RequestError: it is not remembered.
        """
        running = {request.request_id: request.eviction.trace for request in unfinished}
        trace = running.get(request_id, self._recorded.get(request_id))
        if trace is None:
            raise RequestError(
                f"nothing is known of what left request {request_id!r}: ask while it runs, or "
                "submit it with record_evictions"
            )
        return list(retained_sets(trace))
