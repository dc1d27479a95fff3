"""The eviction benchmark: rules, stored cells, computation on given values, small runs."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.graded_prompts import GradedPrompt
from benchmarks.common.intervals import wilson
from benchmarks.eviction import cost
from benchmarks.eviction.config import (
    CellsConfig,
    CostConfig,
    EvictionBenchConfig,
    PerplexityConfig,
    RetainedConfig,
)
from benchmarks.eviction.cost import READY_ARMS, StepCost, ready_claims
from benchmarks.eviction.quality import cell_keys, quality_result
from benchmarks.eviction.quality import claims as quality_claims
from benchmarks.eviction.texts import (
    RuleTexts,
    agreement,
    binned,
    retained_positions,
    run_perplexity,
    run_retained,
)
from benchmarks.eviction.texts import claims as perplexity_claims
from benchmarks.quality.cells import Cell, CellFile, CellKey, Judge, Material
from benchmarks.quality.rules import DEFAULT_RULES, Rule, rules_of
from benchmarks.quality.texts import RunningText, cut_texts
from quire.errors import ConfigError, UnknownName
from quire.evals.tasks.words import book_text
from quire.models.loader import LoadedModel, load_model
from quire.policies.registry import FULL
from support.engines import load

BOOKS = RunningText(text=book_text(), start="<|doc|>", name="books")


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model("quire-tiny", verify=False)


# ---- rules ---------------------------------------------------------------------------------------


def test_rules_parse_with_and_without_options():
    assert rules_of("") == tuple(map(Rule, DEFAULT_RULES))
    assert rules_of("h2o, recent") == (Rule("h2o"), Rule("recent"))
    assert rules_of("snapkv:window=16,kernel=3; h2o") == (
        Rule("snapkv:window=16,kernel=3"),
        Rule("h2o"),
    )


def test_rule_builds_the_evict_value():
    rule = Rule("snapkv:window=16")

    assert rule.evict(128, 8, "decode") == "snapkv:cap=128,every=8,when=decode,window=16"
    assert rule.name == "snapkv_window_16"


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("h2p", UnknownName, "h2o"),
        ("snapkv:windw=3", UnknownName, "window"),
        ("h2o,h2o", ConfigError, "once"),
        ("full,h2o", ConfigError, "which always runs"),
    ],
)
def test_invalid_rules_raise(text: str, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        rules_of(text)


def test_cap_below_protected_tokens_raises_before_a_run():
    config = CellsConfig(rules=(Rule("sinks:sinks=40"),), budgets=(0.1,), tokens=200, every=4)

    with pytest.raises(ConfigError, match="cap 20"):
        list(cell_keys(config, "m", None))


# ---- intervals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hits", "n", "low", "high"),
    [
        # z^2 = 3.8415: (0.5 + 0.19207 -+ 1.96 sqrt(0.025 + 0.0096036)) / 1.38415 for 5 of 10
        (5, 10, 0.23659, 0.76341),
        (0, 10, 0.0, 3.8415 / (10 + 3.8415)),
        (200, 200, 200 / (200 + 3.8415), 1.0),
    ],
)
def test_wilson_interval_matches_hand_computation(hits: int, n: int, low: float, high: float):
    assert wilson(hits, n) == pytest.approx((low, high), abs=1e-5)


# ---- cells ---------------------------------------------------------------------------------------


def cell(task: str, rule: str, hits: int, *, when: str = "decode", budget: float = 0.5) -> Cell:
    key = CellKey(
        model="m",
        task=task,
        tokens=100,
        prompts=10,
        rule=rule,
        when="" if rule == FULL else when,
        budget=1.0 if rule == FULL else budget,
        evict=f"{rule}:cap=50",
        commit="abc",
    )
    request_bytes = 4000.0 if rule == FULL else 1000.0
    return Cell(
        key=key, hits=hits, old_hits=1, old_prompts=4, request_bytes=request_bytes, seconds=1.0
    )


def unused(*_: object) -> None:
    raise AssertionError("not used here")


def test_cell_keys_cover_full_kv_and_all_rules_budgets_and_schedules():
    config = CellsConfig(
        rules=(Rule("h2o"), Rule("recent")),
        budgets=(0.5, 0.25),
        tasks=("lines", "kv"),
        schedules=("prefill_end", "decode"),
        every=4,
    )

    keys = list(cell_keys(config, "m", "abc"))

    assert len(keys) == len(set(keys)) == 2 * (1 + 2 * 2 * 2)
    assert keys[0].evict == "full"
    assert keys[1].evict == "h2o:cap=256,every=4,when=prefill_end"


def test_stored_cells_do_not_run_again(tmp_path: Path):
    """The second run has the first cell; a cell with an incomplete line runs again."""
    first, second, third = (cell("a", "h2o", 3), cell("b", "h2o", 4), cell("c", "h2o", 5))
    store = CellFile(tmp_path / "cells.jsonl")
    store.add(first)
    with (tmp_path / "cells.jsonl").open("a") as file:
        file.write(json.dumps(second.to_json())[:40] + "\n")

    requested: list[CellKey] = []
    shown: list[Cell] = []

    def run_cell(key: CellKey) -> Cell:
        requested.append(key)
        return {second.key: second, third.key: third}[key]

    material = Material(
        load=unused,
        prompt_maker_for=unused,
        running_for=unused,
        stored=store,
        commit=None,
        show=shown.append,
    )

    found = list(material.cells(run_cell, [first.key, second.key, third.key]))

    assert found == [first, second, third]
    assert requested == [second.key, third.key]
    assert shown == [second, third]
    assert set(store.read().values()) == {first, second, third}
    assert CellFile(None).read() == {}


def test_cell_of_another_commit_is_not_reused(tmp_path: Path):
    store = CellFile(tmp_path / "cells.jsonl")
    store.add(cell("a", "h2o", 3))

    assert replace(cell("a", "h2o", 3).key, commit="def") not in store.read()


def test_quality_claims_match_hand_computation():
    config = CellsConfig(
        rules=(Rule("h2o"),), budgets=(0.5,), tasks=("a", "b"), schedules=("decode",)
    )
    cells = [cell("a", FULL, 10), cell("a", "h2o", 5), cell("b", FULL, 8), cell("b", "h2o", 2)]

    assert quality_claims(config, cells) == {
        "decode_50_h2o_quality": 0.35,
        "decode_50_h2o_bytes_over_full": 0.25,
        "full_quality": 0.9,
    }


def test_cell_counts_hits_and_old_hits(tiny: LoadedModel):
    """The test uses graders that always or never agree, so the model's quality does not matter."""

    def make_prompts(task: str, tokens: int, n: int) -> list[GradedPrompt]:
        grades = [1.0, 0.0, 1.0, 1.0]
        depths = [0.0, 0.25, 0.5, None]
        return [
            GradedPrompt(
                prompt="<|doc|>" + "word " * 60,
                grade=lambda text, grade=grade: grade,
                answer=" word",
                depth=depth,
            )
            for grade, depth in zip(grades, depths, strict=True)
        ]

    config = CellsConfig(
        rules=(Rule("recent"),),
        budgets=(0.25,),
        tasks=("t",),
        schedules=("prefill_and_decode",),
        tokens=128,
        prompts=4,
        every=4,
        rows=2,
    )
    keys = list(cell_keys(config, "m", None))

    judge = Judge(tiny, config.rows, make_prompts)

    result = quality_result(config, [judge.cell(key) for key in keys])

    full, recent = result.raw["cells"]
    assert (full["hits"], full["old_hits"], full["old_prompts"]) == (3, 1, 2)
    assert full["share"] == 0.75
    assert full["interval"] == pytest.approx(list(wilson(3, 4)))
    # 32 slots in 2 pages of 16 of 8 layers: 4 heads of 32 numbers of K and V, and a position
    assert recent["request_bytes"] == 2 * 16 * 8 * (4 * 32 * 2 * 2 + 4)
    assert recent["request_bytes"] < full["request_bytes"]
    assert result.claims["prefill_and_decode_25_recent_quality"] == 0.75


