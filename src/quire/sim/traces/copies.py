"""Copies of a trace with other contents: the load of more users."""

from collections.abc import Iterator
from dataclasses import replace

from quire.sim.traces.base import Segment, TraceRequest


def with_copies(requests: list[TraceRequest], copies: int) -> list[TraceRequest]:
    """Requests of a trace and of its copies, by arrival time.

    Copy k of n starts at k / n of the trace and goes on with the beginning of the trace after its
    end. Copies share no content.

    Args:
        requests: requests in the order of arrival, from 0 s.
        copies: number of copies, 1 or more; 1 for the trace alone.
    """
    if copies == 1:
        return requests
    found = [request for copy in range(copies) for request in _copy(requests, copy, copies)]
    return sorted(found, key=lambda request: request.arrival_s)


def _copy(requests: list[TraceRequest], copy: int, copies: int) -> Iterator[TraceRequest]:
    span_s = requests[-1].arrival_s
    shift_s = span_s * copy / copies
    last_line = max(request.line for request in requests)
    for request in requests:
        later_s = request.arrival_s - shift_s
        yield replace(
            request,
            line=request.line + copy * last_line,
            arrival_s=later_s if later_s >= 0 else later_s + span_s,
            prompt=tuple(_moved(segment, copy, copies) for segment in request.prompt),
            answer=_moved(request.answer, copy, copies),
        )


def _moved(segment: Segment, copy: int, copies: int) -> Segment:
    """The segment with a content of its own; contents of one request stay negative."""
    content = segment.content
    moved = content * copies + copy if content >= 0 else (content + 1) * copies - copy - 1
    return segment._replace(content=moved)
