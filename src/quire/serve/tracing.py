"""Traces of requests for OpenTelemetry: one span per sequence, sent over OTLP with HTTP.

Spans have the attributes of vLLM's traces (`gen_ai...`), and events of the request's KV: admitted,
preempted, swapped, offloaded, evicted. They contain no texts.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from quire.engine.inspection.request_log import FinishedRequest
from quire.layout.extras import require_extra
from quire.version import __version__

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor


class RequestTraces:
    """Creates the spans of finished requests.

    `begin` and `forget` run in the event loop, `finish` in the engine's thread.
    """

    def __init__(self, processor: "SpanProcessor", model_name: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": "quire", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("quire", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name
        self._parents: dict[str, Context] = {}

    @property
    def num_parents(self) -> int:
        return len(self._parents)

    def begin(self, request_ids: Iterable[str], headers: Mapping[str, str]) -> None:
        """Make the span of a client (header `traceparent`) the parent of the requests' spans."""
        if "traceparent" not in headers:
            return
        parent = self._propagator.extract(dict(headers))
        self._parents.update(dict.fromkeys(request_ids, parent))

    def forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._parents.pop(request_id, None)

    def finish(self, sequences: Sequence[FinishedRequest], now_s: float) -> None:
        offset_ns = time.time_ns() - int(now_s * 1e9)
        for sequence in sequences:
            self._finish(sequence, lambda seconds: offset_ns + int(seconds * 1e9))
        self.forget({sequence.group for sequence in sequences})

    def close(self) -> None:
        self._provider.shutdown()

    def _finish(self, sequence: FinishedRequest, unix_ns: Callable[[float], int]) -> None:
        from opentelemetry.trace import SpanKind

        span = self._tracer.start_span(
            "llm_request",
            context=self._parents.get(sequence.group),
            kind=SpanKind.SERVER,
            attributes=_attributes(sequence, self._model_name),
            start_time=unix_ns(sequence.arrival_s),
        )
        for event in sequence.timeline.events:
            if event.kind != "chunk":  # the span's times cover it
                span.add_event(event.kind, dict(event.data), unix_ns(event.time_s))
        span.end(unix_ns(sequence.finish_s))


def _attributes(sequence: FinishedRequest, model_name: str) -> dict[str, str | int | float]:
    admitted = [e.time_s for e in sequence.timeline.events if e.kind == "admitted"][:1]
    found: dict[str, str | int | float] = {
        "gen_ai.response.model": model_name,
        "gen_ai.request.id": sequence.request_id,
        "gen_ai.request.max_tokens": sequence.max_tokens,
        "gen_ai.response.finish_reasons": sequence.finish_reason,
        "gen_ai.usage.prompt_tokens": sequence.prompt_tokens,
        "gen_ai.usage.completion_tokens": sequence.output_tokens,
        "gen_ai.latency.e2e": sequence.finish_s - sequence.arrival_s,
        "quire.tenant": sequence.tenant,
        "quire.evict": sequence.evict,
        "quire.sparse": sequence.sparse,
        "quire.cached_tokens": sequence.cached_tokens,
        "quire.evicted_tokens": sequence.evicted_tokens,
        "quire.preemptions": sequence.num_preemptions,
        "quire.kv_peak_bytes": sequence.kv_peak_bytes,
    }
    for admitted_s in admitted:
        found["gen_ai.latency.time_in_queue"] = admitted_s - sequence.arrival_s
        found["gen_ai.latency.time_in_model_inference"] = sequence.finish_s - admitted_s
    if sequence.first_token_s:
        found["gen_ai.latency.time_to_first_token"] = sequence.first_token_s - sequence.arrival_s
        decode_s = sequence.finish_s - sequence.first_token_s
        found["gen_ai.latency.time_in_model_decode"] = decode_s
    return found


def open_traces(endpoint: str | None, model_name: str) -> RequestTraces | None:
    """Create the traces of `--otlp-traces-endpoint`; None without an endpoint."""
    if endpoint is None:
        return None
    require_extra("tracing", "--otlp-traces-endpoint")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    url = urlsplit(endpoint)
    target = url if url.path.strip("/") else url._replace(path="/v1/traces")
    return RequestTraces(BatchSpanProcessor(OTLPSpanExporter(target.geturl())), model_name)
