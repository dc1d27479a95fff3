"""Timelines and eviction traces of requests, and the numbers of recently finished requests."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from quire.errors import RequestError
from quire.layout.sparse import OFF
from quire.sampling.outputs import OutputDelta
from quire.scheduler.events import EventLog, KVEvent
from quire.scheduler.eviction_trace import EvictionEntry, RetainedSets, retained_sets
from quire.scheduler.request import Request

KEPT_FINISHED = 256
"""Finished sequences whose numbers and timelines are stored."""
FIRST_EVENTS = 64
LAST_EVENTS = 192
"""Events of a sequence that are stored: the first ones and the last ones."""
KEPT_TRACES = 256


class RequestTimeline:
    """The first and the last events of one sequence."""

    __slots__ = ("_first", "_last", "num_events")

    def __init__(self) -> None:
        self.num_events = 0
        self._first: list[KVEvent] = []
        self._last: deque[KVEvent] = deque(maxlen=LAST_EVENTS)

    def add(self, event: KVEvent) -> None:
        self.num_events += 1
        if len(self._first) < FIRST_EVENTS:
            self._first.append(event)
        else:
            self._last.append(event)

    @property
    def events(self) -> list[KVEvent]:
        return [*self._first, *self._last]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """Numbers of a finished sequence; its tokens are not stored."""

    request_id: str  # id of the sequence
    group: str  # id of the request that it belongs to
    tenant: str
    priority: int
    evict: str
    sparse: str
    finish_reason: str
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    cached_tokens: int
    num_preemptions: int
    num_evictions: int
    evicted_tokens: float  # mean over its lanes
    kv_peak_bytes: int  # most KV bytes that it referred to
    arrival_s: float  # times on the engine's clock
    first_token_s: float  # 0 without a token
    finish_s: float
    timeline: RequestTimeline


@dataclass(slots=True)
class _Open:
    """A submitted request whose last delta was not returned yet."""

    sequences: Sequence[Request]
    reasons: dict[int, str] = field(default_factory=dict)


class RequestLog:
    """Timelines of the open requests, and the newest `KEPT_FINISHED` finished sequences.

    Args:
        clock: returns seconds; the clock of the event log.
    """

    def __init__(self, events: EventLog, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open: dict[str, _Open] = {}
        self._timelines: dict[str, RequestTimeline] = {}
        self._finished: deque[FinishedRequest] = deque(maxlen=KEPT_FINISHED)
        self.newly_finished: list[FinishedRequest] = []
        events.subscribe(self._record)

    def open(self, request_id: str, sequences: Sequence[Request]) -> None:
        self._open[request_id] = _Open(sequences)
        for sequence in sequences:
            self._timelines[sequence.request_id] = RequestTimeline()

    def note(self, deltas: Iterable[OutputDelta]) -> None:
        self.newly_finished = []
        for delta in deltas:
            if delta.finish_reason is not None and delta.request_id in self._open:
                opened = self._open[delta.request_id]
                opened.reasons[delta.index] = delta.finish_reason
                if delta.is_last:
                    del self._open[delta.request_id]
                    self._finish(delta.request_id, opened, delta.finish_reason)
        self._finished.extend(self.newly_finished)

    def timeline(self, request_id: str) -> RequestTimeline | None:
        return self._timelines.get(request_id)

    @property
    def finished(self) -> list[FinishedRequest]:
        return list(self._finished)

    def _record(self, event: KVEvent) -> None:
        timeline = self._timelines.get(event.request_id)
        if timeline is not None:
            timeline.add(event)

    def _finish(self, group: str, opened: _Open, last_reason: str) -> None:
        now_s = self._clock()
        for index, sequence in enumerate(opened.sequences):
            timeline = self._timelines.pop(sequence.request_id)
            if timeline.num_events or sequence.progress.output_token_ids or not index:
                reason = opened.reasons.get(index, last_reason)
                self.newly_finished.append(_numbers(sequence, group, reason, now_s, timeline))


def _numbers(
    request: Request, group: str, reason: str, now_s: float, timeline: RequestTimeline
) -> FinishedRequest:
    progress, eviction = request.progress, request.eviction
    return FinishedRequest(
        request_id=request.request_id,
        group=group,
        tenant=request.tenant,
        priority=request.priority,
        evict=request.spec.evict,
        sparse=OFF if request.spec.sparse is None else request.spec.sparse.text,
        finish_reason=reason,
        prompt_tokens=len(request.prompt_token_ids),
        output_tokens=len(request.output_token_ids),
        max_tokens=request.params.max_tokens,
        cached_tokens=progress.cached_tokens,
        num_preemptions=progress.num_preemptions,
        num_evictions=eviction.num_evictions,
        evicted_tokens=eviction.evicted_tokens,
        kv_peak_bytes=request.memory.kv_peak_bytes,
        arrival_s=request.spec.arrival_s,
        first_token_s=progress.first_token_s,
        finish_s=progress.finish_s or now_s,
        timeline=timeline,
    )


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
