import asyncio
import importlib.util
import json
import logging
import math
import re
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.engine.core import Engine
from quire.engine.decode_graphs import GraphStats
from quire.errors import ConfigError
from quire.scheduler.schedule_config import ScheduleConfig
from quire.serve import service, tracing
from quire.serve.config import ServerConfig
from quire.serve.logs import JsonFormatter, TextFormatter, configure_logs
from quire.serve.metrics.definitions import METRICS, TOKENS
from quire.serve.metrics.observer import (
    OTHER_TENANTS,
    Distribution,
    EngineObserver,
    HttpRequests,
    Reading,
    read_engine,
)
from quire.serve.tenant_keys import TenantKeys
from serve.conftest import COMPLETIONS, MESSAGES, RESPONSES, USER, ok
from support.engines import greedy, load
from support.kv_options import kv_config
from support.loggers import same_loggers

# ---- request ids, the access log and the formats of log lines ------------------------------------


@pytest.fixture
def lines(caplog):
    """Messages of the access log so far."""
    caplog.set_level(logging.INFO, logger="quire.access")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "quire.access"]


@pytest.mark.parametrize("given", ["job-7.a", "", "a b", "ü", "x" * 129, "a\tb"])
def test_response_repeats_a_usable_request_id_of_the_client(get, given):
    for path, status in (("/version", 200), ("/nothing", 404)):
        response = get(path, {"x-request-id": given.encode("latin-1")})
        found = response.headers["x-request-id"]
        assert response.status_code == status
        assert found == given if given == "job-7.a" else len(found) == 32


def test_access_log_names_the_request_and_no_contents(send, lines):
    headers = {"authorization": "Bearer sk-in-header", "x-request-id": "job-7"}
    body = {"prompt": "a secret prompt", "max_tokens": 2}
    path = "/v1/completions?key=sk-in-query"
    [response] = send(("POST", path, {"json": body, "headers": headers}))

    [line] = lines()
    assert line.startswith("POST /v1/completions 200 in ")
    assert "tenant default, request job-7" in line
    assert response.json()["id"] in line
    assert not any(text in line for text in ("sk-in", "a secret prompt"))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (MESSAGES, {"messages": [USER], "max_tokens": 2}),
        (RESPONSES, {"input": "A", "max_output_tokens": 16}),
    ],
)
def test_access_log_has_the_response_id_of_the_client(send, lines, path, body):
    response, requests = send(("POST", path, {"json": body}), ("GET", "/v1/kv/requests", {}))
    response_id = response.json()["id"]
    assert response_id.startswith(("msg_", "resp_"))
    assert lines()[0].endswith(f"response {response_id}")
    assert f'"{response_id}-0"' in requests.text


def test_probes_and_a_log_that_is_off_have_no_lines_and_other_paths_one(get, lines):
    get("/health")
    get("/version", access_log=False)
    assert lines() == []
    get("/a%0Ab%00" + "c" * 1000)
    [line] = lines()
    assert "\n" not in line
    assert "a?b?ccc" in line
    assert len(line) < 500


def record_of(message, args=(), level=logging.INFO, info=None):
    return logging.LogRecord("quire.serve", level, "", 0, message, args, info)


def test_json_lines_have_the_fields_and_text_lines_time_level_and_logger():
    record = record_of("%s took %d s", ("a\u2028", 3))
    record.fields = {"status": 200}
    [text] = JsonFormatter().format(record).splitlines()
    line = json.loads(text)

    assert line["message"] == "a\u2028 took 3 s"
    assert (line["level"], line["logger"], line["status"]) == ("info", "quire.serve", 200)
    assert line["time"].endswith("Z")
    error = ValueError("a fault")
    line = json.loads(JsonFormatter().format(record_of("failed", info=(ValueError, error, None))))
    assert "ValueError: a fault" in line["traceback"]

    text = TextFormatter().format(record_of("slow", level=logging.WARNING))
    time, level, logger, message = text.split()
    assert (level, logger, message) == ("WARNING", "quire.serve:", "slow")
    assert time.endswith("Z")


def test_second_configuration_replaces_the_first(capsys):
    with same_loggers():
        configure_logs("text", "info")
        configure_logs("json", "warning")
        logging.getLogger("quire.test").info("hidden")
        logging.getLogger("quire.test").warning("shown")
        [line] = capsys.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "shown"


# ---- traces: spans, attributes, events, parents --------------------------------------------------

TRACED = {"prompt": "Once upon a time", "max_tokens": 5, "ignore_eos": True}
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}


