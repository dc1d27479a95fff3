"""KV events as server-sent events, with a bounded queue for each client.

    engine's thread   event -> deque, and a wake-up of the event loop at most every FLUSH_S
    event loop        deque -> queue of each client -> its connection

A client that reads too slowly loses the oldest events of its queue and is told how many.
"""

import asyncio
import json
import math
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from quire.engine.core import Engine
from quire.errors import EngineDead
from quire.scheduler.events import KEPT_EVENTS, KVEvent
from quire.serve.errors import Draining, TooManyStreams
from quire.serve.kv_scope import event_of
from quire.serve.service import Service

FLUSH_S = 0.05
"""Least time between two wake-ups of the event loop by the engine."""
MOST_QUEUED = 1024
"""Events that wait for one slow client."""
MOST_STREAMS, MOST_STREAMS_PER_TENANT = 128, 32
_RETRY = "retry: 2000\n\n"
_KEEP_ALIVE = ": keep-alive\n\n"
_POLL_S = 0.5
_BATCH = 256

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # no buffering in proxies


class Subscription:
    """The queue of one client.

    Args:
        kinds: kinds of events to send.
        tenant: only events of this tenant; None: all.
        name: tenant of the client.
    """

    def __init__(self, kinds: Collection[str], tenant: str | None, name: str) -> None:
        self._kinds, self._tenant, self.name = frozenset(kinds), tenant, name
        self._queue: deque[KVEvent] = deque()
        self._first_number = 0  # of the log at the start; later events are new
        self._last_number = 0  # of the last queued event
        self._lost = 0
        self._filled = asyncio.Event()

    def put(self, event: KVEvent) -> None:
        """Queue a new event if the client wants it; drop the oldest one if the queue is full."""
        if event.number <= self._last_number or not self._wants(event):
            return
        self._last_number = event.number
        if len(self._queue) >= MOST_QUEUED:
            self._queue.popleft()
            self._lost += 1
        self._queue.append(event)
        self._filled.set()

    def _wants(self, event: KVEvent) -> bool:
        return event.kind in self._kinds and self._tenant in (None, event.tenant)

    def lose(self, dropped: "_Dropped") -> None:
        """Count new events that were dropped before they could be queued."""
        if dropped.last_number <= self._first_number:
            return
        kinds = [(kind, tenant) for kind, tenant in dropped.counts if kind in self._kinds]
        own = [key for key in kinds if self._tenant in (None, key[1])]
        self._lost += sum(dropped.counts[key] for key in own)
        self._filled.set()

    def start(self, stored: Collection[KVEvent], number: int) -> None:
        """Queue stored events, then those queued events that are newer.

        Args:
            stored: events of the log.
            number: number of the last event of the log, stored or not.
        """
        queued, self._queue, self._last_number = self._queue, deque(), 0
        for event in stored:
            self.put(event)
        self._first_number = self._last_number = number
        for event in queued:
            self.put(event)

    async def wait(self) -> None:
        """Wait for an event, at most `_POLL_S`."""
        try:
            await asyncio.wait_for(self._filled.wait(), _POLL_S)
        except TimeoutError:
            return

    def take(self) -> str:
        """Remove some queued events; return them in the format of server-sent events."""
        parts = []
        if self._lost:
            parts.append(f"event: lost\ndata: {json.dumps({'events': self._lost})}\n\n")
            self._lost = 0
        for _ in range(min(_BATCH, len(self._queue))):
            event = self._queue.popleft()
            shown = event_of(event, self._tenant)
            parts.append(f"id: {event.number}\ndata: {json.dumps(shown, allow_nan=False)}\n\n")
        if not self._queue:
            self._filled.clear()
        return "".join(parts)


@dataclass(slots=True)
class _Dropped:
    """Events that the engine dropped because the event loop was slower: counts by kind and tenant.

    Attributes:
        counts: number of events by kind and tenant.
        last_number: number of the last dropped event.
    """

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    last_number: int = 0

    def add(self, event: KVEvent) -> None:
        self.counts[event.kind, event.tenant] += 1
        self.last_number = event.number


