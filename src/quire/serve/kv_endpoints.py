"""The endpoints of the KV memory: ledger, page map, events, tenants, prefixes and what-if plans.

KV events as server-sent events, with a bounded queue for each client.

    engine's thread   event -> deque, and a wake-up of the event loop at most every FLUSH_S
    event loop        deque -> queue of each client -> its connection

A client that reads too slowly loses the oldest events of its queue and is told how many.
"""

import asyncio
import base64
import json
import math
import re
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from quire.api.llm import LLM
from quire.engine.core import Engine
from quire.engine.inspection.prefixes import Blocks, PrefixChain, read_prefixes
from quire.engine.inspection.requests import (
    Retention,
    find_request,
    one_request,
    read_retention,
    request_rows,
)
from quire.engine.inspection.totals import (
    HISTORY_COLUMNS,
    MAX_CELLS,
    overview,
    read_page_map,
    tenant_rows,
)
from quire.engine.ledger import Snapshot
from quire.errors import ConfigError, EngineDead
from quire.layout.codec_names import CODECS, PAIRS
from quire.layout.kv_format import read_format, stored_codec
from quire.layout.layout import layout_for
from quire.layout.pages import CacheLayout
from quire.layout.sparse import parse_sparse
from quire.plan.capacity import capacity, sequence_bytes
from quire.scheduler.events import KEPT_EVENTS, KINDS, KVEvent, Value
from quire.serve.errors import Draining, FieldError, TooManyStreams, UnknownRequest, bounded
from quire.serve.fields import nearest, shown_name
from quire.serve.responses import STREAM
from quire.serve.service import Service
from quire.serve.tenant_keys import tenant_of
from quire.version import __version__

_OTHER_TENANT = re.compile(r"^tenant (\S+)")


def only_tenant(service: Service, request: Request) -> str | None:
    """The tenant whose rows the client may see; None: all, if no tenant has a key."""
    return tenant_of(request) if service.keys.tells_tenants_apart else None


def event_of(event: KVEvent, tenant: str | None) -> dict[str, Value]:
    """A KV event as JSON values, without the names of other tenants."""
    return without_other_tenants(event.as_dict(), tenant)


def without_other_tenants(event: Mapping[str, Any], tenant: str | None) -> dict[str, Any]:
    """Replace the name of another tenant in the reason of an event."""
    shown = dict(event)
    reason = shown.get("reason")
    if tenant is not None and isinstance(reason, str):
        named = _OTHER_TENANT.match(reason)
        if named is not None and named[1] != tenant:
            shown["reason"] = f"another tenant{reason[named.end() :]}"
    return shown


async def refuse_unknown_parameters(request: Request) -> None:
    """Refuse query parameters that are similar to a parameter of the endpoint."""
    route = request.scope["route"]
    known = tuple(parameter.alias for parameter in route.dependant.query_params)
    for name in request.query_params:
        near = None if name in known else nearest(name, known)
        if near is not None:
            shown = shown_name(name)
            raise FieldError(shown, f"unknown parameter `{shown}`: did you mean `{near}`?")


MAX_BUDGET_BYTES = 1 << 50
DEFAULT_LENGTH = 2048


