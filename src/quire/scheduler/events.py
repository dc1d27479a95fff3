"""What happens to KV, as events: who got memory, who lost it, why, and what it cost.

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
| cached, uncached | blocks, kv_bytes |
| stored | blocks, kv_bytes |
| restored | tokens, read_tokens, kv_bytes, seconds |
| freed | kv_bytes, reason |
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
    *("preempted", "evicted", "cached", "uncached", "stored", "restored", "freed"),
)
KEPT_EVENTS = 4096

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KVEvent:
    """One thing that happened.

    Attributes:
        kind: one of `KINDS`.
        time_s: reading of the log's clock.
        request_id: whose KV; "" where it belongs to no request.
        tenant: on whose account.
        data: numbers and words as the table above says.
        number: 1, 2, 3, ... in the order of the log.
    """

    kind: str
    time_s: float
    request_id: str
    tenant: str
    data: Mapping[str, Value]
    number: int = 0

    def as_dict(self) -> dict[str, Value]:
        """Flat JSON values. Names in `data` never hide those of the event itself."""
        return {
            **self.data,
            "number": self.number,
            "kind": self.kind,
            "time_s": self.time_s,
            "request_id": self.request_id,
            "tenant": self.tenant,
        }


class EventLog:
    """Keeps the newest events and passes each on.

    A listener that raises is dropped, and the log says so once: who watches must not stop who
    works.

    Args:
        clock: seconds.
        kept: events remembered.

    Attributes:
        num_events: since the start; the number of the last one.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, kept: int = KEPT_EVENTS
    ) -> None:
        self.num_events = 0
        self._clock = clock
        self._newest: deque[KVEvent] = deque(maxlen=kept)
        self._listeners: tuple[Listener, ...] = ()

    def now_s(self) -> float:
        """Reading of the clock that events are stamped with."""
        return self._clock()

    def subscribe(self, listener: Listener) -> None:
        """Call `listener` with every event from now on."""
        self._listeners = (*self._listeners, listener)

    def unsubscribe(self, listener: Listener) -> None:
        """Call it no more; one that is not there is ignored."""
        self._listeners = tuple(other for other in self._listeners if other != listener)

    def emit(self, kind: str, request: Request | None, **data: Value) -> None:
        """Note an event about a request, or about the pool."""
        owner = ("", "") if request is None else (request.request_id, request.tenant)
        self.num_events += 1
        event = KVEvent(kind, self._clock(), *owner, data, self.num_events)
        self._newest.append(event)
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:
                self.unsubscribe(listener)
                logger.exception("a listener of KV events is dropped: it raised")

    def newest(
        self, kinds: Iterable[str] = KINDS, *, since: int = 0, most: int | None = None
    ) -> list[KVEvent]:
        """The remembered events of these kinds, oldest first.

        Args:
            kinds: of `KINDS`.
            since: only those with a larger number.
            most: only the newest so many of these; None for all.

        Raises:
            UnknownName: there is no such kind.
        """
        wanted = frozenset(kinds)
        for kind in sorted(wanted.difference(KINDS)):
            raise UnknownName("kind of KV event", kind, KINDS)
        found = [e for e in self._newest if e.number > since and e.kind in wanted]
        return found if most is None else found[max(0, len(found) - most) :]


class PrefixEvents:
    """Puts what a prefix index tells into an event log; a `PrefixListener`.

    Args:
        log: the events.
        block_bytes: of a block's pages.
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
        """Blocks can be shared now."""
        self._tell("cached", len(block_hashes))

    def removed(self, block_hashes: Sequence[bytes]) -> None:
        """Blocks have been dropped."""
        self._tell("uncached", len(block_hashes))

    def _tell(self, kind: str, blocks: int) -> None:
        self._log.emit(kind, None, blocks=blocks, kv_bytes=blocks * self._block_bytes)