@pytest.fixture
def spans(monkeypatch):
    """The spans of all requests, in memory."""
    exporter = InMemorySpanExporter()
    processor = SimpleSpanProcessor(exporter)
    monkeypatch.setattr(service, "open_traces", lambda _, n: tracing.RequestTraces(processor, n))
    return exporter.get_finished_spans


@pytest.fixture
def traced(send):
    """The bodies of completions that must succeed, with these headers each."""

    def run(*headers, body=TRACED, **options):
        calls = [("POST", COMPLETIONS, {"json": body, "headers": each}) for each in headers]
        return [ok(response) for response in send(*calls, **options)]

    return run


def test_span_of_a_request(traced, spans):
    [body] = traced({})

    [span] = spans()
    found = span.attributes
    assert span.name == "llm_request"
    assert found["gen_ai.request.id"] == f"{body['id']}-0"
    assert found["gen_ai.response.model"] == "quire-tiny"
    assert found["gen_ai.usage.completion_tokens"] == 5
    assert found["gen_ai.usage.prompt_tokens"] == body["usage"]["prompt_tokens"]
    assert found["gen_ai.response.finish_reasons"] == "length"
    times = {name: found[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "e2e")}
    assert 0 <= times["time_in_queue"] <= times["e2e"]
    assert found["gen_ai.latency.time_to_first_token"] <= times["e2e"]
    assert span.end_time - span.start_time == pytest.approx(times["e2e"] * 1e9, rel=0.01, abs=1e5)
    kinds = [event.name for event in span.events]
    assert (kinds[0], kinds[-1]) == ("admitted", "freed")
    assert all(span.start_time <= event.timestamp <= span.end_time + 1e8 for event in span.events)
    assert "Once upon" not in span.to_json()


def test_span_of_the_client_is_the_parent(traced, spans):
    traced(PARENT, {})
    first, second = spans()
    assert f"{first.context.trace_id:032x}" == TRACE
    assert f"{first.parent.span_id:016x}" == "00f067aa0ba902b7"
    assert second.parent is None


def test_each_output_has_a_span(traced, spans):
    traced(PARENT, body=TRACED | {"n": 3, "temperature": 1.0})
    assert [f"{span.context.trace_id:032x}" for span in spans()] == [TRACE] * 3


def test_refused_request_leaves_nothing(serve, spans):
    async def main(client):
        wrong = TRACED | {"max_tokens": 10**6, "limit_max_tokens": False}
        response = await client.post(COMPLETIONS, json=wrong, headers=PARENT)
        return response.status_code, client._transport.app.state.service.traces.num_parents

    assert serve(main) == (400, 0)
    assert spans() == ()


def test_spans_reach_a_collector_over_http_and_a_dead_one_costs_no_request(traced, monkeypatch):
    received = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append((self.path, body, self.headers.get("content-encoding")))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        traced({}, otlp_traces_endpoint=f"http://127.0.0.1:{server.server_port}")
        server.shutdown()

    [(path, body, encoding)] = received
    assert (path, encoding) == ("/v1/traces", None)
    [resource] = ExportTraceServiceRequest.FromString(body).resource_spans
    [span] = resource.scope_spans[0].spans
    assert span.name == "llm_request"
    assert any(a.value.string_value == "quire" for a in resource.resource.attributes)

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")  # the exporter's attempts at the end
    traced({}, otlp_traces_endpoint="http://127.0.0.1:9")


def test_wrong_endpoint_short_metrics_key_and_missing_packages_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match="--metrics-key: expected at least 8 printable"):
        ServerConfig(metrics_key="short")
    monkeypatch.setenv("QUIRE_METRICS_KEY", "short")
    with pytest.raises(ConfigError, match="QUIRE_METRICS_KEY: expected at least 8"):
        ServerConfig().key_of_metrics()
    with pytest.raises(ConfigError, match="expected --otlp-traces-endpoint as a URL"):
        ServerConfig(otlp_traces_endpoint="localhost:4318")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'quire-llm\[tracing\]'"):
        tracing.open_traces("http://localhost:4318", "m")


# ---- metrics: values, names of vLLM, keys, bounded label values ----------------------------------

KEYS = TenantKeys({"a": ("sk-a-2f0c77d1",), "default": ("sk-d-51d09a3e",)})
BODY = {"prompt": "Once upon a time", "max_tokens": 5, "ignore_eos": True}


def families(text):
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(found, family, sample=None, **labels):
    """The only sample of a family that has these labels."""
    samples = [
        one.value
        for one in found[family].samples
        if one.name == (sample or one.name) and labels.items() <= one.labels.items()
    ]
    assert len(samples) == 1, (family, labels, samples)
    return samples[0]