def plan_for(
    llm: LLM,
    budget_bytes: int | None,
    length: int | None,
    retained: int | None,
    codec: str | None = None,
) -> dict[str, Any]:
    """Sequences of a length that fit in a budget, as JSON values; without `retained` as quire plan.

    Args:
        llm: the served model; its page size and eviction policy are used.
        budget_bytes: size of the KV memory; None: the engine's.
        length: tokens of a sequence; None: `DEFAULT_LENGTH` or the model's context, if shorter.
        retained: tokens that an evicting lane without a window retains; None: no eviction.
        codec: codec of keys and values; None: the engine's.

    Raises:
        FieldError: the codec is unknown, or the budget holds no sequence.
    """
    engine, model = llm.engine, llm.model.spec
    total_bytes, dtype = engine.pool.kv.memory.total_bytes, engine.pool.stored_as.dtype
    budget_bytes = total_bytes if budget_bytes is None else budget_bytes
    length = min(DEFAULT_LENGTH, model.max_positions) if length is None else length
    most, field = engine.schedule_config.max_num_seqs, "codec"
    try:
        if codec is None:
            codec = engine.pool.codec
        else:
            codec = stored_codec(codec, dtype, latent=model.latent is not None)
        layout, field = _layout_with(llm, codec, retained), "budget_bytes"
        held = capacity(
            model,
            budget_bytes,
            layout=layout,
            sequence_tokens=length,
            batch=most,
            retained=retained,
        )
    except ConfigError as error:
        raise FieldError(field, str(error)) from None
    free_of_constants = [c.name for c in CODECS.values() if not (c.is_plain or c.constants)]
    return {
        "object": "kv.plan",
        "budget_bytes": budget_bytes,
        "length": length,
        "retained": retained,
        "codec": codec,
        "codecs": list(dict.fromkeys([engine.pool.codec, dtype, *free_of_constants, *PAIRS])),
        "bytes_per_sequence": sequence_bytes(layout, length, retained),
        "sequences": held.sequences,
        "max_num_seqs": most,
        "concurrency": min(held.sequences, most),
        "limit": "max_num_seqs" if held.limit == "none" else held.limit,
        "longest_tokens": held.longest_tokens,
        "longest_limit": held.longest_limit,
        "current_bytes": total_bytes,
        "smallest_bytes": layout.smallest_sequence_bytes,
        "max_positions": model.max_positions,
    }


def _layout_with(llm: LLM, codec: str, retained: int | None) -> CacheLayout:
    """Lane groups of a sequence in another codec; with eviction those of the server's policy."""
    rules, evicts = llm.engine.pool.rules, retained is not None
    layout = layout_for(
        llm.model.spec,
        codec=codec,
        page_tokens=llm.engine.kv_config.page_tokens,
        evicting=evicts or read_format(codec).promoted is not None,
        heads_apart=evicts and rules.heads_apart,
        rotated=not (evicts and rules.rerotates_keys),
        statistics=llm.engine.pool.eviction.spec.statistics if evicts else (),
        bounds=parse_sparse(llm.engine.kv_config.sparse) is not None,
    )
    return rules.fitted(layout) if evicts else layout


FLUSH_S = 0.05
"""Least time between two wake-ups of the event loop by the engine."""
MAX_QUEUED = 1024
"""Events that wait for one slow client."""
MAX_STREAMS, MAX_STREAMS_PER_TENANT = 128, 32
_POLL_S = 0.5
_BATCH = 256

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # no buffering in proxies


class Subscription:
    """The queue of one client."""

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
        if len(self._queue) >= MAX_QUEUED:
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
        """Queue stored events, then those queued events that are newer than `number`."""
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
    """Events that the engine dropped, as the event loop was slower: counts by kind and tenant."""

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
    """Sends KV events to any number of clients; listens to the log only while there are clients."""

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
        if len(self._clients) >= MAX_STREAMS or own >= MAX_STREAMS_PER_TENANT:
            raise TooManyStreams(len(self._clients), MAX_STREAMS, MAX_STREAMS_PER_TENANT)

    async def _events(self, client: Subscription) -> AsyncIterator[str]:
        interval_s = self._service.config.sse_keep_alive_interval or math.inf
        yield "retry: 2000\n\n"
        sent_s = time.monotonic()
        while self._service.is_ready:
            await client.wait()
            text, now_s = client.take(), time.monotonic()
            if text or now_s - sent_s > interval_s:
                sent_s = now_s
                yield text or ": keep-alive\n\n"

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


MAX_ROWS, DEFAULT_ROWS = 1000, 100
MAX_TOKENS, DEFAULT_TOKENS = 16_384, 4096
MAX_CHAINS, DEFAULT_CHAINS = 2000, 200
DEFAULT_EVENTS = 256


