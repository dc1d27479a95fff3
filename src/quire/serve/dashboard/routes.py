"""Routes of the dashboard's files. The files contain no data: the page reads /v1/kv with the key.

The page runs no inline script and loads nothing from other hosts, which its headers enforce.
"""

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.staticfiles import StaticFiles

PAGE_PATH = "/dashboard"
ASSETS_PATH = f"{PAGE_PATH}/assets"
PAGE = "index.html"
_PACKAGE, _FOLDER = "quire.serve.dashboard", "assets"

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
"""Headers of every response of the dashboard."""


class _Assets(StaticFiles):
    def file_response(self, *arguments: Any, **options: Any) -> Response:
        """A file, or status 304, with the headers of the dashboard."""
        response = super().file_response(*arguments, **options)
        response.headers.update(HEADERS)
        return response


def dashboard_paths() -> frozenset[str]:
    """Paths of the dashboard's files; they need no API key."""
    names = (f"{ASSETS_PATH}/{file.name}" for file in (files(_PACKAGE) / _FOLDER).iterdir())
    return frozenset({PAGE_PATH, f"{PAGE_PATH}/", *names})


class Dashboard:
    """Handlers of HTTP requests for the dashboard's files."""

    def __init__(self) -> None:
        self._assets = _Assets(packages=[(_PACKAGE, _FOLDER)])

    def router(self) -> APIRouter:
        router = APIRouter(include_in_schema=False)
        router.add_api_route(PAGE_PATH, self.page, methods=["GET", "HEAD"])
        router.add_api_route(f"{PAGE_PATH}/", self.moved, methods=["GET", "HEAD"])
        router.add_api_route(f"{ASSETS_PATH}/{{name}}", self.asset, methods=["GET", "HEAD"])
        return router

    async def page(self, request: Request) -> Response:
        """Return the page."""
        return await self.asset(request, PAGE)

    async def moved(self) -> Response:
        """Redirect to the page: its links are relative to /dashboard."""
        return Response(status_code=308, headers={**HEADERS, "Location": "../dashboard"})

    async def asset(self, request: Request, name: str) -> Response:
        """Return a file of the page, or status 404."""
        return await self._assets.get_response(name, request.scope)
