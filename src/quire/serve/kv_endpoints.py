"""The endpoints of the KV memory: ledger, page map, events, tenants, prefixes and what-if plans."""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from quire.engine.core import Engine
from quire.engine.inspection.pages import MOST_CELLS, read_page_map
from quire.engine.inspection.totals import overview, tenant_rows
from quire.engine.ledger import Snapshot
from quire.errors import ConfigError
from quire.scheduler.events import KEPT_EVENTS, KINDS
from quire.serve.errors import FieldError, bounded
from quire.serve.kv_plan import MOST_BUDGET_BYTES, plan_for
from quire.serve.kv_scope import event_of, only_tenant, refuse_unknown_parameters
from quire.serve.kv_stream import EventStreams
from quire.serve.response_docs import STREAM
from quire.serve.service import Service
from quire.serve.tenant_keys import tenant_of
from quire.version import __version__

DEFAULT_EVENTS = 256
_EVENT_PARAMETERS = ("kinds", "since", "limit")


class KVEndpoints:
    """Handlers of HTTP requests about the KV memory.

    Args:
        service: the service; it is started before the first request.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._streams = EventStreams(service)

    def router(self) -> APIRouter:
        """Create the router with all paths."""
        router = APIRouter(prefix="/v1/kv")
        router.add_api_route("/overview", self.overview, methods=["GET"])
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
        return router

    # ---- snapshots -----------------------------------------------------------------------------

    async def overview(self, request: Request) -> JSONResponse:
        """Return memory, request counts, counters, and latencies of the last 60 seconds."""
        tenant = only_tenant(self._service, request)
        found = await self._timed(lambda engine: overview(engine, tenant))
        return JSONResponse({"object": "kv.overview", **found, **self._server(tenant)})

    async def ledger(self, request: Request) -> JSONResponse:
        """Return the ledger between two steps; a tenant with a key gets its own part."""
        tenant = only_tenant(self._service, request)
        found = await self._service.ledger()
        return JSONResponse(found if tenant is None else ledger_of(found, tenant))

    async def pages(
        self,
        request: Request,
        cells: Annotated[int, Query(ge=1, le=MOST_CELLS)] = MOST_CELLS,
        map: bool = True,  # noqa: FBT001, FBT002 - a query parameter
    ) -> JSONResponse:
        """Return the owner and state of every page; a tenant with a key gets its own pages."""
        refuse_unknown_parameters(request, ("cells", "map"))
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
        budget_bytes: Annotated[int | None, Query(ge=1, le=MOST_BUDGET_BYTES)] = None,
        length: Annotated[int | None, Query(ge=1, le=1 << 31)] = None,
        retained: Annotated[int | None, Query(ge=1, le=1 << 31)] = None,
    ) -> JSONResponse:
        """Return how many sequences of a length a KV memory of another size would hold."""
        refuse_unknown_parameters(request, ("budget_bytes", "length", "retained"))
        try:
            return JSONResponse(plan_for(self._service.llm, budget_bytes, length, retained))
        except ConfigError as error:
            raise FieldError("budget_bytes", str(error)) from None

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
            "store": engine.pool.store,
            "evict": engine.pool.rules.default.text,
            "max_model_len": service.max_tokens,
            "max_num_seqs": engine.schedule_config.max_num_seqs,
            "tenant": tenant,
            "shows_texts": service.shows_texts,
        }
        return body if tenant is not None else body | {"inspection": asdict(service.inspection)}

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
        refuse_unknown_parameters(request, _EVENT_PARAMETERS)
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
        refuse_unknown_parameters(request, ("kinds", "since"))
        return await self._stream(request, kinds)

    async def _stream(self, request: Request, kinds: str | None) -> Response:
        return await self._streams.open(
            _wanted(kinds),
            since=_last_event(request),
            tenant=only_tenant(self._service, request),
            name=tenant_of(request),
        )


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

    Args:
        snapshot: ledger of the engine.
        tenant: name of the tenant.
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