# ---- perplexity ----------------------------------------------------------------------------------


def test_perplexity_averages_over_all_scored_tokens():
    full = RuleTexts(rule=FULL, nats=(1.0, 3.0), request_bytes=400)
    other = RuleTexts(rule="h2o", nats=(1.5, 3.5), request_bytes=100)
    worse = RuleTexts(rule="recent", nats=(2.0, 5.0), request_bytes=100)

    made = perplexity_claims([full, other])

    assert made["perplexity_full"] == math.exp(2.0)
    assert made["perplexity_h2o"] == math.exp(2.5)
    assert made["perplexity_h2o_over_full"] == pytest.approx(math.exp(0.5))
    assert made["perplexity_h2o_bytes_over_full"] == 0.25
    assert other.nats_over(full) == (0.5, 0.0)
    assert worse.nats_over(full) == (1.5, pytest.approx(math.sqrt(0.5) / math.sqrt(2)))
    assert RuleTexts(rule="h2o", nats=(2.0,), request_bytes=1).nats_over(
        RuleTexts(rule=FULL, nats=(1.0,), request_bytes=1)
    ) == (1.0, 0.0)


def test_texts_are_consecutive_and_start_with_the_document_token(tiny: LoadedModel):
    [first, second] = cut_texts(tiny, BOOKS, 64, 2)

    assert len(first) == len(second) == 64
    assert first[0] == second[0] == tiny.tokenizer.convert_tokens_to_ids("<|doc|>")
    whole = tiny.tokenizer(BOOKS.text, verbose=False).input_ids
    assert first[1:] + second[1:] == whole[:126]


