"""What happens to KV, as events: who got memory, who lost it, why, and what it cost.

| kind | data |
|---|---|
| admitted | tokens, cached_tokens |
| chunk | tokens, kv_bytes |
| shared | tokens, kv_bytes |
| copied | pages, kv_bytes |
| swapped_out, swapped_in | kv_bytes, seconds |
| preempted | how, reason, lost_tokens, freed_bytes |
| cached, uncached | tokens, kv_bytes |
| freed | kv_bytes, reason |
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from quire.engine.request import Request

Value = int | float | str
Listener = Callable[["KVEvent"], None]

KINDS = (
    *("admitted", "chunk", "shared", "copied", "swapped_out", "swapped_in"),
    *("preempted", "cached", "uncached", "freed"),
)
KEPT_EVENTS = 4096


@dataclass(frozen=True, slots=True)
class KVEvent:
    """One thing that happened.

    Attributes:
        kind: one of `KINDS`.
        time_s: reading of the log's clock.
        request_id: whose KV; "" where it belongs to no request.
        tenant: on whose account.
        data: numbers and words as the table above says.
    """

    kind: str
    time_s: float
    request_id: str
    tenant: str
    data: Mapping[str, Value]


class EventLog:
    """Keeps the newest events and passes each on.

    Args:
        clock: seconds.
        kept: events remembered.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, kept: int = KEPT_EVENTS
    ) -> None:
        self._clock = clock
        self._newest: deque[KVEvent] = deque(maxlen=kept)
        self._listeners: list[Listener] = []

    def subscribe(self, listener: Listener) -> None:
        """Call `listener` with every event from now on."""
        self._listeners.append(listener)

    def emit(self, kind: str, request: Request | None, **data: Value) -> None:
        """Note an event about a request, or about the pool."""
        owner = ("", "") if request is None else (request.request_id, request.tenant)
        event = KVEvent(kind, self._clock(), *owner, data)
        self._newest.append(event)
        for listener in self._listeners:
            listener(event)

    def newest(self, kinds: Iterable[str] = KINDS) -> list[KVEvent]:
        """The remembered events of these kinds, oldest first."""
        wanted = frozenset(kinds)
        return [event for event in self._newest if event.kind in wanted]
