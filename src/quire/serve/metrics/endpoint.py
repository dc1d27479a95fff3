"""GET /metrics."""

import hmac
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from quire.config.generation_request import DEFAULT_TENANT
from quire.errors import EngineDead
from quire.serve.config import MetricNames
from quire.serve.errors import Forbidden, Unauthorized
from quire.serve.metrics.definitions import METRICS, PREFIX, VLLM_PREFIX, Metric
from quire.serve.metrics.observer import HttpRequests, Reading, read_engine
from quire.serve.service import Service
from quire.serve.tenant_keys import authorization_of, bearer_key
from quire.version import __version__

VLLM_ENGINE = "0"
"""Label `engine` of vLLM, which numbers the engines of one server."""


class Readings(Collector):
    """The families of one reading."""

    def __init__(
        self,
        reading: Reading,
        model_name: str,
        names: MetricNames,
        constants: Mapping[str, tuple[str, ...]],
    ) -> None:
        self._reading, self._model_name = reading, model_name
        self._names, self._constants = names, constants

    def collect(self) -> Iterable[Family]:
        if self._names != "vllm":
            yield from self._families(vllm=False)
        if self._names != "quire":
            yield from self._families(vllm=True)

    def _families(self, *, vllm: bool) -> Iterator[Family]:
        for metric in METRICS:
            if not vllm:
                name, own = PREFIX + metric.name, {"model_name": self._model_name}
            elif metric.vllm:
                name, own = (
                    VLLM_PREFIX + metric.vllm,
                    {"model_name": self._model_name, "engine": VLLM_ENGINE},
                )
            else:
                continue
            family = self._family(metric, name, own)
            if family is not None:
                yield family

    def _family(self, metric: Metric, name: str, own: Mapping[str, str]) -> Family | None:
        labels = [*own, *metric.labels]
        values = list(own.values())
        if metric.kind == "histogram":
            buckets = self._reading.histograms.get(metric.name)
            if buckets is None:
                return None
            histogram = HistogramMetricFamily(name, metric.help, labels=labels)
            histogram.add_metric(values, buckets=list(buckets[0]), sum_value=buckets[1])
            return histogram
        kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        found = kind(name, metric.help, labels=labels)
        for own_values, value in self._values(metric):
            found.add_metric([*values, *own_values], value)
        return found if found.samples else None

    def _values(self, metric: Metric) -> Iterator[tuple[tuple[str, ...], float]]:
        if metric.kind == "info":
            yield self._constants[metric.name], 1.0
        elif metric.labels:
            yield from self._reading.labelled.get(metric.name, {}).items()
        elif metric.name in self._reading.numbers:
            yield (), self._reading.numbers[metric.name]


def registry_of(readings: Readings) -> CollectorRegistry:
    """A registry with the families of a reading, and those of the process."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(readings)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


PATH = "/metrics"


class MetricsEndpoint:
    """Handler of GET /metrics."""

    def __init__(
        self, service: Service, http_requests: HttpRequests, key: str | None = None
    ) -> None:
        self._service, self._http_requests = service, http_requests
        self._key = key

    def router(self) -> APIRouter:
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
        """Refuse clients that may not see the numbers of all tenants."""
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
                pool.rules.default.text,
                str(kv.prefix_cache.enabled),
                str(pool.kv.memory.total_bytes),
                str(engine.schedule_config.max_num_seqs),
            ),
        }
