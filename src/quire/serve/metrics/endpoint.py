"""GET /metrics."""

import hmac
from contextlib import suppress
from functools import partial

from fastapi import APIRouter, Request, Response
from prometheus_client.exposition import choose_encoder

from quire.config.generation_request import DEFAULT_TENANT
from quire.errors import EngineDead
from quire.serve.errors import Forbidden, Unauthorized
from quire.serve.metrics.families import Readings, registry_of
from quire.serve.metrics.http_requests import HttpRequests
from quire.serve.metrics.reading import Reading, read_engine
from quire.serve.service import Service
from quire.serve.tenant_keys import authorization_of, bearer_key
from quire.version import __version__

PATH = "/metrics"


class MetricsEndpoint:
    """Handler of GET /metrics.

    Args:
        service: the service.
        http_requests: counts of HTTP requests.
        key: API key that gives access to the metrics only; None: there is none.
    """

    def __init__(
        self, service: Service, http_requests: HttpRequests, key: str | None = None
    ) -> None:
        self._service, self._http_requests = service, http_requests
        self._key = key

    def router(self) -> APIRouter:
        """Create the router with the path."""
        router = APIRouter()
        router.add_api_route(PATH, self.metrics, methods=["GET"], response_class=Response)
        return router

    async def metrics(self, request: Request) -> Response:
        """Return all metrics in Prometheus' text format, or in OpenMetrics if it is accepted."""
        self._check_key(request)
        readings = Readings(
            await self._read(),
            self._service.model_name,
            self._service.config.metrics_names,
            self._constants(),
        )
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry_of(readings)), media_type=content_type)

    def _check_key(self, request: Request) -> None:
        """Refuse clients that may not see the numbers of all tenants.

        Raises:
            Unauthorized: a missing or unknown key, if tenants have keys or the metrics have one.
            Forbidden: the key of a tenant other than the default one.
        """
        keys, header = self._service.keys, authorization_of(request.scope)
        if self._is_metrics_key(header) or not (keys.tells_tenants_apart or self._key):
            return
        if not header:
            raise Unauthorized("missing API key: send it as Authorization: Bearer KEY")
        if not keys.tells_tenants_apart:
            raise Unauthorized("unknown API key: use the key of --metrics-key")
        if keys.tenant_of(header) != DEFAULT_TENANT:
            raise Forbidden(
                "metrics contain the numbers of all tenants: use the key of --metrics-key, or of "
                f"tenant {DEFAULT_TENANT!r}; a tenant sees its own numbers at /v1/kv/overview"
            )

    def _is_metrics_key(self, header: str | None) -> bool:
        given = bearer_key(header or "")
        if self._key is None or given is None:
            return False
        return hmac.compare_digest(given.encode(), self._key.encode())

    async def _read(self) -> Reading:
        reading = Reading({"engine_up": 0})
        observer = self._service.observer
        if observer is not None:
            with suppress(EngineDead):  # the metrics of the process and of HTTP remain
                reading = await self._service.inspect(partial(read_engine, observer=observer))
        self._http_requests.read_into(reading)
        return reading

    def _constants(self) -> dict[str, tuple[str, ...]]:
        engine = self._service.llm.engine
        pool, kv = engine.pool, engine.kv_config
        return {
            "build_info": (__version__,),
            "cache_config_info": (
                str(kv.page_tokens),
                str(pool.codec),
                kv.codec,
                pool.store,
                pool.rules.default.text,
                str(kv.prefix_cache.enabled and pool.why_no_prefix is None),
                str(pool.kv.memory.total_bytes),
                str(engine.schedule_config.max_num_seqs),
            ),
        }
