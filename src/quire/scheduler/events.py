"""KV events: allocations, copies, evictions and frees of KV, with their reasons and costs.

| kind | data |
|---|---|
| admitted | tokens, cached_tokens |
| chunk | tokens, kv_bytes |
| shared | tokens, kv_bytes |
| copied | kv_bytes |
| evicted | tokens, freed_bytes, reason, length |
| swapped_out, swapped_in | kv_bytes, seconds |
| offloaded | kv_bytes |
| preempted | how, reason, lost_tokens, freed_bytes |
| freed | kv_bytes, reason |
| prefix_cached, prefix_evicted | blocks, kv_bytes |
| prefix_stored | blocks, kv_bytes |
| prefix_loaded | tokens, computed_tokens, kv_bytes, seconds |
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from quire.errors import UnknownName
from quire.scheduler.request import Request

Value = int | float | str
Listener = Callable[["KVEvent"], None]

KINDS = (
    *("admitted", "chunk", "shared", "copied", "swapped_out", "swapped_in", "offloaded"),
    *("preempted", "evicted", "freed"),
    *("prefix_cached", "prefix_evicted", "prefix_stored", "prefix_loaded"),
)
KEPT_EVENTS = 4096

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KVEvent:
    """One event.

    Attributes:
        kind: one of `KINDS`.
        time_s: the log's clock at the event, in seconds.
        request_id: the request whose KV changed; "" if the event concerns no single request.
        tenant: the tenant of that request; "" without a request.
        data: the values that the table above lists for this kind.
        number: sequence number in the log, from 1.
    """

    kind: str
    time_s: float
    request_id: str
    tenant: str
    data: Mapping[str, Value]
    number: int = 0

    def as_dict(self) -> dict[str, Value]:
        """Return flat JSON values. The event's own fields take precedence over keys of `data`."""
        return {
            **self.data,
            "number": self.number,
            "kind": self.kind,
            "time_s": self.time_s,
            "request_id": self.request_id,
            "tenant": self.tenant,
        }


class EventLog:
    """Log of the newest events, which also calls listeners.

    A listener that raises is removed and the error is logged, so that a listener cannot stop the
    engine.

    Args:
        clock: returns seconds.
        kept: maximum number of events retained.

    Attributes:
        num_events: events since the start; equals the number of the last event.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, kept: int = KEPT_EVENTS
    ) -> None:
        self.num_events = 0
        self._clock = clock
        self._newest: deque[KVEvent] = deque(maxlen=kept)
        self._listeners: tuple[Listener, ...] = ()

    def now_s(self) -> float:
        """Return the time of the clock that stamps events, in seconds."""
        return self._clock()

    def subscribe(self, listener: Listener) -> None:
        """Call `listener` with every later event."""
        self._listeners = (*self._listeners, listener)

    def unsubscribe(self, listener: Listener) -> None:
        """Remove a listener; an unknown listener is ignored."""
        self._listeners = tuple(other for other in self._listeners if other != listener)

    def emit(self, kind: str, request: Request | None, **data: Value) -> None:
        """Record an event about a request, or about the page pool (`request` is None)."""
        owner = ("", "") if request is None else (request.request_id, request.tenant)
        self.num_events += 1
        event = KVEvent(kind, self._clock(), *owner, data, self.num_events)
        self._newest.append(event)
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:
                self.unsubscribe(listener)
                logger.exception("removed a listener of KV events because it raised")

    def newest(
        self, kinds: Iterable[str] = KINDS, *, since: int = 0, most: int | None = None
    ) -> list[KVEvent]:
        """Return the retained events of these kinds, oldest first.

        Args:
            kinds: values of `KINDS`.
            since: return only events with a larger number.
            most: maximum number of events, the newest ones; None for all.

        Raises:
            UnknownName: an unknown kind.
        """
        wanted = frozenset(kinds)
        for kind in sorted(wanted.difference(KINDS)):
            raise UnknownName("kind of KV event", kind, KINDS)
        found = [e for e in self._newest if e.number > since and e.kind in wanted]
        return found if most is None else found[max(0, len(found) - most) :]


class PrefixEvents:
    """Listener that records changes of a prefix index in an event log; a `PrefixListener`.

    Args:
        log: the event log.
        block_bytes: bytes of one block's pages.
    """

    def __init__(self, log: EventLog, block_bytes: int) -> None:
        self._log, self._block_bytes = log, block_bytes

    def stored(
        self,
        block_hashes: Sequence[bytes],
        parent_hash: bytes | None,
        token_ids: Sequence[int],
        page_tokens: int,
    ) -> None:
        """Record that blocks were added to the prefix cache."""
        self._record_blocks("prefix_cached", len(block_hashes))

    def removed(self, block_hashes: Sequence[bytes]) -> None:
        """Record that blocks were evicted from the prefix cache."""
        self._record_blocks("prefix_evicted", len(block_hashes))

    def _record_blocks(self, kind: str, blocks: int) -> None:
        self._log.emit(kind, None, blocks=blocks, kv_bytes=blocks * self._block_bytes)
