"""Traces: spans, attributes, events, parents, and a collector that is reached over HTTP."""

import importlib.util
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from quire.errors import ConfigError
from quire.serve import service, tracing
from quire.serve.config import ServerConfig

BODY = {"prompt": "Once upon a time", "max_tokens": 5, "ignore_eos": True}
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}


@pytest.fixture
def spans(monkeypatch):
    """The spans of all requests, in memory."""
    exporter = InMemorySpanExporter()

    def opened(endpoint, model_name):
        return tracing.RequestTraces(SimpleSpanProcessor(exporter), model_name)

    monkeypatch.setattr(service, "open_traces", opened)
    return exporter.get_finished_spans


def complete(serve, body=BODY, headers=None, **options):
    response = serve(
        lambda client: client.post("/v1/completions", json=body, headers=headers), **options
    )
    assert response.status_code == 200, response.text
    return response.json()


def test_span_of_a_request(serve, spans):
    body = complete(serve)

    [span] = spans()
    found = span.attributes
    assert span.name == "llm_request"
    assert found["gen_ai.request.id"] == f"{body['id']}-0"
    assert found["gen_ai.response.model"] == "quire-tiny"
    assert found["gen_ai.usage.completion_tokens"] == 5
    assert found["gen_ai.usage.prompt_tokens"] == body["usage"]["prompt_tokens"]
    assert found["gen_ai.response.finish_reasons"] == "length"
    assert 0 <= found["gen_ai.latency.time_in_queue"] <= found["gen_ai.latency.e2e"]
    assert found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]
    assert span.end_time - span.start_time == pytest.approx(
        found["gen_ai.latency.e2e"] * 1e9, rel=0.01, abs=1e5
    )
    kinds = [event.name for event in span.events]
    assert kinds[0] == "admitted"
    assert kinds[-1] == "freed"
    assert all(span.start_time <= event.timestamp <= span.end_time + 1e8 for event in span.events)


def test_span_contains_no_text(serve, spans):
    complete(serve, BODY | {"prompt": "Rumpelstiltskin"})

    [span] = spans()
    assert "Rumpelstiltskin" not in span.to_json()


def test_span_of_the_client_is_the_parent(serve, spans):
    async def main(client):
        for headers in (PARENT, {}):
            await client.post("/v1/completions", json=BODY, headers=headers)

    serve(main)

    first, second = spans()
    assert f"{first.context.trace_id:032x}" == TRACE
    assert f"{first.parent.span_id:016x}" == "00f067aa0ba902b7"
    assert second.parent is None


def test_each_output_has_a_span(serve, spans):
    complete(serve, BODY | {"n": 3, "temperature": 1.0}, headers=PARENT)

    assert len(spans()) == 3
    assert {f"{span.context.trace_id:032x}" for span in spans()} == {TRACE}


def test_refused_request_leaves_nothing(serve, spans):
    kept = []

    async def main(client):
        app = client._transport.app
        wrong = BODY | {"max_tokens": 10**6, "limit_max_tokens": False}
        response = await client.post("/v1/completions", json=wrong, headers=PARENT)
        kept.append(app.state.service.traces.num_parents)
        return response

    assert serve(main).status_code == 400
    assert kept == [0]
    assert spans() == ()


def test_spans_reach_a_collector_over_http(serve):
    received = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append((self.path, body, self.headers.get("content-encoding")))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        complete(serve, otlp_traces_endpoint=f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()

    [(path, body, encoding)] = received
    assert (path, encoding) == ("/v1/traces", None)
    [resource] = ExportTraceServiceRequest.FromString(body).resource_spans
    [span] = resource.scope_spans[0].spans
    assert span.name == "llm_request"
    assert any(a.value.string_value == "quire" for a in resource.resource.attributes)


def test_dead_collector_costs_no_request(serve, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")  # the exporter's attempts at the end
    complete(serve, otlp_traces_endpoint="http://127.0.0.1:9")


def test_wrong_endpoint_is_refused():
    with pytest.raises(ConfigError, match="expected --otlp-traces-endpoint as a URL"):
        ServerConfig(otlp_traces_endpoint="localhost:4318")


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(ConfigError, match=r"pip install 'quire-llm\[tracing\]'"):
        tracing.open_traces("http://localhost:4318", "m")