def test_short_text_raises(tiny: LoadedModel):
    short = RunningText(text="a few words", start="", name="the file x")

    with pytest.raises(ConfigError, match="the file x has"):
        cut_texts(tiny, short, 64, 1)


def test_capped_texts_use_less_kv_and_are_scored_after_the_cap(tiny: LoadedModel):
    config = PerplexityConfig(
        rules=(Rule("recent"), Rule("sinks")), tokens=160, texts=2, budget=0.3, every=8, rows=2
    )

    result = run_perplexity(tiny, config, BOOKS)

    full, recent, sinks = result.raw["rules"]
    assert full["rule"] == FULL
    assert recent["request_bytes"] == sinks["request_bytes"] < full["request_bytes"]
    assert all(2 < nats < 7 for found in (full, recent, sinks) for nats in found["nats"])
    assert full["nats"] != recent["nats"] != sinks["nats"]


def test_article_rules_match_the_article():
    """Full, random, recent, sinks, h2o and h2o with sinks, at a quarter of the tokens."""
    config = EvictionBenchConfig().perplexity

    assert [rule.text for rule in config.rules] == ["random", "recent", "sinks", "h2o", "h2o_sinks"]
    assert config.budget == 0.25


# ---- retained positions --------------------------------------------------------------------------


def test_retained_fractions_match_hand_computation():
    retained = np.zeros((2, 2, 4), dtype=bool)  # 2 texts, 2 lanes, 4 positions
    retained[0, 0, 0] = retained[1, 0, 0] = retained[0, 0, 3] = True
    retained[:, 1, 2:] = True

    assert binned(retained, 2).tolist() == [[0.5, 0.25], [0.0, 1.0]]


def test_head_agreement_matches_hand_computation():
    """Head 0 retains {0, 1}, head 1 {1, 2}: 1 of 3. The other layer agrees fully: (1/3 + 1) / 2."""
    retained = np.zeros((1, 4, 3), dtype=bool)
    retained[0, 0, [0, 1]] = True
    retained[0, 1, [1, 2]] = True
    retained[0, 2:, 0] = True

    assert agreement(retained, 2) == pytest.approx((1 / 3 + 1) / 2)
    assert agreement(retained, 1) == 1.0


