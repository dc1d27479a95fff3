"""The server: creates the ASGI application of an engine and runs it."""

import asyncio
import gc
import math
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from types import FrameType

import uvicorn
from fastapi import FastAPI

from quire.api.llm import LLM
from quire.serve.config import ServerConfig
from quire.serve.connection import BodyLimit, TimedConnection, listen
from quire.serve.endpoints import Endpoints
from quire.serve.errors import install_error_handlers
from quire.serve.kv_endpoints import KVEndpoints
from quire.serve.service import Service
from quire.serve.tenant_keys import KeyGuard, TenantKeys
from quire.version import __version__

DRAIN_S = 60
"""Seconds that open requests may continue after SIGTERM or SIGINT; a second SIGINT ends them."""


def create_app(
    llm: LLM, config: ServerConfig | None = None, *, tenant_keys: TenantKeys | None = None
) -> FastAPI:
    """Create the application. Its lifespan starts and stops the engine's thread.

    Args:
        llm: an idle LLM, used only by the application while it runs.
        config: options of the server; None: the defaults.
        tenant_keys: API keys of the tenants; None: all requests belong to the default tenant.
    """
    config = config or ServerConfig()
    service = Service(llm, config, tenant_keys)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            await service.stop()

    app = FastAPI(
        title="Quire", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.state.service = service
    app.include_router(Endpoints(service).router())
    app.include_router(KVEndpoints(service).router())
    install_error_handlers(app)
    app.add_middleware(BodyLimit, most_bytes=config.max_body)
    app.add_middleware(KeyGuard, keys=service.keys)  # the middleware added last runs first
    return app


def run_server(
    llm: LLM, bound: socket.socket, config: ServerConfig, *, tenant_keys: TenantKeys | None = None
) -> None:
    """Serve until SIGTERM or SIGINT, then finish open requests.

    After SIGINT the function returns. After SIGTERM the process ends by that signal, which process
    managers expect.

    Args:
        llm: an idle LLM.
        bound: a bound socket; see `quire.serve.connection.bind`.
        config: options of the server.
        tenant_keys: API keys of the tenants; None: all requests belong to the default tenant.

    Raises:
        ConfigError: another process has started to listen at the address.
    """
    app = create_app(llm, config, tenant_keys=tenant_keys)
    protocol = partial(TimedConnection, header_timeout_s=config.header_timeout)
    server = uvicorn.Config(
        app,
        http=protocol,  # type: ignore[arg-type]  # uvicorn calls it like a class
        ws="none",
        log_level="warning",
        timeout_graceful_shutdown=DRAIN_S,
    )
    # the model's objects are never freed: a collection after a large body must not traverse them
    gc.collect()
    gc.freeze()
    # listen before printing the URL, so that clients can connect
    url = listen(bound)
    sys.stdout.write(f"Serving {config.served_model_name or llm.model.name} at {url}\n")
    sys.stdout.flush()
    with suppress(KeyboardInterrupt):  # uvicorn raises SIGINT again after its shutdown
        DrainingServer(server, app.state.service).run(sockets=[bound])


# ---- draining ------------------------------------------------------------------------------------

# Shutdown in two steps: the server first refuses new requests, then closes the port.

_POLL_S = 0.1
_LEAST_CLOSING_S = 1


class DrainingServer(uvicorn.Server):
    """Uvicorn's server, which accepts connections until all open requests have ended.

    Meanwhile `/health` returns 200 and `/ready` 503, so that a load balancer sends requests to
    other servers. A second SIGINT ends the wait.

    Args:
        config: its `timeout_graceful_shutdown` is the limit in seconds for both steps together.
        service: the service to drain.
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Refuse new requests from the signal on."""
        self._service.drain()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for open requests, then close the port and all connections."""
        self._service.drain()
        await self._wait_for_requests()
        await super().shutdown(sockets)

    async def _wait_for_requests(self) -> None:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + (self.config.timeout_graceful_shutdown or 0)
        while self.server_state.tasks and not self.force_exit and loop.time() < end_s:
            await asyncio.sleep(_POLL_S)
        left_s = math.ceil(end_s - loop.time())
        self.config.timeout_graceful_shutdown = max(_LEAST_CLOSING_S, left_s)
