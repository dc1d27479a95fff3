"""The simulated cluster: one replica equals the simulator, and no request is lost."""

from dataclasses import astuple, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config.kv_config import KVConfig
from quire.errors import ConfigError
from quire.scale.cluster.cluster import make_cluster
from quire.scale.cluster.metrics import by_replica, records_of, summarise_cluster
from quire.scale.config import ClusterConfig
from quire.scale.routing.policies import ROUTERS, RouterConfig
from quire.scheduler.schedule_config import ScheduleConfig
from quire.sim.metrics import summarise
from quire.sim.models import model_shape
from quire.sim.run import SimConfig, simulate
from quire.sim.traces.base import TraceOptions
from quire.sim.traces.loading import load_trace
from support.kv_options import kv_config
from support.pairwise import every_pair
from support.sim_traces import RATES, recorded, request, trace

CONFIG = SimConfig(model=model_shape("quire-tiny"), rates=RATES, kv=KVConfig(memory="2MiB"))
OVERLOAD = trace(*(request(i, i * 0.0005, 60 + i % 7 * 40, 30 + i % 5 * 20) for i in range(1, 26)))
CONVERSATIONS = trace(
    *(request(i, i * 0.01, 9, 20, shared=[(i % 5, 64), (10 + i % 10, 32)]) for i in range(1, 61))
)
TENANTS = replace(
    CONVERSATIONS,
    requests=tuple(replace(r, tenant="ab"[r.line % 3 == 0]) for r in CONVERSATIONS.requests),
)
rows_of_loads = st.lists(
    st.tuples(st.floats(0, 0.1), st.integers(1, 700), st.integers(0, 90), st.sampled_from("abc")),
    min_size=1,
    max_size=12,
)


def run(load, config=CONFIG, router="kv_aware", **options):
    return make_cluster(load, config, ClusterConfig(**options), RouterConfig(name=router)).run()


def outcomes(records):
    return [astuple(record) for record in records]


@every_pair(router=ROUTERS, kv_events=[True, False], load=[OVERLOAD, CONVERSATIONS, TENANTS])
def test_one_replica_is_the_simulator(load, kv_events, router):
    alone = simulate(load, CONFIG)
    result = run(load, router=router, kv_events=kv_events)
    assert outcomes(result.replicas[0].records) == outcomes(alone.records)
    assert summarise(result.replicas[0]) == summarise(alone)
    assert result.end_s == alone.gauges.time_s


@given(
    rows=rows_of_loads,
    replicas=st.integers(1, 4),
    router=st.sampled_from(ROUTERS),
    interval_s=st.sampled_from([0.0, 0.01]),
)
@settings(max_examples=25)
def test_every_request_ends_once_on_one_replica(rows, replicas, router, interval_s):
    """Some prompts are longer than the context of 512 tokens or the memory: they are refused."""
    lines = enumerate(sorted(rows), start=1)
    load = trace(*(request(line, *row[:3], tenant=row[3]) for line, row in lines))
    schedule = ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=64)
    config = replace(CONFIG, kv=KVConfig(memory=400_000), schedule=schedule)

    result = run(load, config, router, replicas=replicas, report_interval_s=interval_s)

    records = records_of(result)
    assert [record.line for record in records] == [r.line for r in load.requests]
    for record, expected in zip(records, load.requests, strict=True):
        assert record.finished == (record.refused is None)
        if record.finished:
            assert expected.arrival_s <= record.admitted_s < record.first_token_s <= record.finish_s
    for number, replica in enumerate(result.replicas):
        assert result.placed.count(number) == len(replica.records)
    assert len(result.router_calls_s["choice"]) >= len(records)


def test_kv_aware_keeps_conversations_together():
    hits = {
        router: summarise_cluster(run(CONVERSATIONS, router=router, replicas=4))
        for router in ("kv_aware", "round_robin")
    }
    alone = summarise(simulate(CONVERSATIONS, CONFIG))

    assert hits["kv_aware"]["prefix_hit_fraction"] > hits["round_robin"]["prefix_hit_fraction"]
    assert hits["kv_aware"]["prefix_hit_fraction"] > alone["prefix_hit_fraction"] - 0.05
    kv = kv_config(memory="2MiB", enable_prefix_caching=False)  # nothing to follow
    summary = summarise_cluster(run(CONVERSATIONS, replace(CONFIG, kv=kv), replicas=2))
    assert summary["cached_tokens"] == 0
    assert summary["finished"] == len(CONVERSATIONS.requests)


def test_numbers_of_replicas_sum_and_invalid_options_are_refused():
    result, again = (run(CONVERSATIONS, replicas=3) for _ in range(2))
    summary, replicas = summarise_cluster(result), by_replica(result)

    assert result.placed == again.placed  # it is deterministic
    assert summary == summarise_cluster(again)
    assert sum(r["requests"] for r in replicas) == summary["requests"]
    generated = summary["generated_tokens_per_s"] * summary["virtual_s"]
    assert sum(r["generated_tokens"] for r in replicas) == pytest.approx(generated)
    busiest = max(r["busy_s"] for r in replicas) * 3 / sum(r["busy_s"] for r in replicas)
    assert summary["busy_imbalance"] == pytest.approx(busiest)

    with pytest.raises(ConfigError, match="expected 1 to 4096 replicas, got 0"):
        run(OVERLOAD, replicas=0)
    with pytest.raises(ConfigError, match="--router-report-interval from 0, got -1"):
        run(OVERLOAD, report_interval_s=-1.0)


def one_pool(config, times):
    """One engine with the KV memory and the rates of some replicas."""

    def larger(of, *names):
        return replace(of, **{name: getattr(of, name) * times for name in names})

    rates = larger(config.rates, "read_bytes_per_s", "flops_per_s", "copy_bytes_per_s")
    sizes = ("max_num_seqs", "max_num_batched_tokens", "chunk_tokens")
    schedule = larger(config.schedule, *sizes)
    return replace(config, kv=larger(config.kv, "memory"), rates=rates, schedule=schedule)


@pytest.mark.slow
def test_kv_aware_is_near_one_pool_on_a_recorded_trace():
    """The first 2,000 requests; one pool has the KV memory and the rates of all replicas."""
    options = TraceOptions(requests=2_000, time_scale=0.5)
    load = load_trace(recorded("mooncake_conversation_trace.jsonl"), options)
    rates = replace(RATES, read_bytes_per_s=1.2e12, flops_per_s=1.9e14)
    kv = KVConfig(memory="40GiB", page_tokens=512)
    config = SimConfig(model=model_shape("llama-3.1-8b"), rates=rates, kv=kv)

    found = {router: summarise_cluster(run(load, config, router, replicas=8)) for router in ROUTERS}

    best_other = min(found[name]["ttft_p99_s"] for name in ("round_robin", "least_loaded"))
    assert found["kv_aware"]["ttft_p99_s"] < best_other
    pool = summarise(simulate(load, one_pool(config, 8)))
    assert found["kv_aware"]["prefix_hit_fraction"] > pool["prefix_hit_fraction"] - 0.05
