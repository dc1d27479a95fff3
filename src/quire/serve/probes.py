"""Endpoints about the server: model, health, readiness, load and version.

GET /docs: the API in Swagger UI, whose files are served by this server, not by a CDN.

The page shows the schema of /openapi.json and sends requests with the key that a user enters. It
contains no data, so it needs no key.
"""

import time
from importlib.resources import files

from fastapi import APIRouter, Request, Response, Security, params
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import FileResponse, JSONResponse
from fastapi.security import HTTPBearer
from starlette.responses import HTMLResponse

from quire.serve.dashboard.routes import PAGE_PATH
from quire.serve.kv_endpoints import only_tenant
from quire.serve.responses import PROBE
from quire.serve.service import Service
from quire.version import __version__

PATH = "/docs"
SCHEMA_PATH = "/openapi.json"
_FILES = ("swagger-ui-bundle.js", "swagger-ui.css", "favicon-32x32.png")
DOCS_PATHS = frozenset({PATH, SCHEMA_PATH, *(f"{PATH}/{name}" for name in _FILES)})
"""Paths of the page, its files and the schema; they need no API key."""


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
        if name not in _FILES:
            return Response(status_code=404)
        return FileResponse(str(files("fastapi_swagger") / "resources" / name))


class Probes:
    """Handlers of HTTP requests about the server, of clients and of load balancers."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._created = int(time.time())

    def router(self) -> APIRouter:
        router = APIRouter()
        router.add_api_route("/", self.root, methods=["GET"])
        router.add_api_route("/v1/models", self.models, methods=["GET"])
        router.add_api_route("/v1/models/{name:path}", self.model, methods=["GET"])
        for path, handler in (
            ("/health", self.health),
            ("/ping", self.ping),
            ("/ready", self.ready),
        ):
            router.add_api_route(
                path, handler, methods=["GET"], response_class=Response, responses=PROBE
            )
        router.add_api_route(
            "/ping",
            self.ping,
            methods=["POST"],
            response_class=Response,
            responses=PROBE,
            operation_id="ping_post",
        )
        router.add_api_route("/load", self.load, methods=["GET"])
        router.add_api_route("/version", self.version, methods=["GET"])
        return router

    async def root(self) -> Response:
        """Return the paths of the API, its description and the dashboard; it needs no key."""
        paths = {"api": "/v1", "documentation": PATH, "health": "/health", "metrics": "/metrics"}
        if self._service.shows_texts:
            paths["dashboard"] = PAGE_PATH
        return JSONResponse({"name": "Quire", "version": __version__, "paths": paths})

    async def health(self) -> Response:
        """Return 200 while the engine runs, else 503."""
        return Response(status_code=200 if self._service.is_alive else 503)

    async def ping(self) -> Response:
        """Return the same as /health, for Amazon SageMaker."""
        return await self.health()

    async def ready(self) -> Response:
        """Return 200 while new requests are accepted; 503 during shutdown or without engine."""
        return Response(status_code=200 if self._service.is_ready else 503)

    async def load(self, request: Request) -> Response:
        """Return the number of requests that run or wait; a tenant with a key gets its own."""
        tenant = only_tenant(self._service, request)
        return JSONResponse({"server_load": self._service.num_open(tenant)})

    async def version(self) -> Response:
        """Return the version of Quire."""
        return JSONResponse({"version": __version__})

    async def models(self) -> Response:
        """List the served model."""
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, name: str) -> Response:
        """Return the served model by name."""
        self._service.check_model(name)
        return JSONResponse(self._card())

    def _card(self) -> dict[str, object]:
        return {
            "id": self._service.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "quire",
            "root": self._service.llm.model.name,
            "parent": None,
            "max_model_len": self._service.max_tokens,
            "permission": [],
        }
