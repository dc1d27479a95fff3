"""The paths that show the KV memory: who holds it now, and what has happened to it."""

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
    """Answers HTTP requests about the KV memory.

    Args:
        service: started before the first request.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    def router(self) -> APIRouter:
        """All paths."""
        router = APIRouter(prefix="/v1/kv")
        router.add_api_route("/ledger", self.ledger, methods=["GET"])
        router.add_api_route("/events", self.events, methods=["GET"])
        return router

    async def ledger(self, request: Request) -> JSONResponse:
        """Who holds every byte, read between two steps; a tenant with a key sees its own part."""
        tenant = self._only(request)
        found = await self._service.ledger()
        return JSONResponse(found if tenant is None else ledger_of(found, tenant))

    def _only(self, request: Request) -> str | None:
        """Whose rows the caller may see; None for all, where no tenant has a key."""
        return tenant_of(request) if self._service.keys.tells_tenants_apart else None

    async def events(
        self,
        request: Request,
        kinds: str | None = None,
        since: Annotated[int, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=1, le=KEPT_EVENTS)] = DEFAULT_EVENTS,
    ) -> JSONResponse:
        """The newest events, oldest first; `since` the number of the last one already known."""
        tenant = self._only(request)
        _refuse_near_misses(request, ("kinds", "since", "limit"))
        events = await self._service.events(_wanted(kinds), since=since, most=KEPT_EVENTS)
        own = [event.as_dict() for event in events if tenant in (None, event.tenant)]
        return JSONResponse({"object": "list", "data": own[-limit:]})


def _refuse_near_misses(request: Request, known: tuple[str, ...]) -> None:
    """Refuse query parameters that nearly spell a known one."""
    for name in request.query_params:
        near = None if name in known else nearest(name, known)
        if near is not None:
            shown = shown_name(name)
            raise FieldError(shown, f"unknown parameter `{shown}`: did you mean `{near}`?")


def _wanted(kinds: str | None) -> tuple[str, ...]:
    """Kinds between commas; all where nothing is said."""
    if kinds is None:
        return KINDS
    wanted = tuple(kind.strip() for kind in kinds.split(","))
    for kind in wanted:
        if kind not in KINDS:
            raise FieldError(
                "kinds",
                f"there are no events of kind {bounded(kind, 40)!r}; choose from "
                f"{', '.join(KINDS)}, with commas between several",
            )
    return wanted


# ---- tenant ledger -------------------------------------------------------------------------------

# The ledger as one tenant may see it: its own requests, and sums over these alone.

_AXES = ("codec", "exactness", "sharing", "references")


def ledger_of(snapshot: Snapshot, tenant: str) -> Snapshot:
    """The part of a ledger that is a tenant's own.

    Totals of the arena, of the swap space and of the prefix cache are left out, and the axes are
    summed anew: each of them would tell what the other tenants hold.

    Args:
        snapshot: of the engine.
        tenant: whose.
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
        "residency": {"device": kv_bytes, "host": host_bytes},
        "owner": {"requests": kv_bytes},
        **{axis: _sum((str(e[axis]), e["bytes"]) for e in extents) for axis in _AXES},
    }


def _sum(parts: Iterable[tuple[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for name, num_bytes in parts:
        total[name] += num_bytes
    return dict(total)