class KVEndpoints:
    """Handlers of HTTP requests about the KV memory."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._streams = EventStreams(service)

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/v1/kv", dependencies=[Depends(refuse_unknown_parameters)])
        router.add_api_route("/overview", self.overview, methods=["GET"])
        router.add_api_route("/history", self.history, methods=["GET"])
        router.add_api_route("/ledger", self.ledger, methods=["GET"])
        router.add_api_route("/pages", self.pages, methods=["GET"])
        router.add_api_route("/tenants", self.tenants, methods=["GET"])
        router.add_api_route("/plan", self.plan, methods=["GET"])
        router.add_api_route("/events", self.events, methods=["GET"], response_model=None)
        router.add_api_route(
            "/events/stream",
            self.stream,
            methods=["GET"],
            response_model=None,
            response_class=StreamingResponse,
            responses=STREAM,
        )
        router.add_api_route("/requests", self.requests, methods=["GET"])
        router.add_api_route("/requests/{request_id}", self.request, methods=["GET"])
        router.add_api_route("/requests/{request_id}/tokens", self.tokens, methods=["GET"])
        router.add_api_route("/prefixes", self.prefixes, methods=["GET"])
        return router

    # ---- snapshots -----------------------------------------------------------------------------

    async def overview(self, request: Request) -> JSONResponse:
        """Return memory, request counts, counters, and latencies of the last 60 seconds."""
        tenant = only_tenant(self._service, request)
        found = await self._timed(lambda engine: overview(engine, tenant))
        return JSONResponse({"object": "kv.overview", **found, **self._server(tenant)})

    async def history(self, request: Request) -> JSONResponse:
        """Return numbers of the last three minutes, one row per second, oldest first."""
        tenant = only_tenant(self._service, request)
        points = [one[tenant] for one in self._service.history if tenant in one]
        return JSONResponse({"object": "list", "columns": HISTORY_COLUMNS, "data": points})

    async def ledger(self, request: Request) -> JSONResponse:
        """Return the ledger between two steps; a tenant with a key gets its own part."""
        tenant = only_tenant(self._service, request)
        found = await self._service.ledger()
        return JSONResponse(found if tenant is None else ledger_of(found, tenant))

    async def pages(
        self,
        request: Request,
        cells: Annotated[int, Query(ge=1, le=MAX_CELLS)] = MAX_CELLS,
        map: bool = True,  # noqa: FBT001, FBT002 - a query parameter
    ) -> JSONResponse:
        """Return the owner and state of every page; a tenant with a key gets its own pages."""
        tenant = only_tenant(self._service, request)
        found = await self._timed(lambda engine: {"pages": read_page_map(engine, tenant)})
        copied = found.pop("pages")
        body = await self._service.texts.in_turn_of(
            tenant_of(request), lambda: copied.encode(cells, with_map=map)
        )
        return JSONResponse({"object": "kv.pages", **found, **body})

    async def tenants(self, request: Request) -> JSONResponse:
        """Return quota, use and counters of each tenant; a tenant with a key gets its own row."""
        tenant = only_tenant(self._service, request)
        found = await self._timed(lambda engine: {"data": tenant_rows(engine, tenant)})
        return JSONResponse({"object": "list", **found})

    async def plan(
        self,
        request: Request,
        budget_bytes: Annotated[int | None, Query(ge=1, le=MAX_BUDGET_BYTES)] = None,
        length: Annotated[int | None, Query(ge=1, le=1 << 31)] = None,
        retained: Annotated[int | None, Query(ge=1, le=1 << 31)] = None,
        codec: Annotated[str | None, Query(max_length=200)] = None,
    ) -> JSONResponse:
        """Return how many sequences a KV memory of another size or codec would hold."""
        return JSONResponse(plan_for(self._service.llm, budget_bytes, length, retained, codec))

    async def _timed(self, read: Any) -> Snapshot:
        """Read the engine; add the time of its clock, and the time of day."""

        def with_time(engine: Engine) -> Snapshot:
            return {"time_s": engine.events.now_s(), **read(engine)}

        return {"unix_time_s": time.time(), **await self._service.inspect(with_time)}

    def _server(self, tenant: str | None) -> Snapshot:
        """What the dashboard shows of the server itself."""
        service, engine = self._service, self._service.llm.engine
        body: Snapshot = {
            "model": service.model_name,
            "version": __version__,
            "codec": engine.pool.codec,
            "evict": engine.pool.rules.default.text,
            "sparse": engine.kv_config.sparse,
            "max_model_len": service.max_tokens,
            "max_num_seqs": engine.schedule_config.max_num_seqs,
            "tenant": tenant,
            "shows_texts": service.shows_texts,
        }
        return body if tenant is not None else body | {"inspection": asdict(service.inspection)}

    # ---- single requests and prefixes ----------------------------------------------------------

    async def requests(
        self, request: Request, limit: Annotated[int, Query(ge=1, le=MAX_ROWS)] = DEFAULT_ROWS
    ) -> JSONResponse:
        """Return running, waiting and recently finished requests, and why requests wait."""
        tenant = only_tenant(self._service, request)
        found = await self._timed(lambda engine: request_rows(engine, tenant, limit))
        return JSONResponse({"object": "kv.requests", **found})

    async def request(self, request: Request, request_id: str) -> JSONResponse:
        """Return one request with its timeline: its events, with times, costs and reasons."""
        tenant = only_tenant(self._service, request)
        found = await self._timed(lambda engine: one_request(engine, request_id, tenant) or {})
        if "timeline" not in found:
            raise UnknownRequest(request_id, "open or recently finished")
        found["timeline"] = [without_other_tenants(e, tenant) for e in found["timeline"]]
        return JSONResponse({"object": "kv.request", **found})

    async def tokens(
        self,
        request: Request,
        request_id: str,
        first: Annotated[int, Query(ge=0, le=1 << 40)] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_TOKENS)] = DEFAULT_TOKENS,
        lanes: bool = False,  # noqa: FBT001, FBT002 - a query parameter
    ) -> JSONResponse:
        """Return the tokens of an open request, and how many lanes still retain each of them."""
        tenant = only_tenant(self._service, request)

        def read(engine: Engine) -> Retention | None:
            found = find_request(engine, request_id, tenant)
            return None if found is None else read_retention(engine.pool, found)

        retention = await self._service.inspect(read)
        if retention is None:
            raise UnknownRequest(request_id, "open")
        body = await self._service.texts.in_turn_of(
            tenant_of(request), lambda: self._tokens(retention, first, limit, with_lanes=lanes)
        )
        return JSONResponse({"object": "kv.tokens", "request_id": request_id, **body})

    def _tokens(self, found: Retention, first: int, limit: int, *, with_lanes: bool) -> Snapshot:
        shown, whole = found.token_ids[first : first + limit], found.mask()
        mask = whole[:, first : first + limit]
        pieces = self._service.pieces
        texts = [pieces.text(token) for token in shown] if self._service.shows_texts else None
        body = {
            "first": first,
            "num_tokens": len(found.token_ids),
            "prompt_tokens": found.prompt_tokens,
            "computed_tokens": found.num_computed,
            "num_lanes": len(mask),
            "retained_tokens": round(float(whole.sum()) / max(1, len(mask)), 2),
            "token_ids": shown if self._service.shows_texts else None,
            "texts": texts,
            "retained": mask.sum(axis=0).tolist(),
        }
        if with_lanes:
            packed = np.packbits(mask, axis=1, bitorder="little")
            body["lanes"] = found.lanes
            body["bitmaps"] = [base64.b64encode(lane.tobytes()).decode() for lane in packed]
        return body

    async def prefixes(
        self, request: Request, limit: Annotated[int, Query(ge=1, le=MAX_CHAINS)] = DEFAULT_CHAINS
    ) -> JSONResponse:
        """Return the prefix cache as a tree of chains, with texts of the client's own tenant."""
        tenant, own = only_tenant(self._service, request), tenant_of(request)

        def read(engine: Engine) -> tuple[float, Blocks]:
            return engine.events.now_s(), read_prefixes(engine, tenant)

        now_s, blocks = await self._service.inspect(read)
        body = await self._service.texts.in_turn_of(
            own, lambda: self._prefixes(blocks, now_s, own, limit)
        )
        return JSONResponse({"object": "kv.prefixes", "time_s": now_s, **body})

    def _prefixes(self, blocks: Blocks, now_s: float, own: str, limit: int) -> Snapshot:
        tree, chains = blocks.tree, blocks.chains()
        shown = _largest(chains, limit)
        index = {old: new for new, old in enumerate(shown)}
        return {
            "enabled": tree.enabled,
            "block_tokens": tree.block_tokens,
            "block_bytes": tree.block_bytes,
            "num_blocks": tree.num_blocks,
            "num_left_out": tree.num_left_out,
            "num_chains": len(chains),
            "data": [self._chain(chains[i], index, blocks, now_s, own) for i in shown],
        }

    def _chain(
        self, chain: PrefixChain, index: dict[int, int], blocks: Blocks, now_s: float, own: str
    ) -> Snapshot:
        tree = blocks.tree
        may_read = chain.owner in ("", own) and self._service.shows_texts
        text = "".join(map(self._service.pieces.text, chain.token_ids)) if may_read else None
        idle_s = 0.0 if math.isinf(chain.idle_since_s) else max(0.0, now_s - chain.idle_since_s)
        return {
            "parent": index.get(chain.parent),
            "tenant": chain.owner or None,
            "start": chain.start,
            "blocks": chain.blocks,
            "tokens": chain.blocks * tree.block_tokens,
            "bytes": chain.blocks * tree.block_bytes,
            "references": chain.users,
            "idle_s": None if chain.users else round(idle_s, 3),
            "text": text,
        }

    # ---- events --------------------------------------------------------------------------------

    async def events(
        self,
        request: Request,
        kinds: str | None = None,
        since: Annotated[int, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=1, le=KEPT_EVENTS)] = DEFAULT_EVENTS,
    ) -> Response:
        """Return the newest events, oldest first; with `Accept: text/event-stream`, stream them."""
        tenant = only_tenant(self._service, request)
        if "text/event-stream" in request.headers.get("accept", ""):
            return await self._stream(request, kinds)
        events = await self._service.events(_wanted(kinds), since=since, most=KEPT_EVENTS)
        own = [event_of(event, tenant) for event in events if tenant in (None, event.tenant)]
        return JSONResponse({"object": "list", "data": own[-limit:]})

    async def stream(
        self,
        request: Request,
        kinds: str | None = None,
        since: Annotated[int | None, Query(ge=0)] = None,
    ) -> Response:
        """Stream events as server-sent events, after `since` or the header `Last-Event-ID`."""
        return await self._stream(request, kinds)

    async def _stream(self, request: Request, kinds: str | None) -> Response:
        return await self._streams.open(
            _wanted(kinds),
            since=_last_event(request),
            tenant=only_tenant(self._service, request),
            name=tenant_of(request),
        )


