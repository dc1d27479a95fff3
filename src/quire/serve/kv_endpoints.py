"""The endpoints of the KV memory: the ledger and KV events."""

from collections import Counter
from collections.abc import Iterable
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse

from quire.engine.ledger import Snapshot
from quire.scheduler.events import KEPT_EVENTS, KINDS
from quire.serve.errors import FieldError, bounded
from quire.serve.fields import nearest, shown_name
from quire.serve.service import Service
from quire.serve.tenant_keys import tenant_of

DEFAULT_EVENTS = 256


class KVEndpoints:
    """Handlers of HTTP requests about the KV memory.

    Args:
        service: the service; it is started before the first request.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    def router(self) -> APIRouter:
        """Create the router with all paths."""
        router = APIRouter(prefix="/v1/kv")
        router.add_api_route("/ledger", self.ledger, methods=["GET"])
        router.add_api_route("/events", self.events, methods=["GET"])
        return router

    async def ledger(self, request: Request) -> JSONResponse:
        """Return the ledger between two steps; a tenant with a key gets its own part."""
        tenant = self._only(request)
        found = await self._service.ledger()
        return JSONResponse(found if tenant is None else ledger_of(found, tenant))

    def _only(self, request: Request) -> str | None:
        """The tenant whose rows the client may see; None: all, if no tenant has a key."""
        return tenant_of(request) if self._service.keys.tells_tenants_apart else None

    async def events(
        self,
        request: Request,
        kinds: str | None = None,
        since: Annotated[int, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=1, le=KEPT_EVENTS)] = DEFAULT_EVENTS,
    ) -> JSONResponse:
        """Return the newest events, oldest first, with numbers above `since`."""
        tenant = self._only(request)
        _refuse_near_misses(request, ("kinds", "since", "limit"))
        events = await self._service.events(_wanted(kinds), since=since, most=KEPT_EVENTS)
        own = [event.as_dict() for event in events if tenant in (None, event.tenant)]
        return JSONResponse({"object": "list", "data": own[-limit:]})


def _refuse_near_misses(request: Request, known: tuple[str, ...]) -> None:
    """Refuse query parameters that are similar to a known parameter."""
    for name in request.query_params:
        near = None if name in known else nearest(name, known)
        if near is not None:
            shown = shown_name(name)
            raise FieldError(shown, f"unknown parameter `{shown}`: did you mean `{near}`?")


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