class _EventResponse(StreamingResponse):
    """A stream that removes its client when sending ends, for any reason."""

    def __init__(self, events: AsyncIterator[str], leave: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=_HEADERS)
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._leave()


class EventStreams:
    """Sends KV events to any number of clients; listens to the log only while there are clients.

    Args:
        service: the service; it is started before the first client.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._clients: set[Subscription] = set()
        self._lock = threading.Lock()  # guards the next two
        self._fresh: deque[KVEvent] = deque()
        self._dropped = _Dropped()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_woken = False
        self._leaving: set[asyncio.Task[None]] = set()

    async def open(
        self, kinds: Collection[str], *, since: int | None, tenant: str | None, name: str
    ) -> StreamingResponse:
        """Start a stream.

        Args:
            kinds: kinds of events to send.
            since: number of the last event that the client knows; None: only new events.
            tenant: only events of this tenant; None: all.
            name: tenant of the client.

        Raises:
            TooManyStreams: too many streams are open.
            Draining: the server is shutting down.
            EngineDead: the engine has stopped.
        """
        self._check(name)
        client = Subscription(kinds, tenant, name)
        self._clients.add(client)
        try:
            self._loop = asyncio.get_running_loop()
            found = await self._service.inspect(lambda engine: self._listen(engine, since))
            client.start(*found)
        except BaseException:
            self._leave(client)
            raise
        return _EventResponse(self._events(client), partial(self._leave, client))

    def _check(self, name: str) -> None:
        if self._service.is_draining:
            raise Draining
        own = sum(client.name == name for client in self._clients)
        if len(self._clients) >= MOST_STREAMS or own >= MOST_STREAMS_PER_TENANT:
            raise TooManyStreams(len(self._clients), MOST_STREAMS, MOST_STREAMS_PER_TENANT)

    async def _events(self, client: Subscription) -> AsyncIterator[str]:
        interval_s = self._service.config.sse_keep_alive_interval or math.inf
        yield _RETRY
        sent_s = time.monotonic()
        while self._service.is_ready:
            await client.wait()
            text, now_s = client.take(), time.monotonic()
            if text or now_s - sent_s > interval_s:
                sent_s = now_s
                yield text or _KEEP_ALIVE

    def _leave(self, client: Subscription) -> None:
        """Remove a client; after the last one stop to listen, in a task: this one may be over."""
        self._clients.discard(client)
        task = asyncio.get_running_loop().create_task(self._stop_if_unused())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _stop_if_unused(self) -> None:
        if self._clients or not self._service.is_alive:
            return
        with suppress(EngineDead):
            await self._service.inspect(lambda engine: engine.events.unsubscribe(self._receive))

    # ---- in the engine's thread ----------------------------------------------------------------

    def _listen(self, engine: Engine, since: int | None) -> tuple[list[KVEvent], int]:
        """Subscribe to the log; return the events after `since`, and the log's last number."""
        log = engine.events
        log.unsubscribe(self._receive)
        log.subscribe(self._receive)
        stored = [] if since is None else log.newest(since=since)
        return stored, log.num_events

    def _receive(self, event: KVEvent) -> None:
        with self._lock:
            if len(self._fresh) >= KEPT_EVENTS:
                self._dropped.add(self._fresh.popleft())
            self._fresh.append(event)
        if not self._is_woken and self._loop is not None and not self._loop.is_closed():
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._schedule)

    # ---- in the event loop ---------------------------------------------------------------------

    def _schedule(self) -> None:
        asyncio.get_running_loop().call_later(FLUSH_S, self._deliver)

    def _deliver(self) -> None:
        self._is_woken = False
        with self._lock:
            events, self._fresh = self._fresh, deque()
            dropped, self._dropped = self._dropped, _Dropped()
        for client in self._clients:
            client.lose(dropped)
            for event in events:
                client.put(event)