@pytest.fixture
def scraped(send):
    """The metrics after two completions."""
    calls = [("POST", COMPLETIONS, {"json": BODY})] * 2

    def run(**options):
        *done, metrics = send(*calls, ("GET", "/metrics", {}), **options)
        assert [ok(response)["usage"]["completion_tokens"] for response in done] == [5, 5]
        return families(metrics.text)

    return run


def test_steps_launched_ahead_and_graphs_are_counted(monkeypatch):
    schedule = ScheduleConfig(async_scheduling=True)
    engine = Engine(load("llama"), KVConfig(memory="1MiB"), schedule)
    for _ in range(2):
        engine.submit(GenerationRequest([5, 6, 7], greedy(6)))
        while engine.has_work:
            engine.step()
    steps = engine.stats().async_scheduling
    graphs = SimpleNamespace(stats=GraphStats(replayed=7, captures=2))
    monkeypatch.setattr(engine, "decode_graphs", graphs)

    found = read_engine(engine, EngineObserver(engine))

    numbers = found.numbers
    assert numbers["async_steps"] == steps.ahead > 0
    waits = {(reason,): count for reason, count in steps.waited.items()}
    assert found.labelled["async_waits"] == waits != {}
    assert numbers["async_discarded_rows"] == steps.discarded
    assert (numbers["graph_replays"], numbers["graph_captures"]) == (7, 2)


def test_damage_and_outages_of_tiers_are_counted(tmp_path):
    (tmp_path / "index.sqlite3").write_text("no database" * 1000)
    disk = {"disk_memory": "1MiB", "disk_path": str(tmp_path)}
    remote = {"remote": "file:///dev/null", "remote_memory": "1MiB"}
    engine = Engine(load("llama"), kv_config(memory="1MiB", **disk, **remote), ScheduleConfig())

    found = read_engine(engine, EngineObserver(engine)).labelled

    assert found["prefix_tier_damaged"] == {("disk",): 1, ("remote",): 0}
    assert found["prefix_tier_outages"] == {("disk",): 0, ("remote",): 1}
    engine.close()


TWICE = (
    *("time_to_first_token_seconds", "time_per_output_token_seconds", "request_latency_seconds"),
    *("request_queue_seconds", "request_prefill_seconds", "request_decode_seconds"),
    *("request_generation_tokens", "request_max_tokens"),
)


def test_counts_of_two_requests(scraped):
    found = scraped()

    assert value(found, "quire_engine_up") == 1
    assert value(found, "quire_requests_running") == 0
    assert value(found, "quire_prompt_tokens") > 0
    assert value(found, "quire_requests_finished", finished_reason="length") == 2
    for name, count in {**dict.fromkeys(TWICE, 2), "inter_token_latency_seconds": 8}.items():
        assert value(found, f"quire_{name}", f"quire_{name}_count") == count, name
    assert value(found, "quire_request_generation_tokens", le="5.0") == 2
    assert value(found, "quire_request_generation_tokens", le="2.0") == 0
    total = value(found, "quire_kv_memory_bytes")
    assert sum(sample.value for sample in found["quire_kv_bytes"].samples) == total
    path = {"method": "POST", "path": "/v1/completions", "status": "200"}
    assert value(found, "quire_http_requests", **path) == 2
    # every defined metric has values except those without events and tiers
    missing = {m.name for m in METRICS if f"quire_{m.name}" not in found}
    without_tiers = {"prefix_tier_damaged", "prefix_tier_outages"}
    assert missing == {"kv_transfer_bytes", "async_waits"} | without_tiers


@pytest.mark.parametrize(
    "options",
    [
        *({"max_tokens": 1}, {"n": 3, "temperature": 1.0}),
        *({"n": 2, "best_of": 3, "temperature": 1.0}, {"use_beam_search": True, "n": 2}),
        {"prompt": ["A", "Once upon"], "n": 2, "temperature": 1.0},
        {"n": 2, "temperature": 1.0, "stream": True, "stream_options": {"include_usage": True}},
    ],
)
def test_generated_tokens_of_a_tenant_are_those_of_the_usage(send, options):
    calls = [("POST", COMPLETIONS, {"json": BODY}), ("POST", COMPLETIONS, {"json": BODY | options})]
    metrics = ("GET", "/metrics", {})
    _, before, response, after = send(calls[0], metrics, calls[1], metrics)

    generated = int(re.findall(r'"completion_tokens": ?(\d+)', response.text)[-1])
    assert generated >= options.get("n", 1)
    for name, labels in (
        ("tenant_generation_tokens", {"tenant": "default"}),
        ("generation_tokens", {}),
    ):
        later, first = (value(families(m.text), f"quire_{name}", **labels) for m in (after, before))
        assert later - first == generated