def _largest(chains: Sequence[PrefixChain], limit: int) -> list[int]:
    """Indices of the chains with the most blocks, and of all chains before them, in order."""
    by_size = sorted(range(len(chains)), key=lambda i: -chains[i].blocks)
    shown: set[int] = set()
    for number in by_size:
        path = [number]
        while chains[path[-1]].parent >= 0:
            path.append(chains[path[-1]].parent)
        if len(shown.union(path)) > limit:
            break
        shown.update(path)
    return sorted(shown)


def _last_event(request: Request) -> int | None:
    """Number of the last event that a client of the stream knows; None: only new events."""
    text = request.headers.get("last-event-id") or request.query_params.get("since")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise FieldError(
            "Last-Event-ID", f"expected the number of an event, got {bounded(text, 40)!r}"
        )
    return int(text)


def _wanted(kinds: str | None) -> tuple[str, ...]:
    """Parse comma-separated kinds of events; default: all kinds."""
    if kinds is None:
        return KINDS
    wanted = tuple(kind.strip() for kind in kinds.split(","))
    for kind in wanted:
        if kind not in KINDS:
            raise FieldError(
                "kinds",
                f"there are no events of kind {bounded(kind, 40)!r}; choose from "
                f"{', '.join(KINDS)}, separated by commas",
            )
    return wanted


