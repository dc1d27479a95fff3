"""The server: its application, what it prints at the start, and its end."""

import asyncio
import atexit
import gc
import logging
import math
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from types import FrameType

import uvicorn
from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from quire.api.llm import LLM
from quire.config.sampling_params import SamplingParams
from quire.errors import ConfigError, EngineDead
from quire.layout.sizes import format_size
from quire.layout.values import raise_file_limit
from quire.scheduler.peaks import Need
from quire.serve.access import HEADER, AccessLog, LocalHosts
from quire.serve.apis.endpoints import OtherApis
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
from quire.serve.errors import install_error_handlers, install_validation_handlers
from quire.serve.json_route import IGNORED_HEADER
from quire.serve.kv_endpoints import KVEndpoints
from quire.serve.logs import configure_logs
from quire.serve.metrics.endpoint import PATH as METRICS_PATH
from quire.serve.metrics.endpoint import MetricsEndpoint
from quire.serve.metrics.observer import HttpRequests
from quire.serve.probes import DOCS_PATHS, ApiDocs, Probes, key_dependencies
from quire.serve.responses import ERRORS
from quire.serve.service import Service
from quire.serve.tenant_keys import OPEN_PATHS, KeyGuard, TenantFile, TenantKeys
from quire.version import __version__

LENGTHS = (512, 2048, 8192)
"""Lengths in tokens, prompt and output together, for which the concurrent requests are shown."""

_MOST = 1 << 20


def banner(service: Service) -> str:
    """Lines for standard output when the server starts."""
    llm = service.llm
    pool, model = llm.engine.pool, llm.model
    decoder, memory = model.decoder, pool.kv.memory
    implementation = model.implementation
    layers = "" if implementation is None else f", {implementation.name} layers"
    dtype = str(decoder.dtype).removeprefix("torch.")
    return "\n".join(
        (
            f"Model: {model.name}, {dtype} on {decoder.device}{layers}, "
            f"{format_size(model.weight_bytes)} of weights",
            f"KV memory: {memory.total_bytes:,} B ({format_size(memory.total_bytes)}), "
            f"{_pages(llm)}, {pool.codec}, attention {pool.kv.backend.name}",
            *_offload_memory(llm),
            f"Requests that the KV memory holds: {_concurrency(llm)}",
            *_longest(llm),
            f"Sampling of requests that set none: {_sampling(llm)}",
            *_open_to_all(service),
        )
    )


def _open_to_all(service: Service) -> Iterator[str]:
    config = service.config
    has_clients = service.keys.tells_tenants_apart or config.ssl_ca_certs is not None
    if not has_clients and not is_loopback(config.host):
        yield (
            f"Warning: no API key is set: every client that reaches {config.host} can use this "
            "server; set --api-key or --tenant-keys, or --host 127.0.0.1"
        )


def _sampling(llm: LLM) -> str:
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return SamplingParams().response_text(llm.model.generation, names)


def _offload_memory(llm: LLM) -> Iterator[str]:
    offload, memory = llm.engine.pool.offload, llm.engine.pool.kv.memory
    if offload is not None:
        bounds = memory.arena.unpaged_bytes
        rest = f"; bounds of its pages take {format_size(bounds)} of --kv-memory" if bounds else ""
        yield f"Offload memory: {format_size(offload.offload_bytes)}{rest}"


def _longest(llm: LLM) -> Iterator[str]:
    """A line if the KV memory does not hold a request of the model's whole context."""
    peaks, eviction = llm.engine.scheduler.peaks, llm.engine.pool.eviction.spec
    context = llm.model.spec.max_positions
    longest = peaks.longest_request(context, eviction)
    usual = min(LENGTHS[0], context)

    def memory(tokens: int) -> str:
        need = Need(tokens, eviction=eviction, may_offload=True)
        return peaks.fitting_option(need)

    if longest < usual:
        yield (
            f"Warning: the KV memory is too small for one request of {usual:,} tokens; "
            f"--kv-memory {memory(usual)} holds one"
        )
    if longest < context:
        yield (
            f"Longest request: {longest:,} of the {context:,} tokens of the model's context; "
            f"--kv-memory {memory(context)} holds the whole context"
        )


def _pages(llm: LLM) -> str:
    """Number and sizes of pages; lanes with pages of several sizes share the memory."""
    memory = llm.engine.pool.kv.memory
    sizes = [page_class.page_bytes for page_class in memory.layout.page_classes]
    if len(sizes) == 1:
        return f"{memory.total_bytes // sizes[0]:,} pages of {sizes[0]:,} B"
    kinds: dict[str, set[int]] = {}
    for group in memory.layout.groups:
        kinds.setdefault(group.contents, set()).add(group.page_class.page_bytes)
    return ", ".join(
        f"{contents} in pages of {', '.join(f'{size:,}' for size in sorted(found))} B"
        for contents, found in kinds.items()
    )


