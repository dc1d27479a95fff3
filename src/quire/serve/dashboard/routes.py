"""Routes of the dashboard's files. The files contain no data: the page reads /v1/kv with the key.

The page runs no inline script and loads nothing from other hosts, which its headers enforce.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from fastapi import APIRouter, Request, Response

PAGE_PATH = "/dashboard"
ASSETS_PATH = f"{PAGE_PATH}/assets"
PAGE = "index.html"

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
"""Headers of every response of the dashboard."""


@dataclass(frozen=True, slots=True)
class Asset:
    """A file of the dashboard."""

    content: bytes
    media_type: str
    etag: str  # digest of the content


@cache
def load_assets() -> Mapping[str, Asset]:
    """Read the files of the dashboard from the package, by name."""
    folder = files("quire.serve.dashboard") / "assets"
    found = {}
    for file in folder.iterdir():
        suffix = "." + file.name.rpartition(".")[2]
        if suffix in _TYPES:
            content = file.read_bytes()
            etag = f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"'
            found[file.name] = Asset(content, _TYPES[suffix], etag)
    return found


def dashboard_paths() -> frozenset[str]:
    """Paths of the dashboard's files; they need no API key."""
    names = (f"{ASSETS_PATH}/{name}" for name in load_assets())
    return frozenset({PAGE_PATH, f"{PAGE_PATH}/", *names})


class Dashboard:
    """Handlers of HTTP requests for the dashboard's files."""

    def router(self) -> APIRouter:
        router = APIRouter(include_in_schema=False)
        router.add_api_route(PAGE_PATH, self.page, methods=["GET", "HEAD"])
        router.add_api_route(f"{PAGE_PATH}/", self.moved, methods=["GET", "HEAD"])
        router.add_api_route(f"{ASSETS_PATH}/{{name}}", self.asset, methods=["GET", "HEAD"])
        return router

    async def page(self, request: Request) -> Response:
        """Return the page."""
        return _response(request, load_assets()[PAGE])

    async def moved(self) -> Response:
        """Redirect to the page: its links are relative to /dashboard."""
        return Response(status_code=308, headers={**HEADERS, "Location": "../dashboard"})

    async def asset(self, request: Request, name: str) -> Response:
        """Return a file of the page, or status 404."""
        found = load_assets().get(name)
        if found is None:
            return Response(status_code=404, headers=HEADERS)
        return _response(request, found)


def _response(request: Request, asset: Asset) -> Response:
    headers = {**HEADERS, "ETag": asset.etag}
    if request.headers.get("if-none-match") == asset.etag:
        return Response(status_code=304, headers=headers)
    return Response(asset.content, media_type=asset.media_type, headers=headers)