def test_recent_retains_newest_and_sinks_also_first_tokens(tiny: LoadedModel):
    config = RetainedConfig(
        rules=(Rule("recent"), Rule("sinks")), tokens=96, texts=1, budget=0.5, every=8, bins=12
    )

    result = run_retained(tiny, config, BOOKS)

    panels = result.maps[0].panels
    assert len(panels["recent"]) == tiny.spec.num_layers * tiny.spec.num_kv_heads
    for row in panels["recent"]:
        assert row == (0.0,) * 6 + (1.0,) * 6
    for row in panels["sinks"]:
        assert row == (0.5,) + (0.0,) * 5 + (0.5,) + (1.0,) * 5
    assert result.claims["kept_recent_head_agreement"] == 1.0


def test_sliding_window_layers_have_no_retained_lanes():
    """Two of gemma2's four layers have lanes; sliding-window layers have none."""
    model = load("gemma2")
    config = RetainedConfig(tokens=64, texts=1, budget=0.5, every=8)
    prompt = [3 + i * i % 60 for i in range(64)]

    for rule in ("recent", "h2o"):  # one set per layer, and one per head
        assert retained_positions(model, config, [prompt], Rule(rule)).shape == (1, 4, 64)


# ---- cost ----------------------------------------------------------------------------------------


def test_cost_claims_match_hand_computation():
    def found(**arms: tuple[float, float]) -> dict[str, StepCost]:
        return {
            a: StepCost(arm=a, step_s=s, schedule_s=p, cpu_s=2 * s) for a, (s, p) in arms.items()
        }

    rounds = [
        found(
            full=(10.0, 1.0),
            again=(9.9, 1.0),
            recent=(10.0, 2.0),
            rule=(12.5, 1.5),
            h2o=(11.0, 1.5),
            pressure_recent=(10.05, 1.0),
            pressure_rule=(10.5, 1.0),
        )
    ]

    assert cost.claims(rounds) == {
        "cost_h2o": pytest.approx(0.1),
        "eviction_cost_share": 0.04,
        "statistics_cost_share": pytest.approx(11 / 8 - 1),
        "pressure_recent_cost": pytest.approx(0.005),
        "pressure_rule_cost": pytest.approx(0.05),
        "equal_arms_difference": pytest.approx(-0.01),
    }


def test_cost_arms_decode_equally_many_steps():
    others = (Rule("sinks"),)
    config = CostConfig(model="tiny", others=others, cap=32, every=4, rows=2, repeats=1)

    [found] = cost.measure_cost(config)

    assert list(found) == [
        "full",
        "again",
        "recent",
        "rule",
        "sinks",
        "pressure_recent",
        "pressure_rule",
    ]
    for one in found.values():
        assert 0 < one.schedule_s < one.step_s
    assert cost.run_cost(config).tables[0].rows[3][0] == (
        "average:cap=32,every=4,when=prefill_and_decode"
    )


def test_ready_claims_are_median_differences_per_layer():
    """Steps of 10 and 10.4, 10 and 10.8, 10 and 14 ms in 4 layers: 0.8 / 4 ms are 200 us."""

    def found(full_ms: float, ready_ms: float) -> dict[str, StepCost]:
        times = {"full": full_ms, "again": full_ms, "pressure_recent": ready_ms}
        return {
            a: StepCost(arm=a, step_s=ms / 1e3, schedule_s=0.0, cpu_s=0.0)
            for a, ms in times.items()
        }

    rounds = [found(10, 10.4), found(10, 10.8), found(10, 14)]

    assert ready_claims(rounds, 4) == {
        "ready_layer_us": pytest.approx(200),
        "ready_equal_layer_us": 0,
    }


def test_only_requested_arms_are_timed():
    [found] = cost.measure_cost(
        CostConfig(model="tiny", others=(), cap=8, every=2, rows=1, repeats=1), READY_ARMS
    )

    assert tuple(found) == READY_ARMS


def test_full_size_config_matches_the_claims():
    config = EvictionBenchConfig()

    assert config.quality.prompts >= 200
    assert config.quality.budgets == (0.5, 0.25)
    assert (config.cost.cap, config.cost.every, config.cost.rows) == (1_024, 64, 32)
    assert json.dumps(asdict(config))
