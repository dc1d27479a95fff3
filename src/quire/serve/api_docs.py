"""GET /docs: the API in Swagger UI, whose files are served by this server, not by a CDN.

The page shows the schema of /openapi.json and sends requests with the key that a user enters. It
contains no data, so it needs no key.
"""

from functools import cache
from importlib.resources import files

from fastapi import APIRouter, Response, Security, params
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.security import HTTPBearer
from starlette.responses import HTMLResponse

PATH = "/docs"
SCHEMA_PATH = "/openapi.json"
_TYPES = {
    "swagger-ui-bundle.js": "text/javascript; charset=utf-8",
    "swagger-ui.css": "text/css; charset=utf-8",
    "favicon-32x32.png": "image/png",
}
DOCS_PATHS = frozenset({PATH, SCHEMA_PATH, *(f"{PATH}/{name}" for name in _TYPES)})
"""Paths of the page, its files and the schema; they need no API key."""


@cache
def _content(name: str) -> bytes:
    return (files("fastapi_swagger") / "resources" / name).read_bytes()


def key_dependencies() -> list[params.Depends]:
    """Dependencies of the routes of a server with API keys, for the field of the key in the page.

    They check nothing: `KeyGuard` refuses requests without a key before their body is read.
    """
    scheme = HTTPBearer(
        scheme_name="API key", description="an API key of a tenant", auto_error=False
    )
    return [Security(scheme)]


class ApiDocs:
    """Handlers of HTTP requests for Swagger UI."""

    def router(self) -> APIRouter:
        """Create the router with the paths of the page and its files."""
        router = APIRouter(include_in_schema=False)
        router.add_api_route(PATH, self.page, methods=["GET"])
        router.add_api_route(f"{PATH}/{{name}}", self.file, methods=["GET"])
        return router

    async def page(self) -> HTMLResponse:
        """Return the page; its addresses are relative, so that it works behind a prefix."""
        return get_swagger_ui_html(
            openapi_url=SCHEMA_PATH.removeprefix("/"),
            title="Quire: HTTP API",
            swagger_js_url="docs/swagger-ui-bundle.js",
            swagger_css_url="docs/swagger-ui.css",
            swagger_favicon_url="docs/favicon-32x32.png",
            swagger_ui_parameters={"persistAuthorization": True},
        )

    async def file(self, name: str) -> Response:
        """Return a file of the page, or status 404."""
        if name not in _TYPES:
            return Response(status_code=404)
        return Response(_content(name), media_type=_TYPES[name])
