"""The server: an ASGI application over an engine, and how it is run."""

import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import uvicorn
from fastapi import FastAPI

from quire.engine.llm import LLM
from quire.errors import ConfigError
from quire.serve.endpoints import Endpoints
from quire.serve.errors import install_error_handlers
from quire.serve.kv_endpoints import KVEndpoints
from quire.serve.service import Service
from quire.serve.tenant_keys import TenantKeys
from quire.version import __version__

DRAIN_S = 60
"""How long open requests may go on after SIGTERM or SIGINT; a second SIGINT ends them at once."""


def create_app(
    llm: LLM, *, served_model_name: str | None = None, tenant_keys: TenantKeys | None = None
) -> FastAPI:
    """The application. Its lifespan starts the engine's thread and ends it.

    Args:
        llm: idle, and left to the application while that runs.
        served_model_name: what clients call the model; None takes its own name.
        tenant_keys: whose requests are whose; None takes all for the default tenant's.
    """
    service = Service(llm, served_model_name, tenant_keys)

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
    app.include_router(Endpoints(service).router())
    app.include_router(KVEndpoints(service).router())
    install_error_handlers(app)
    return app


def run_server(
    llm: LLM,
    *,
    host: str,
    port: int,
    served_model_name: str | None,
    tenant_keys: TenantKeys | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then finish open requests.

    After SIGINT this returns; after SIGTERM the process ends by that signal, as others expect.

    Args:
        llm: idle.
        host: address to listen on.
        port: port to listen on; 0 takes a free one.
        served_model_name: what clients call the model; None takes its own name.
        tenant_keys: whose requests are whose; None takes all for the default tenant's.

    Raises:
        ConfigError: nobody can listen there.
    """
    app = create_app(llm, served_model_name=served_model_name, tenant_keys=tenant_keys)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=DRAIN_S)
    with _listen(host, port) as listener:
        sys.stdout.write(f"Serving {served_model_name or llm.model.name} at {_url(listener)}\n")
        sys.stdout.flush()
        with suppress(KeyboardInterrupt):  # what SIGINT becomes when all is done
            uvicorn.Server(config).run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    """Listen before anything is said, so that whoever reads the URL can connect."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another --host or "
            "--port (0 takes a free port)"
        ) from error


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"
