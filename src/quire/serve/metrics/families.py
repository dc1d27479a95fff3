"""Converts a reading to the metric families of prometheus-client."""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from quire.serve.config import MetricNames
from quire.serve.metrics.definitions import METRICS, PREFIX, VLLM_PREFIX, Metric
from quire.serve.metrics.reading import Reading

VLLM_ENGINE = "0"
"""Label `engine` of vLLM, which numbers the engines of one server."""


class Readings(Collector):
    """The families of one reading.

    Args:
        reading: the values.
        model_name: the served model's name, a label of every metric.
        names: prefix and names of the metrics.
        constants: labels of the info metrics, by name.
    """

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
        """Return all families that have values."""
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
