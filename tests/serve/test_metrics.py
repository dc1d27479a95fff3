"""GET /metrics: values after requests, names of vLLM, keys, and bounded label values."""

import asyncio
import math
import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.engine.core import Engine
from quire.engine.decode_graphs import GraphStats
from quire.errors import ConfigError
from quire.scheduler.schedule_config import ScheduleConfig
from quire.serve.config import ServerConfig
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
from support.engines import greedy, load
from support.kv_options import kv_config

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


def scraped(serve, main=None, headers=None, **options):
    async def run(client):
        for _ in range(2):
            response = await client.post("/v1/completions", json=BODY, headers=headers)
            assert response.status_code == 200, response.text
        if main is not None:
            await main(client)
        return await client.get("/metrics", headers=headers)

    response = serve(run, **options)
    assert response.status_code == 200, response.text
    return families(response.text)


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

    assert found.numbers["async_steps"] == steps.ahead > 0
    assert found.labelled["async_waits"] == {
        (reason,): count for reason, count in steps.waited.items()
    }
    assert found.labelled["async_waits"]
    assert found.numbers["async_discarded_rows"] == steps.discarded
    assert (found.numbers["graph_replays"], found.numbers["graph_captures"]) == (7, 2)


def test_damage_and_outages_of_tiers_are_counted(tmp_path):
    (tmp_path / "index.sqlite3").write_text("no database" * 1000)
    config = kv_config(
        memory="1MiB",
        disk_memory="1MiB",
        disk_path=str(tmp_path),
        remote="file:///dev/null",
        remote_memory="1MiB",
    )
    engine = Engine(load("llama"), config, ScheduleConfig())

    found = read_engine(engine, EngineObserver(engine))

    assert found.labelled["prefix_tier_damaged"] == {("disk",): 1, ("remote",): 0}
    assert found.labelled["prefix_tier_outages"] == {("disk",): 0, ("remote",): 1}
    engine.close()


def test_counts_of_two_requests(serve):
    found = scraped(serve)

    assert value(found, "quire_engine_up") == 1
    assert value(found, "quire_requests_running") == 0
    assert value(found, "quire_prompt_tokens") > 0
    assert value(found, "quire_requests_finished", finished_reason="length") == 2
    for name, count in {
        "quire_time_to_first_token_seconds": 2,
        "quire_inter_token_latency_seconds": 8,
        "quire_time_per_output_token_seconds": 2,
        "quire_request_latency_seconds": 2,
        "quire_request_queue_seconds": 2,
        "quire_request_prefill_seconds": 2,
        "quire_request_decode_seconds": 2,
        "quire_request_generation_tokens": 2,
        "quire_request_max_tokens": 2,
    }.items():
        assert value(found, name, f"{name}_count") == count, name
    assert value(found, "quire_request_generation_tokens", le="5.0") == 2
    assert value(found, "quire_request_generation_tokens", le="2.0") == 0
    total = value(found, "quire_kv_memory_bytes")
    assert sum(sample.value for sample in found["quire_kv_bytes"].samples) == total
    path = {"method": "POST", "path": "/v1/completions", "status": "200"}
    assert value(found, "quire_http_requests", **path) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 1},
        {"n": 3, "temperature": 1.0},
        {"n": 2, "best_of": 3, "temperature": 1.0},
        {"use_beam_search": True, "n": 2},
        {"prompt": ["A", "Once upon"], "n": 2, "temperature": 1.0},
        {"n": 2, "temperature": 1.0, "stream": True, "stream_options": {"include_usage": True}},
    ],
)
def test_generated_tokens_of_a_tenant_are_those_of_the_usage(serve, options):
    async def main(client):
        scrapes, texts = [], []
        for body in (BODY, BODY | options):
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            texts.append(response.text)
            scrapes.append(families((await client.get("/metrics")).text))
        return *scrapes, texts[-1]

    before, after, text = serve(main)

    generated = int(re.findall(r'"completion_tokens": ?(\d+)', text)[-1])
    assert generated >= options.get("n", 1)
    for name, labels in (
        ("quire_tenant_generation_tokens", {"tenant": "default"}),
        ("quire_generation_tokens", {}),
    ):
        assert value(after, name, **labels) - value(before, name, **labels) == generated


def test_every_defined_metric_has_values_except_those_without_events(serve):
    found = scraped(serve)
    missing = {m.name for m in METRICS if f"quire_{m.name}" not in found}

    without_tiers = {"prefix_tier_damaged", "prefix_tier_outages"}
    assert missing == {"kv_transfer_bytes", "async_waits"} | without_tiers


