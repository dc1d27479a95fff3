"""The paths that show the KV memory: who holds it now, and what has happened to it."""

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse

from quire.scheduler.events import KEPT_EVENTS, KINDS
from quire.serve.errors import FieldError, bounded
from quire.serve.fields import nearest, shown_name
from quire.serve.key_guard import tenant_of
from quire.serve.service import Service
from quire.serve.tenant_ledger import ledger_of

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