def _concurrency(llm: LLM) -> str:
    """The concurrent requests at each length that the model's context allows."""
    context = llm.model.spec.max_positions
    lengths = [tokens for tokens in LENGTHS if tokens <= context] or [context]
    found = [f"{concurrent_requests(llm, tokens):,} of {tokens:,} tokens" for tokens in lengths]
    limit = llm.engine.schedule_config.max_num_seqs
    return f"{', '.join(found)}; at most {limit:,} run at once (--max-num-seqs)"


def concurrent_requests(llm: LLM, tokens: int) -> int:
    """Requests of a length that the KV memory holds at once, with the engine's eviction rule."""
    peaks, pool = llm.engine.scheduler.peaks, llm.engine.pool
    need = Need(tokens, eviction=pool.eviction.spec)
    counts = peaks.counts([need])[0]
    if not peaks.fit_alone(counts):
        return 0
    low, high = 1, _MOST
    while low < high:  # the largest number that fits
        middle = (low + high + 1) // 2
        low, high = (middle, high) if peaks.fit_alone(counts * middle) else (low, middle - 1)
    return low


logger = logging.getLogger(__name__)

_POLL_S = 0.1
_CLOSING_S = 1
"""Seconds for clients to receive the errors of requests that the shutdown ends."""
_RED_S = 2.0
"""Seconds between the end of the engine and the end of the process, in which `/health` returns 503
and open requests get their errors."""


class DrainingServer(uvicorn.Server):
    """Uvicorn's server, which accepts connections until all open requests have ended.

    Meanwhile `/health` returns 200 and `/ready` 503, so that a load balancer sends requests to
    other servers. At the limit, or on a second signal, open requests end with an error. A third
    signal ends the process at once.
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._num_signals = 0
        self._red_until_s: float | None = None

    @property
    def engine_died(self) -> bool:
        return self._red_until_s is not None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Refuse new requests; the second signal ends open ones, the third one the process."""
        self._service.drain()
        self._num_signals += 1
        if self._num_signals == 1:
            # not uvicorn's: it would end the process by the signal after the requests have ended
            self.should_exit = True
        elif self._num_signals > 2:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)

    async def on_tick(self, counter: int) -> bool:
        """Check the engine; called ten times a second."""
        should_exit = await super().on_tick(counter)
        return should_exit or self._has_been_red()

    def _has_been_red(self) -> bool:
        """Whether the engine stopped by an error some time ago."""
        if not self._service.has_died:
            return False
        now_s = asyncio.get_running_loop().time()
        if self._red_until_s is None:
            self._red_until_s = now_s + _RED_S
            logger.critical("the engine has stopped: the server shuts down with an error")
        return now_s >= self._red_until_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.drain()
        timeout_s = self.config.timeout_graceful_shutdown or 0
        if self._num_open:
            await self._finish_requests(timeout_s)
        else:
            logger.info("shutting down")
        self.config.timeout_graceful_shutdown = _CLOSING_S
        await super().shutdown(sockets)

    async def _finish_requests(self, timeout_s: float) -> None:
        logger.info(
            "shutting down: %d open requests may continue for %d s", self._num_open, timeout_s
        )
        await self._wait_for_requests(timeout_s, until_signal=True)
        number = self._num_open
        if number:
            await self._end_requests()
            logger.info("shutting down: %d open requests were ended", number)
        else:
            logger.info("shutting down: all open requests have finished")

    @property
    def _num_open(self) -> int:
        return len(self.server_state.tasks)

    async def _wait_for_requests(self, limit_s: float, *, until_signal: bool = False) -> None:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + limit_s
        while self._num_open and loop.time() < end_s:
            if until_signal and self._num_signals > 1:
                return
            await asyncio.sleep(_POLL_S)

    async def _end_requests(self) -> None:
        with suppress(EngineDead, TimeoutError):
            await asyncio.wait_for(self._service.end_requests(), _CLOSING_S)
        await self._wait_for_requests(_CLOSING_S)
        if self._num_open:
            for connection in list(self.server_state.connections):
                connection.transport.abort()
            await self._wait_for_requests(_CLOSING_S)


def create_app(
    llm: LLM,
    config: ServerConfig | None = None,
    *,
    tenant_keys: TenantKeys | None = None,
    tenants: TenantFile | None = None,
) -> FastAPI:
    """Create the application. Its lifespan starts and stops the engine's thread."""
    config = config or ServerConfig()
    service = Service(llm, config, tenant_keys, tenants)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        recording = asyncio.create_task(service.record_history())
        try:
            yield
        finally:
            recording.cancel()
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
        OtherApis(endpoints, llm.model.generation),
        EmbeddingEndpoint(service, endpoints),
        Probes(service),
        KVEndpoints(service),
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
    app.add_middleware(BodyLimit, max_bytes=config.max_body)
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
    """Serve until SIGTERM or SIGINT, then finish open requests."""
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
    """Options of uvicorn."""
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
