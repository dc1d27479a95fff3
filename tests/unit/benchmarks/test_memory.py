"""The memory benchmark: small runs and claims of given inputs; loads of the cluster one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.cluster.runs import at_load, for_replicas
from benchmarks.memory import measured, simulated
from benchmarks.memory.simulated import SimulatedConfig
from quire.sim.engine import ServedTokens, SimResult
from quire.sim.models import model_shape
from quire.sim.records import Gauges, RequestRecord
from quire.sim.traces.base import Trace
from support.sim_traces import request, trace


@pytest.mark.paper
def test_four_beams_that_fork_at_50_last_tokens_use_140_of_128_pages():
    """The article says 1.05; its own formula gives 140 / 128."""
    runs = {(r.course, r.page_tokens): r for r in measured.measure_beams(measured.BeamConfig())}
    assert runs[measured.FORK_ONCE, 16].ratio == 140 / 128
    assert runs[measured.FORK_ONCE, 1].ratio == (2048 + 3 * 50) / 2048
    assert runs[measured.REORDER, 16].ratio <= 140 / 128
    assert 1 < runs[measured.ENGINE, 16].ratio <= 140 / 128
    assert measured.BeamConfig().floor_by_tokens == pytest.approx(1.073, abs=5e-4)


def test_beam_claim_is_largest_ratio_with_pages_of_16():
    runs = [
        measured.BeamRun(course=course, page_tokens=tokens, peak_bytes=peak, one_bytes=100)
        for course, tokens, peak in (
            (measured.FORK_ONCE, 16, 105),
            (measured.REORDER, 16, 109),
            (measured.FORK_ONCE, 64, 150),
        )
    ]
    assert measured.beam_claims(runs)["beam4_memory_ratio"] == 1.09


def test_later_requests_hit_the_system_prompt_and_claims_are_ratios_within_rounds():
    """3 requests share 32 tokens, two whole pages: the first prefills them, the others hit 64."""
    config = measured.PrefixConfig(
        model="tiny", sharers=3, system_tokens=32, own_tokens=8, new_tokens=3, repeats=1
    )

    result = measured.run_prefix(config)

    assert result.claims["prefix_prefill_saved_fraction"] == 1.0
    assert result.claims["prefix_equal_answers"] == 1.0
    assert result.claims["prefix_kv_bytes_ratio"] < 1
    computed = 3 * 40 + 3 * 2  # prompts, and outputs without their last tokens
    assert result.claims["prefix_computed_ratio"] == (computed - 64) / computed

    config = measured.PrefixConfig(sharers=2, system_tokens=100)
    shared = {"shares": True, "cached_tokens": 90, "computed_tokens": 30, "peak_bytes": 50}
    alone = {"shares": False, "cached_tokens": 0, "computed_tokens": 120, "peak_bytes": 100}
    rounds = [
        measured.PrefixRun(total_s=total_s, tokens=((1,), (token,)), **run)
        for run, total_s, token in (
            *((shared, 1.0, 2), (alone, 4.0, 2), (shared, 1.0, 2), (alone, 2.0, 3)),
        )
    ]

    assert measured.prefix_claims(config, rounds) == {
        "prefix_prefill_saved_fraction": 0.9,
        "prefix_computed_ratio": 0.25,
        "prefix_kv_bytes_ratio": 0.5,
        "prefix_total_ratio": 0.375,
        "prefix_equal_answers": 0.75,
    }


def test_total_time_is_the_sum_over_tokens():
    """After 0 and 1 tokens: 1 s, as at the shortest length; after 2: 2 s; after 3: 3 s."""
    assert measured.total_s({1: 1.0, 3: 3.0}, 4) == 1.0 + 1.0 + 2.0 + 3.0
    times = measured.TokenTimes(without_s={2: 6.0}, with_s={2: 2.0})
    assert measured.generation_claims(times) == {"cache_speedup_2": 3.0}


def run_with(queues_s: dict[str, float], served: dict[str, int]) -> SimResult:
    """A result with one request of each tenant, which waited so long."""
    result = SimResult(Trace(name="", format="", requests=()), 0, gauges=Gauges())
    for tenant, queue_s in queues_s.items():
        times = {"arrival_s": 1.0, "admitted_s": 1.0 + queue_s}
        times |= {"first_token_s": 9.0, "finish_s": 9.0}
        one = RequestRecord(line=1, tenant=tenant, prompt_tokens=1, answer_tokens=1, **times)
        result.records.append(one)
    result.served = ServedTokens(served)
    result.served.tokens.update(served)
    return result


def test_fairness_claims_compare_with_the_small_tenant_alone():
    runs = simulated.FairnessRuns(
        alone=run_with({"small": 0.5}, {}),
        flood=run_with({"small": 2.0, "large": 7.0}, {}),
        drain=run_with({}, {"small": 100, "large": 300}),
        step_s=1.0,
        prefill_s=3.0,
    )

    assert simulated.fairness_claims(runs) == {
        "small_tenant_p99_queue_over_limit": 0.5,
        "fairness_jain": 400**2 / (2 * (100**2 + 300**2)),
    }


LENGTHS = ((300, 40), (5_000, 10), (700, 90), (30, 200), (90, 30), (1_200, 15))


@pytest.fixture
def small_traces(tmp_path: Path) -> SimulatedConfig:
    """Eighteen conversations in one second, and nine prompts, most with a common prefix."""
    rows = [f"2024-01-01 00:00:00.{i:02},{a},{b}" for i, (a, b) in enumerate(3 * LENGTHS)]
    conversations = tmp_path / "few.csv"
    conversations.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    prompts = [
        {"timestamp": 9000 * i, "input_length": 1100, "output_length": 4, "hash_ids": [i % 2, 2, i]}
        for i in range(3, 12)
    ]
    prefixes = tmp_path / "few.jsonl"
    prefixes.write_text("\n".join(map(json.dumps, prompts)))
    return SimulatedConfig(trace=str(conversations), prefix_trace=str(prefixes))


def test_shipped_traces_are_complete_and_all_stores_serve_all_workloads(small_traces):
    config = SimulatedConfig()
    azure, mooncake = config.conversations(), config.prefixes()

    assert (azure.format, len(azure.requests)) == ("azure", 19_366)
    assert (mooncake.format, len(mooncake.requests)) == ("mooncake", 2_000)
    first = azure.requests[0]
    assert (first.prompt_tokens, first.answer.tokens) == (374, 44)

    runs = list(simulated.measure_waste_of_stores(simulated.WasteConfig(), small_traces))
    claims = simulated.waste_claims(runs)

    assert {(r.workload, r.store) for r in runs} == {
        *((w, s) for w in ("real", "short") for s in ("paged", "contiguous_max")),
        ("window", "paged"),
    }
    assert claims["paged_waste_fraction"] < 0.02
    assert claims["contiguous_waste_fraction_4096"] > 0.5
    assert claims["contiguous_dropped_4096"] == 3
    assert claims["contiguous_dropped_own"] == 0
    slab = next(r for r in runs if r.reserved == "4096")  # five requests of a row each
    assert slab.end_waste_fraction < slab.waste_fraction + 0.05


def test_requests_longer_than_a_lane_are_dropped_and_counted():
    one = {"workload": "real", "end_waste_fraction": None, "running_mean": 1.0, "tokens_per_s": 1.0}
    paged = {"store": "paged", "reserved": None, "reserved_tokens": None, "dropped": 0}
    slab = {"store": "contiguous_max", "reserved": "4096", "reserved_tokens": 4096, "dropped": 3}
    runs = [
        simulated.StoreRun(waste_fraction=waste, **store, **one)
        for store, waste in ((paged, 0.01), (slab, 0.75))
    ]

    assert simulated.waste_claims(runs) == {
        "paged_waste_fraction": 0.01,
        "contiguous_waste_fraction_4096": 0.75,
        "contiguous_dropped_4096": 3,
    }


def test_table_fraction_and_best_watermark_match_hand_computation():
    """One sequence of 64 tokens, 32 layers: 4 pages of 64 KiB; tables 4 * 2 + 2 numbers of 4 B."""
    model = model_shape("llama-3.1-8b")
    found = measured.table_fraction(model, trace(request(1, 0, 60, 4)), 16, 1)
    assert found == (4 * 2 + 2) * 4 / (4 * 65_536)

    runs = [mark(70, 500.0, 1.0), mark(90, 999.9, 2.0), mark(95, 1000.0, 3.0), mark(98, 800.0, 9.0)]

    claims = simulated.watermark_claims([*runs, replace(mark(70, 5000.0, 1.0), preempts=True)])

    assert claims["watermark_best"] == 90
    assert claims["throughput_best_over_98"] == 999.9 / 800


def mark(per_cent: int, tokens_per_s: float, p99_s: float) -> simulated.WatermarkRun:
    numbers = {"generated_tokens_per_s": tokens_per_s, "tpot_p99_s": p99_s}
    return simulated.WatermarkRun(per_cent=per_cent, preempts=False, numbers=numbers)


def test_watermarks_unbounded_memory_and_tenants_have_rows(small_traces):
    config = simulated.WatermarkConfig(per_cents=(70, 98), memory="1GiB")

    runs = list(simulated.measure_watermarks(config, small_traces))

    marks = [(per_cent, preempts) for preempts in (False, True) for per_cent in (70, 98)]
    assert [(r.per_cent, r.preempts) for r in runs] == marks
    assert runs[0].numbers["running_peak"] <= runs[1].numbers["running_peak"]
    # of 9 prompts 7 start with the two blocks of an earlier prompt
    claims = simulated.run_reuse(simulated.ReuseConfig(memories=("1GiB",)), small_traces).claims
    assert claims["mooncake_reusable_token_fraction"] == 7 * 1024 / (9 * 1100)
    assert claims["mooncake_hit_fraction_unbounded"] == 7 * 1024 / (9 * 1100)
    assert claims["mooncake_hit_fraction_1GiB"] <= claims["mooncake_hit_fraction_unbounded"]

    config = simulated.FairnessConfig(times_more=2)

    result = simulated.run_fairness(config, small_traces)

    assert {(row[0], row[1]) for row in result.tables[0].rows} == {
        ("alone", "small"),
        *((run, tenant) for run in ("flood", "drain") for tenant in ("small", "large")),
    }
    assert 0.5 < result.claims["fairness_jain"] <= 1


# ---- loads of clusters ---------------------------------------------------------------------------


TALK = trace(*(request(i, i * 0.5, 9, 20, shared=[(0, 32), (1 + i % 8, 32)]) for i in range(1, 41)))


@given(factor=st.sampled_from([0.5, 1.0, 3.0]))
def test_load_scales_arrivals_only(factor):
    faster = at_load(TALK, factor)
    assert [r.arrival_s * factor for r in faster.requests] == pytest.approx(
        [r.arrival_s for r in TALK.requests]
    )
    assert [r.prompt for r in faster.requests] == [r.prompt for r in TALK.requests]


@pytest.mark.parametrize("replicas", [1, 2, 4, 8, 16, 64])
def test_load_of_more_replicas_has_more_conversations(replicas):
    load = for_replicas(TALK, replicas, 8)
    assert len(load.requests) == 40 * replicas / 8
    assert len({r.prompt[1].content for r in load.requests}) == replicas
    assert [r.arrival_s for r in load.requests] == sorted(r.arrival_s for r in load.requests)
    assert load.requests[0].arrival_s == 0
    # every conversation is whole
    assert {sum(r.prompt[1] == q.prompt[1] for r in load.requests) for q in load.requests} == {5}