def test_names_of_vllm(serve):
    both = scraped(serve, metrics_names="both")
    vllm = scraped(serve, metrics_names="vllm")

    assert not any(name.startswith("quire_") for name in vllm)
    assert {name for name in both if name.startswith("vllm:")} == {
        name for name in vllm if name.startswith("vllm:")
    }
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert vllm[f"vllm:{name}"].samples[0].labels == {"model_name": "quire-tiny", "engine": "0"}
    assert value(vllm, "vllm:request_success", finished_reason="length") == 2
    assert value(vllm, "vllm:iteration_tokens_total", "vllm:iteration_tokens_total_count") > 0


@pytest.mark.parametrize(
    ("keys", "path", "headers", "status"),
    [
        (KEYS, "/metrics", {}, 401),
        (KEYS, "/metrics", {"Authorization": "Bearer sk-unknown-1"}, 401),
        (KEYS, "/metrics", {"Authorization": "Bearer sk-a-2f0c77d1"}, 403),
        (KEYS, "/metrics", {"Authorization": "Bearer sk-d-51d09a3e"}, 200),
        (KEYS, "/metrics", {"Authorization": "Bearer metrics-only"}, 200),
        (KEYS, "/v1/models", {"Authorization": "Bearer metrics-only"}, 401),
        (None, "/metrics", {}, 401),
        (None, "/metrics", {"Authorization": "Bearer metrics-other"}, 401),
        (None, "/metrics", {"Authorization": "Basic metrics-only"}, 401),
        (None, "/metrics", {"Authorization": "Bearer metrics-only"}, 200),
        (None, "/metrics", {"x-api-key": "metrics-only"}, 200),
    ],
)
def test_metrics_need_the_key_of_the_operator(serve, keys, path, headers, status):
    response = serve(
        lambda client: client.get(path, headers=headers),
        tenant_keys=keys,
        metrics_key="metrics-only",
    )

    assert response.status_code == status
    if status == 401:
        assert response.headers["www-authenticate"] == "Bearer"


def test_short_metrics_key_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="--metrics-key: expected at least 8 printable"):
        ServerConfig(metrics_key="short")

    monkeypatch.setenv("QUIRE_METRICS_KEY", "short")
    with pytest.raises(ConfigError, match="QUIRE_METRICS_KEY: expected at least 8"):
        ServerConfig().key_of_metrics()


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


def test_openmetrics_is_returned_to_clients_that_accept_it(serve):
    headers = {"Accept": "application/openmetrics-text; version=1.0.0"}
    response = serve(lambda client: client.get("/metrics", headers=headers))

    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")


def test_paths_and_methods_of_clients_make_no_time_series():
    counts, reading = HttpRequests(), Reading()
    for number in range(50):
        counts.add({"method": f"M{number}", "path": f"/{number}"}, 404, 0.1)
    counts.add({"method": "GET", "route": SimpleNamespace(path="/v1/models/{name}")}, 200, 0.1)
    counts.read_into(reading)

    assert reading.labelled["http_requests"] == {
        ("other", "other", "404"): 50,
        ("GET", "/v1/models/{name}", "200"): 1,
    }


def test_tenants_beyond_a_limit_are_summed(serve, monkeypatch):
    monkeypatch.setattr("quire.serve.metrics.observer.MAX_TENANTS", 0)

    found = scraped(serve)

    assert value(found, "quire_tenant_generation_tokens", tenant=OTHER_TENANTS) >= 8


def test_distribution_counts_a_bound_in_its_own_bucket():
    distribution = Distribution((1, 2.5))
    distribution.add_all([0.5, 1, 2, 2.5, 7])
    distribution.add(3, times=2)

    assert distribution.cumulative() == [("1.0", 2), ("2.5", 4), ("+Inf", 7)]
    assert math.isclose(distribution.total, 19)
    assert TOKENS[:5] == (1, 2, 5, 10, 20)
    assert TOKENS[-1] == 1_000_000


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_metrics(serve):
    async def run(client):
        await client.post("/v1/completions", json=BODY)
        return await client.get("/metrics")

    checked = subprocess.run(
        ["promtool", "check", "metrics"],
        input=serve(run).text,
        capture_output=True,
        text=True,
        check=False,
    )

    own = [line for line in checked.stderr.splitlines() if line.startswith("quire_")]
    assert own == [], checked.stderr
