"""The paper's protocol: searched caps, their order, and the claims."""

from dataclasses import replace

import pytest
import torch

from benchmarks.batch_max import paper
from benchmarks.batch_max.judged import Batches, Encoded, Judged
from benchmarks.batch_max.paper import (
    PaperConfig,
    PaperProtocol,
    PaperRow,
    claims,
    paper_result,
    smallest_cap,
)
from benchmarks.common.graded_prompts import GradedPrompt
from benchmarks.common.models import llama_tiny, random_model
from quire.config.kv_config import KVConfig
from quire.errors import ConfigError
from quire.models.loader import LoadedModel

CONFIG = PaperConfig(
    model="tiny", task="t", samples=12, input_tokens=224, new_tokens=32, every=8, step=16, near=0.9
)
KV = KVConfig(memory=3 * 256 * 256)  # three rows of full KV


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return random_model(llama_tiny(), dtype=torch.bfloat16)


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Scores by arm, in place of runs; Batch-Max's scores rise with the cap up to 0.8."""
    scores_by_arm = {"fkv": 0.5, "ed_2": 0.0, "ed_9": 0.0}

    def judge(model: LoadedModel, task: str, prompts: list[Encoded], batches: Batches) -> Judged:
        kind, _, cap = batches.arm.partition("_")
        return Judged(
            task=task,
            arm=batches.arm,
            batch=batches.batch,
            score=int(cap) / 200 if kind == "bm" else scores_by_arm[batches.arm],
            samples=12,
            total_s=1.0,
            new_tokens=10 * batches.batch,
            peak_bytes=1000,
        )

    monkeypatch.setattr(paper, "judge", judge)
    return scores_by_arm


def protocol(model: LoadedModel, config: PaperConfig = CONFIG, kv: KVConfig = KV) -> PaperProtocol:
    prompt = Encoded(tokens=(1,) * 224, graded=GradedPrompt(prompt="", grade=lambda text: 1.0))
    return PaperProtocol(model, kv, config, [prompt] * config.samples)


@pytest.mark.usefixtures("scores")
def test_decode_only_runs_at_largest_batch_that_fits(model: LoadedModel):
    """Three prompts of 224 tokens with positions fit, four do not; full KV also fits three."""
    rows = protocol(model).run()

    first = [(row.arm, row.batch, row.judged is None) for row in rows[:4]]
    assert first == [("ed_2", 4, True), ("ed_2", 3, False), ("ed_9", 3, False), ("fkv", 3, False)]


@pytest.mark.usefixtures("scores")
def test_search_finds_and_refines_smallest_caps(model: LoadedModel):
    """Score = cap / 200: 0.5 needs a cap of 100, so 112, refined to 104; 0.45 needs 90: 96 and 88.

    88 scores 0.44: tried, and not good enough.
    """
    rows = protocol(model).run()

    tried = {row.cap for row in rows if row.cap}
    assert {112, 104, 96, 88} <= tried
    assert all(cap % 8 == 0 for cap in tried)
    assert smallest_cap(rows, 0.5) is not None
    assert smallest_cap(rows, 0.5).cap == 104
    assert smallest_cap(rows, 0.45).cap == 96
    assert len(tried) == len([row for row in rows if row.cap])  # none is run twice


@pytest.mark.usefixtures("scores")
def test_smaller_caps_have_larger_batches_that_divide_the_samples(model: LoadedModel):
    rows = {row.cap: row.batch for row in protocol(model).run() if row.cap}

    assert all(12 % batch == 0 for batch in rows.values())
    assert rows[96] >= 4
    assert sorted(rows, reverse=True) == sorted(rows, key=lambda cap: rows[cap] - cap / 1e6)


def test_unreached_score_has_no_cap_claim(model: LoadedModel, scores: dict[str, float]):
    scores["fkv"] = 1.5

    made = claims(CONFIG, protocol(model).run())

    assert made["fkv_score"] == 1.5
    assert not any(name.startswith("bm_above") for name in made)


def test_no_row_is_out_of_memory_if_all_samples_fit(model: LoadedModel, scores: dict[str, float]):
    scores["fkv"] = 0.1
    rows = protocol(model, kv=KVConfig(memory=20 * 256 * 256)).run()

    assert rows[0].judged is not None
    assert rows[0].batch == 12


def test_memory_below_one_row_raises(model: LoadedModel):
    with pytest.raises(ConfigError, match="does not hold one row of 224 tokens"):
        protocol(model, kv=KVConfig(memory=100 * 256)).run()


def test_claims_and_table_match_hand_computation():
    def row(arm: str, batch: int, score: float, total_s: float, cap: int | None = None) -> PaperRow:
        found = Judged(
            task="t",
            arm=arm,
            batch=batch,
            score=score,
            samples=12,
            total_s=total_s,
            new_tokens=120,
            peak_bytes=2 << 20,
        )
        return PaperRow(arm=arm, label=arm.upper(), batch=batch, cap=cap, judged=found)

    rows = [
        PaperRow(arm="ed_2", label="ED_2", batch=5),
        row("ed_2", 4, 0.0, 4.0),
        row("fkv", 4, 0.4, 6.0),
        row("bm_128", 8, 0.39, 2.0, 128),
        row("bm_256", 6, 0.41, 3.0, 256),
        row("bm_64", 12, 0.1, 1.0, 64),
    ]

    made = claims(CONFIG, rows)
    [table] = paper_result(CONFIG, rows, "rouge-2").tables

    assert made == {
        "fkv_score": 0.4,
        "fkv_tokens_per_s": 20.0,
        "ed_tokens_per_s": 30.0,
        "ed_batch": 4,
        "bm_above_cap": 256,
        "bm_above_batch": 6,
        "bm_above_tokens_per_s": 40.0,
        "bm_above_over_ed_throughput": 40 / 30,
        "bm_above_over_fkv_throughput": 2.0,
        "bm_above_quality_over_fkv": pytest.approx(0.41 / 0.4),
        "bm_near_cap": 128,
        "bm_near_batch": 8,
        "bm_near_tokens_per_s": 60.0,
        "bm_near_over_ed_throughput": 2.0,
        "bm_near_over_fkv_throughput": 3.0,
        "bm_near_quality_over_fkv": pytest.approx(0.39 / 0.4),
    }
    assert table.rows[0] == ("ED_2", 5, None, "OOM", "OOM", None)
    assert table.rows[3] == ("BM_128", 8, 128, 0.39, 60.0, 2.0)


def test_every_above_smallest_cap_raises():
    with pytest.raises(ConfigError, match="every below 16"):
        replace(CONFIG, every=16)
    with pytest.raises(ConfigError, match="samples of 1 or more"):
        replace(CONFIG, samples=0)