def test_names_of_vllm(scraped):
    both, vllm = (scraped(metrics_names=names) for names in ("both", "vllm"))

    assert not any(name.startswith("quire_") for name in vllm)
    named = [{name for name in found if name.startswith("vllm:")} for found in (both, vllm)]
    assert named[0] == named[1]
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert vllm[f"vllm:{name}"].samples[0].labels == {"model_name": "quire-tiny", "engine": "0"}
    assert value(vllm, "vllm:request_success", finished_reason="length") == 2
    assert value(vllm, "vllm:iteration_tokens_total", "vllm:iteration_tokens_total_count") > 0


@pytest.mark.parametrize(
    ("keys", "path", "header", "status"),
    [
        (KEYS, "/metrics", None, 401),
        (KEYS, "/metrics", "Bearer sk-unknown-1", 401),
        (KEYS, "/metrics", "Bearer sk-a-2f0c77d1", 403),
        (KEYS, "/metrics", "Bearer sk-d-51d09a3e", 200),
        (KEYS, "/metrics", "Bearer metrics-only", 200),
        (KEYS, "/v1/models", "Bearer metrics-only", 401),
        (None, "/metrics", None, 401),
        (None, "/metrics", "Bearer metrics-other", 401),
        (None, "/metrics", "Basic metrics-only", 401),
        (None, "/metrics", "Bearer metrics-only", 200),
        (None, "/metrics", "metrics-only", 200),
    ],
)
def test_metrics_need_the_key_of_the_operator(get, keys, path, header, status):
    headers = {} if header is None else {"Authorization": header}
    if header == "metrics-only":
        headers = {"x-api-key": header}
    response = get(path, headers, tenant_keys=keys, metrics_key="metrics-only")
    assert response.status_code == status
    assert response.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)


def test_sequences_that_end_in_one_step_are_all_counted(serve):
    """Cancelled requests end in one step; the log stores fewer of them than there are."""
    body = BODY | {"prompt": [[5, number] for number in range(400)], "max_tokens": 200}

    async def main(client):
        call = asyncio.create_task(client.post("/v1/completions", json=body))
        while (await client.get("/load")).json()["server_load"] < 400:
            await asyncio.sleep(0.01)
        await client._transport.app.state.service.end_requests()
        assert (await call).status_code == 503
        while "quire_requests_finished_total{" not in (await client.get("/metrics")).text:
            await asyncio.sleep(0.01)  # the engine ends them all in one step
        while (await client.get("/v1/kv/overview")).json()["num_waiting"]:
            await asyncio.sleep(0.01)
        return (await client.get("/metrics")).text

    found = families(serve(main))

    assert value(found, "quire_requests_finished", finished_reason="abort") == 400
    count = "quire_request_latency_seconds_count"
    assert value(found, "quire_request_latency_seconds", count) == 400


def test_openmetrics_are_returned_and_paths_of_clients_make_no_series(get):
    response = get("/metrics", {"Accept": "application/openmetrics-text; version=1.0.0"})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")

    counts, reading = HttpRequests(), Reading()
    for number in range(50):
        counts.add({"method": f"M{number}", "path": f"/{number}"}, 404, 0.1)
    counts.add({"method": "GET", "route": SimpleNamespace(path="/v1/models/{name}")}, 200, 0.1)
    counts.read_into(reading)

    assert reading.labelled["http_requests"] == {
        ("other", "other", "404"): 50,
        ("GET", "/v1/models/{name}", "200"): 1,
    }


def test_tenants_beyond_a_limit_are_summed(scraped, monkeypatch):
    monkeypatch.setattr("quire.serve.metrics.observer.MAX_TENANTS", 0)
    assert value(scraped(), "quire_tenant_generation_tokens", tenant=OTHER_TENANTS) >= 8


def test_distribution_counts_a_bound_in_its_own_bucket():
    distribution = Distribution((1, 2.5))
    distribution.add_all([0.5, 1, 2, 2.5, 7])
    distribution.add(3, times=2)
    assert distribution.cumulative() == [("1.0", 2), ("2.5", 4), ("+Inf", 7)]
    assert math.isclose(distribution.total, 19)
    assert (*TOKENS[:5], TOKENS[-1]) == (1, 2, 5, 10, 20, 1_000_000)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_metrics(send):
    _, metrics = send(("POST", COMPLETIONS, {"json": BODY}), ("GET", "/metrics", {}))
    command = ["promtool", "check", "metrics"]
    done = subprocess.run(command, input=metrics.text, capture_output=True, text=True, check=False)
    own = [line for line in done.stderr.splitlines() if line.startswith("quire_")]
    assert own == [], done.stderr
