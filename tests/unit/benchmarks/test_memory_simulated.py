"""Simulated parts of the memory benchmark: their comparisons and claims."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.memory import measured, simulated
from benchmarks.memory.simulated import SimulatedConfig
from quire.errors import ConfigError
from quire.sim.models import model_shape
from quire.sim.traces.base import TraceOptions
from support.sim_traces import request, trace

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


def test_shipped_traces_are_complete():
    config = SimulatedConfig()
    azure, mooncake = config.conversations(), config.prefixes()

    assert (azure.format, len(azure.requests)) == ("azure", 19_366)
    assert (mooncake.format, len(mooncake.requests)) == ("mooncake", 2_000)
    first = azure.requests[0]
    assert (first.prompt_tokens, first.answer.tokens) == (374, 44)


def test_scales_and_request_limits_apply_to_the_trace(small_traces):
    at_once = replace(small_traces, requests=7).conversations(TraceOptions(time_scale=0.0))

    assert [request.arrival_s for request in at_once.requests] == [0.0] * 7


# ---- waste ---------------------------------------------------------------------------------------


def test_all_stores_serve_all_workloads(small_traces):
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
    def run(
        store: str, reserved: str | None, dropped: int, waste_fraction: float
    ) -> simulated.StoreRun:
        return simulated.StoreRun(
            workload="real",
            store=store,
            reserved=reserved,
            reserved_tokens=None if reserved is None else 4096,
            dropped=dropped,
            waste_fraction=waste_fraction,
            end_waste_fraction=None,
            running_mean=1.0,
            tokens_per_s=1.0,
        )

    runs = [run("paged", None, 0, 0.01), run("contiguous_max", "4096", 3, 0.75)]

    assert simulated.waste_claims(runs) == {
        "paged_waste_fraction": 0.01,
        "contiguous_waste_fraction_4096": 0.75,
        "contiguous_dropped_4096": 3,
    }


# ---- sizes of pages ------------------------------------------------------------------------------


def test_table_fraction_counts_two_numbers_per_page_and_per_lane():
    """One sequence of 64 tokens, 32 layers: 4 pages of 64 KiB; tables 4 * 2 + 2 numbers of 4 B."""
    model = model_shape("llama-3.1-8b")

    found = measured.table_fraction(model, trace(request(1, 0, 60, 4)), 16, 1)

    assert found == (4 * 2 + 2) * 4 / (4 * 65_536)


# ---- watermarks ----------------------------------------------------------------------------------


def mark(per_cent: int, tokens_per_s: float, p99_s: float) -> simulated.WatermarkRun:
    return simulated.WatermarkRun(
        per_cent=per_cent,
        preempts=False,
        numbers={"generated_tokens_per_s": tokens_per_s, "tpot_p99_s": p99_s},
    )


def test_best_watermark_has_max_throughput_then_shorter_tail():
    runs = [mark(70, 500.0, 1.0), mark(90, 999.9, 2.0), mark(95, 1000.0, 3.0), mark(98, 800.0, 9.0)]

    claims = simulated.watermark_claims([*runs, replace(mark(70, 5000.0, 1.0), preempts=True)])

    assert claims["watermark_best"] == 90
    assert claims["throughput_best_over_98"] == 999.9 / 800


def test_all_low_watermarks_run_with_and_without_a_high_watermark(small_traces):
    config = simulated.WatermarkConfig(per_cents=(70, 98), memory="1GiB")

    runs = list(simulated.measure_watermarks(config, small_traces))

    assert [(r.per_cent, r.preempts) for r in runs] == [
        (70, False),
        (98, False),
        (70, True),
        (98, True),
    ]
    assert runs[0].numbers["running_peak"] <= runs[1].numbers["running_peak"]


# ---- shared prefixes, tenants --------------------------------------------------------------------


def test_unbounded_memory_hits_all_repeated_prefixes(small_traces):
    """Of 9 prompts 7 start with the two blocks of an earlier prompt."""
    claims = simulated.run_reuse(simulated.ReuseConfig(memories=("1GiB",)), small_traces).claims

    assert claims["mooncake_reusable_token_fraction"] == 7 * 1024 / (9 * 1100)
    assert claims["mooncake_hit_fraction_unbounded"] == 7 * 1024 / (9 * 1100)
    assert claims["mooncake_hit_fraction_1GiB"] <= claims["mooncake_hit_fraction_unbounded"]


def test_fairness_table_has_rows_of_both_tenants(small_traces):
    config = simulated.FairnessConfig(times_more=2)

    result = simulated.run_fairness(config, small_traces)

    assert {(row[0], row[1]) for row in result.tables[0].rows} == {
        ("alone", "small"),
        *((run, tenant) for run in ("flood", "drain") for tenant in ("small", "large")),
    }
    assert 0.5 < result.claims["fairness_jain"] <= 1


def test_trace_without_a_small_tenant_raises(small_traces):
    with pytest.raises(ConfigError, match="use a longer trace"):
        simulated.measure_fairness(simulated.FairnessConfig(requests=1), small_traces)


def test_one_token_outputs_have_no_time_per_token(small_traces, tmp_path):
    path = tmp_path / "ones.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:00.0,9,1\n")
    config = simulated.WatermarkConfig(per_cents=(98,))

    result = simulated.run_watermarks(config, replace(small_traces, trace=str(path)))

    assert result.claims["watermark_best"] == 98
    assert result.tables[0].rows[0][6] is None
