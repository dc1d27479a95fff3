"""The server: creates the ASGI application of an engine and runs it."""

import atexit
import gc
import math
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import uvicorn
from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from quire.api.llm import LLM
from quire.errors import ConfigError, EngineDead
from quire.layout.open_files import raise_file_limit
from quire.serve.access import HEADER, AccessLog
from quire.serve.api_docs import DOCS_PATHS, ApiDocs, key_dependencies
from quire.serve.apis.endpoints import OtherApis
from quire.serve.banner import banner
from quire.serve.config import ServerConfig, is_loopback
from quire.serve.connection import (
    MAX_HEADER_BYTES,
    BodyLimit,
    TimedConnection,
    listen,
)
from quire.serve.dashboard.routes import PAGE_PATH, Dashboard, dashboard_paths
from quire.serve.embeddings import EmbeddingEndpoint
from quire.serve.endpoints import Endpoints
from quire.serve.errors import install_error_handlers
from quire.serve.hosts import LocalHosts
from quire.serve.json_route import IGNORED_HEADER
from quire.serve.kv_endpoints import KVEndpoints
from quire.serve.kv_requests import KVRequestEndpoints
from quire.serve.logs import configure_logs
from quire.serve.metrics.endpoint import PATH as METRICS_PATH
from quire.serve.metrics.endpoint import MetricsEndpoint
from quire.serve.metrics.http_requests import HttpRequests
from quire.serve.probes import Probes
from quire.serve.response_docs import ERRORS
from quire.serve.service import Service
from quire.serve.shutdown import DrainingServer
from quire.serve.tenant_file import TenantFile
from quire.serve.tenant_keys import OPEN_PATHS, KeyGuard, TenantKeys
from quire.serve.validation_errors import install_validation_handlers
from quire.version import __version__


def create_app(
    llm: LLM,
    config: ServerConfig | None = None,
    *,
    tenant_keys: TenantKeys | None = None,
    tenants: TenantFile | None = None,
) -> FastAPI:
    """Create the application. Its lifespan starts and stops the engine's thread.

    Args:
        llm: an idle LLM, used only by the application while it runs.
        config: options of the server; None: the defaults.
        tenant_keys: API keys of the tenants; None: all requests belong to the default tenant.
        tenants: rate limits and eviction rules of tenants; its keys are in `tenant_keys`.
    """
    config = config or ServerConfig()
    service = Service(llm, config, tenant_keys, tenants)

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
    endpoints = Endpoints(service)
    http_requests = HttpRequests()
    has_keys = service.keys.tells_tenants_apart or config.key_of_metrics() is not None
    for handlers in (
        endpoints,
        OtherApis(endpoints),
        EmbeddingEndpoint(service, endpoints),
        Probes(service),
        KVEndpoints(service),
        KVRequestEndpoints(service),
        MetricsEndpoint(service, http_requests, config.key_of_metrics()),
    ):
        needs = key_dependencies() if has_keys else []
        app.include_router(handlers.router(), responses=ERRORS, dependencies=needs)
    app.include_router(ApiDocs().router())
    open_paths = OPEN_PATHS | DOCS_PATHS | {METRICS_PATH}  # /metrics checks its key itself
    if service.shows_texts:
        app.include_router(Dashboard().router())
        open_paths |= dashboard_paths()
    install_error_handlers(app)
    install_validation_handlers(app)
    app.add_middleware(BodyLimit, most_bytes=config.max_body)
    app.add_middleware(
        KeyGuard, keys=service.keys, open_paths=open_paths
    )  # the middleware added last runs first
    if config.allowed_origins:
        _add_cors(app, config)
    if is_loopback(config.host) and not service.keys.tells_tenants_apart:
        app.add_middleware(LocalHosts)
    app.add_middleware(AccessLog, counts=http_requests, writes=config.access_log)
    return app


def _add_cors(app: FastAPI, config: ServerConfig) -> None:
    app.add_middleware(
        CORSMiddleware,
        allow_origins=config.allowed_origins,
        allow_methods=config.allowed_methods,
        allow_headers=config.allowed_headers,
        allow_credentials=config.allow_credentials,
        expose_headers=(HEADER, IGNORED_HEADER),
    )


def run_server(
    llm: LLM,
    bound: socket.socket,
    config: ServerConfig,
    *,
    tenant_keys: TenantKeys | None = None,
    tenants: TenantFile | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then finish open requests.

    Args:
        llm: an idle LLM.
        bound: a bound socket; see `quire.serve.connection.bind`.
        config: options of the server.
        tenant_keys: API keys of the tenants; None: all requests belong to the default tenant.
        tenants: rate limits and eviction rules of tenants; its keys are in `tenant_keys`.

    Raises:
        ConfigError: another process has started to listen at the address.
        EngineDead: the engine has stopped by an error.
    """
    configure_logs(config.log_format, config.log_level)
    raise_file_limit()
    app = create_app(llm, config, tenant_keys=tenant_keys, tenants=tenants)
    server = uvicorn_config(app, config)
    # the model's objects are never freed: a collection after a large body must not traverse them
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # extension modules report objects left at the end
    # listen before printing the URL, so that clients can connect
    url = listen(bound, scheme="https" if config.ssl_certfile else "http")
    service: Service = app.state.service
    page = f"Dashboard: {url.removesuffix('/v1')}{PAGE_PATH}\n" if service.shows_texts else ""
    sys.stdout.write(f"{banner(service)}\n{page}Serving {service.model_name} at {url}\n")
    sys.stdout.flush()
    running = DrainingServer(server, service)
    running.run(sockets=[bound])
    if running.engine_died:
        raise EngineDead("the engine has stopped by an error; see the log, and start it again")


def uvicorn_config(app: FastAPI, config: ServerConfig) -> uvicorn.Config:
    """Options of uvicorn.

    Raises:
        ConfigError: a certificate or key cannot be read.
    """
    protocol = partial(TimedConnection, header_timeout_s=config.header_timeout)
    made = uvicorn.Config(
        app,
        http=protocol,  # type: ignore[arg-type]  # uvicorn calls it like a class
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_keep_alive=config.timeout_keep_alive,  # type: ignore[arg-type]  # seconds
        timeout_graceful_shutdown=math.ceil(config.shutdown_timeout),
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
        ssl_ca_certs=config.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_REQUIRED if config.ssl_ca_certs else ssl.CERT_NONE,
    )
    try:
        made.load()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot use --ssl-certfile {config.ssl_certfile}: {error}") from None
    return made
