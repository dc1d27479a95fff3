"""The Batch-Max benchmark: arms, batches, computation on given values, and small runs."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.batch_max import command, speed
from benchmarks.batch_max.config import (
    BatchMaxConfig,
    arms_of,
    batch_max,
    decode_only,
    full_kv,
)
from benchmarks.batch_max.floor import Limits, floor_claims
from benchmarks.batch_max.speed import (
    CONTINUOUS,
    STATIC,
    ArmTime,
    batch_sizes,
    claims,
    largest_of,
    ratio,
    rows_that_fit,
    run_speed,
)
from benchmarks.common.decoding import generate_all
from benchmarks.common.models import SHAPES, random_model
from quire.engine.core import Engine
from quire.models.loader import LoadedModel
from quire.policies.eviction import make_eviction
from support.kv_options import kv_config

TINY = BatchMaxConfig(
    model="tiny",
    prompt_tokens=224,
    new_tokens=32,
    caps=(56, 112),
    every=4,
    repeats=1,
    continuous_prompts=3,
)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return random_model(SHAPES["tiny"](), dtype=torch.bfloat16)


# ---- arms ----------------------------------------------------------------------------------------


def test_arms_match_the_papers_algorithms():
    arms = {arm.name: arm.evict for arm in arms_of((896, 1792), 64)}

    assert arms == {
        "fkv": "full",
        "ed_2": "recent:cap=2,every=1,when=decode",
        "ed_65": "recent:cap=65,every=64,when=decode",
        "bm_896": "average:cap=896,every=64",
        "bm_1792": "average:cap=1792,every=64",
        "end_896": "average:cap=896,when=prefill_end",
    }
    for evict in arms.values():
        assert make_eviction(evict).text == evict


# ---- batches -------------------------------------------------------------------------------------


@pytest.mark.paper
def test_batch_sizes_of_960_samples_equal_the_papers_set():
    """Section 4.2 of the paper: D = {1, 2, 3, 4, 5, 6, 8, ..., 32, 40, 48, ...}."""
    assert batch_sizes()[:17] == (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 16, 20, 24, 30, 32, 40, 48)
    assert largest_of(batch_sizes(), 9) == 8
    assert largest_of(batch_sizes(), 0) == 0
    assert batch_sizes(6) == (1, 2, 3, 6)


@pytest.mark.parametrize(
    ("arm", "rows"),
    [
        # 2 layers x 2 heads x 16 numbers x K and V x 2 B = 256 B a token; memory: 512 tokens
        (full_kv(), 2),
        # a prompt of 224 tokens with its positions (4 B a lane): 272 B a token, 60,928 B
        (decode_only(2), 2),
        # 56 tokens in 4 pages of 16: 64 slots x (272 + 16 B of sums) = 18,432 B: 7 in 131,072 B
        (batch_max(56, 4), 7),
    ],
)
def test_rows_that_fit_equals_rows_admitted_by_the_engine(model: LoadedModel, arm, rows: int):
    kv = kv_config(memory=512 * 256, evict=arm.evict, enable_prefix_caching=False)

    assert rows_that_fit(model, kv, 224, 32) == rows
    assert rows_that_fit(model, kv, 224, 32, most=1) == 1


# ---- running -------------------------------------------------------------------------------------


def test_outputs_are_complete_and_in_prompt_order(model: LoadedModel):
    engine = Engine(model, kv_config(memory=1 << 20, enable_prefix_caching=False))
    prompts = [[1, 2, 3], [4, 5, 6, 7]]

    together = generate_all(engine, prompts, 5)
    alone = [generate_all(engine, [prompt], 5).answers[0] for prompt in prompts]

    assert together.answers == tuple(alone)
    assert together.rows_peak == 2
    assert together.new_tokens == 10
    assert 0 < together.prefill_s < together.total_s


# ---- speed ---------------------------------------------------------------------------------------


def arm_time(arm: str, tokens_per_s: float, **changes: object) -> ArmTime:
    fields: dict[str, object] = {
        "mode": STATIC,
        "arm": arm,
        "kv_bytes": 1000,
        "peak_bytes": 900,
        "batch": 2,
        "prefill_s": 1.0,
        "decode_s": 2.0,
        "tokens_per_s": tokens_per_s,
        "preemptions": 0,
    }
    return ArmTime(**(fields | changes))


def test_ratio_is_median_of_ratios_within_rounds():
    """Of 4/1, 9/3 and 10/5 the median is 3; the ratio of the medians would be 9/3 too: not 10/3."""
    rounds = [
        [arm_time("fkv", 1.0), arm_time("bm_8", 4.0)],
        [arm_time("fkv", 5.0), arm_time("bm_8", 10.0)],
        [arm_time("fkv", 3.0), arm_time("bm_8", 10.0)],
    ]

    assert ratio(rounds, STATIC, "bm_8", "fkv") == pytest.approx(10 / 3)
    assert ratio(rounds[:2], STATIC, "bm_8", "fkv") == 3.0


def test_claims_use_the_first_cap():
    found = [
        arm_time("fkv", 10.0),
        arm_time("ed_2", 20.0),
        arm_time("ed_5", 19.0),
        arm_time("bm_56", 50.0, batch=8, peak_bytes=990),
        arm_time("bm_112", 40.0),
        arm_time("end_56", 15.0),
    ]
    at_once = [replace(t, mode=CONTINUOUS, tokens_per_s=2 * t.tokens_per_s) for t in found]

    made = claims(TINY, [[*found, *at_once]])

    assert made["bm_over_ed_throughput"] == 2.5
    assert made["bm_over_fkv_throughput"] == 5.0
    assert made["b2_bm_56_batch"] == 8
    assert made["b2_bm_56_peak_bytes"] == 990
    assert made["continuous_end_56_over_fkv"] == 1.5
    assert made["continuous_bm_112_tokens_per_s"] == 80.0


@pytest.mark.slow
def test_all_arms_run_once_and_the_claimed_ones_in_every_round(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(speed, "rows_that_fit", partial(rows_that_fit, most=16))
    result = run_speed(replace(TINY, prompt_tokens=112, new_tokens=16, caps=(28, 56), repeats=2))

    static, continuous = result.tables
    assert [row[1] for row in static.rows] == [2, 2, 1, 2, 1, 1]
    assert len(continuous.rows) == 6
    assert result.claims["b2_fkv_batch"] == result.claims["b2_ed_2_batch"] == 2
    assert result.claims["b2_bm_28_batch"] == 6  # 7 rows fit; 7 is not in the set
    for time in result.raw["rounds"][0]:
        assert 0 < time["peak_bytes"] <= time["kv_bytes"]
        assert time["mode"] == CONTINUOUS or time["preemptions"] == 0
    assert set(result.charts[0].lines) == {"FKV", "ED, cap 2", "BM, cap 28"}


def test_floor_ratios_are_those_of_the_documents_example():
    """docs/maximize-batch.md, with rates of 23.8 GB/s, 2 TFLOP/s and 64-row products: 1.9, 2.6."""
    limits = Limits(
        read_bytes_per_s=23.8e9, flops_per_s=2e12, block_flops_per_s=2 * 64 * 2048 * 2048 / 0.55e-3
    )

    made = floor_claims(BatchMaxConfig(), limits, {"fkv": 2, "ed_2": 2, "bm_896": 8})

    assert round(made["floor_bm_over_ed"], 1) == 1.9
    assert round(made["floor_bm_over_fkv"], 1) == 2.6


# ---- the command ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_command_prints_claims_and_repeats(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    pytest.importorskip("matplotlib")
    small = BatchMaxConfig(
        model="tiny",
        prompt_tokens=56,
        new_tokens=8,
        caps=(24,),
        every=8,
        repeats=1,
        continuous_prompts=2,
    )
    monkeypatch.setattr(command, "QUICK_BATCH_MAX", small)
    monkeypatch.setattr(speed, "rows_that_fit", partial(rows_that_fit, most=16))  # 6 do
    out = tmp_path / "out"

    arguments = ["batch-max", "--quick", "--json", "--out", str(out)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)

    assert result.exit_code == 0, result.output
    run = json.loads(result.stdout.splitlines()[-1])
    assert run["name"] == "bench batch-max"
    assert list(run["arms"]) == ["speed"]
    assert {"bm_over_ed_throughput", "bm_over_fkv_throughput"} <= set(run["quick_figures"])
    files = {path.name for path in out.iterdir()}
    assert {"batch-max.json", "batch-max.md", "batch-max-static.csv", "batch-max.svg"} <= files


def test_command_refuses_invalid_values():
    result = CliRunner().invoke(app, ["batch-max", "--dtype", "bfloat17"])

    assert result.exit_code != 0
    assert "bfloat16" in " ".join(f"{result.exception} {result.output}".split())
