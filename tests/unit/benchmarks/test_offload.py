"""`python -m benchmarks offload`: results of the parts, and layouts of the arms."""

from dataclasses import replace

import pytest

from benchmarks.common.kvpr import pipelined_gain
from benchmarks.common.result import PartResult
from benchmarks.offload.config import QUICK_OFFLOAD
from benchmarks.offload.engine import run_engine, run_engine_gain
from benchmarks.offload.restore import run_restore
from benchmarks.offload.schedule import (
    Sizes,
    Speeds,
    plan_step,
    run_clock,
)
from benchmarks.offload.virtual import (
    ARMS,
    BY_NAME,
    MACHINES,
    MODELS,
    Load,
    case_of,
    lay_out,
    sizes_of,
    speeds_of,
    step_work,
)
from benchmarks.offload.virtual_parts import run_codec, run_latency, run_position, run_weights
from quire.offload.split import pipelined_seconds
from quire.plan.rates import CopyRate
from support.redis_servers import requires_redis

SIZES = Sizes(kv_bytes=128, x_bytes=64)  # xi = 0.5
CONFIG = replace(
    QUICK_OFFLOAD,
    repeats=1,
    restore_tokens=64,
    batches=(1,),
    prompts=(128,),
    layers=2,
    engine_tokens=128,
    engine_steps=3,
    gain_rows=4,
    gain_steps=4,
)


def speeds(rho=0.58, other=0.04, tokens=1000):
    rate = CopyRate(bytes_per_s=SIZES.kv_bytes)  # k = 1 s
    return Speeds(
        inward=rate,
        outward=rate,
        project_token_s=rho,
        attend_call_s=other * tokens / 2,
        layer_s=other * tokens / 2,
    )


def test_arms_at_a100_ratios_match_the_formulas():
    """1.46, 0.316 and 1.86 by the formulas, with c = 0 and infinitely many layers."""
    plain = speeds(other=0.0)
    sizes, tokens = SIZES, 1000
    times = {}
    for arm in ARMS:
        found = lay_out(arm, plain, sizes, rows=2, tokens=tokens)
        work = step_work(found.batch, 120, sizes, plain)
        times[arm.name] = run_clock(plan_step(work, found.rules)).seconds

    assert times["prefetch"] / times["lA"] == pytest.approx(1.463, rel=0.01)
    assert times["prefetch"] / times["lB"] == pytest.approx(1.862, rel=0.01)
    rates = lay_out(BY_NAME["prefetch"], plain, sizes, rows=2, tokens=tokens).rates
    assert pipelined_gain(rates) == pytest.approx(1.862, rel=0.001)


@pytest.mark.parametrize("other", [0.0, 0.04, 0.1])
def test_ring_is_small_and_costs_no_time(other):
    sizes, tokens, machine = SIZES, 4096, speeds(other=other, tokens=4096)
    found = lay_out(BY_NAME["lB"], machine, sizes, rows=2, tokens=tokens)
    works = [step_work(found.batch, layers, sizes, machine) for layers in (10, 30)]

    short_s, long_s = (run_clock(plan_step(w, found.rules)).seconds for w in works)

    steady_s = pipelined_seconds(found.rates, tokens, found.batch.x)
    assert (long_s - short_s) / 20 == pytest.approx(steady_s, rel=0.01)
    ring_bytes = found.rules.x_ring / found.rules.x_chunks * found.batch.x * sizes.x_bytes
    assert ring_bytes <= (0.05 + 0.25 * other) * found.rules.slots * tokens * sizes.kv_bytes


def test_whole_models_match_data_sheet_times():
    """OPT-6.7B on an H200, 64 rows of 1,024 tokens: 625 ms prefetched, 312 ms at the split."""
    case = case_of("OPT-6.7B", "h200")
    times = {
        name: case.step_seconds(BY_NAME[name], 64, 64 * 1024) for name in ("prefetch", "lA", "lB")
    }

    assert times["prefetch"] == pytest.approx(0.625, rel=0.03)
    assert times["lA"] == pytest.approx(0.393, rel=0.06)
    assert times["lB"] == pytest.approx(0.312, rel=0.06)
    assert case.tokens_per_s(BY_NAME["lB"], Load(rows=64, prompt=1000, generated=49)) == (
        pytest.approx(64 / times["lB"], rel=0.05)
    )
    assert case_of("Llama-3-8B", "h200").layout(BY_NAME["lB"], 64, 4096).batch.x == 0


def test_weights_on_the_device_are_not_transferred():
    model = MODELS["OPT-6.7B"]
    here, away = (sizes_of(model, weights_on_device=w) for w in (True, False))

    assert here.weight_bytes == 0
    assert away.weight_bytes == 24 * 4096**2
    found = speeds_of(MACHINES["a100"], model)
    assert found.project_token_s == pytest.approx(4 * 4096**2 / 220e12)


PARTS = (
    pytest.param(run_restore, marks=requires_redis),
    run_latency,
    run_weights,
    run_codec,
    run_position,
    run_engine,
    pytest.param(run_engine_gain, marks=pytest.mark.slow),
)
CLAIMS = {
    run_restore: {"restore_gain_vs_load", "restore_gain_vs_load_10gb", "restore_over_alone"},
    run_engine: {"prefill_overhead_fraction", "engine_auto_over_off"},
    run_engine_gain: {"engine_gain_lB_over_prefetch", "engine_gain_throughput_mode"},
}


@pytest.mark.parametrize("run", PARTS, ids=lambda run: run.__name__)
def test_every_part_runs_and_round_trips_through_json(run):
    result = run(CONFIG)

    assert CLAIMS.get(run, set()) <= set(result.claims)
    assert all(isinstance(value, int | float) for value in result.claims.values())
    assert all(len(row) == len(t.columns) for t in result.tables for row in t.rows)
    restored = PartResult.from_json(result.to_json())
    assert restored.tables == result.tables
    if run is run_latency:
        assert result.claims["h200_llama_3_8b_gain"] == 1
    if run is run_weights:
        assert result.claims["hiding_never_slower"] == 1
        assert result.claims["hiding_over_flexgen"] >= 1
    if run is run_engine:
        assert result.claims["engine_hosted_bytes"]
    if run is run_engine_gain:
        assert result.claims["engine_gain_lB_over_prefetch_equal"] == 1
        assert result.claims["engine_gain_throughput_mode_equal"] == 1
        assert {row[3] > 0 for row in result.tables[0].rows if row[1] == "lB"} == {True}
        assert {row[3] for row in result.tables[0].rows if row[1] == "prefetch"} == {0}