# ---- tenant ledger -------------------------------------------------------------------------------

# The ledger for one tenant: its own requests, and sums over these requests only.

_AXES = ("codec", "exactness", "sharing", "references")


def ledger_of(snapshot: Snapshot, tenant: str) -> Snapshot:
    """Reduce a ledger to the part of one tenant.

    Totals of the arena, the swap space and the prefix cache are left out, and the axes are summed
    over the tenant's requests: the totals would reveal the memory use of other tenants.
    """
    requests = [row for row in snapshot["requests"] if row["tenant"] == tenant]
    return {
        "axes": _axes(requests),
        "tenants": [row for row in snapshot["tenants"] if row["tenant"] == tenant],
        "requests": requests,
    }


def _axes(requests: list[Snapshot]) -> dict[str, dict[str, int]]:
    kv_bytes = sum(row["kv_bytes"] for row in requests)
    host_bytes = sum(row["host_bytes"] for row in requests)
    extents = [extent for row in requests for extent in row["extents"]]
    return {
        "location": {"device": kv_bytes, "host": host_bytes},
        "owner": {"requests": kv_bytes},
        **{axis: _sum((str(e[axis]), e["bytes"]) for e in extents) for axis in _AXES},
    }


def _sum(parts: Iterable[tuple[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for name, num_bytes in parts:
        total[name] += num_bytes
    return dict(total)
