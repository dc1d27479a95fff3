"""The KVCrush benchmark: arms, gains on given values, small runs of every part."""

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from benchmarks.common.graded_prompts import GradedPrompt, prompt_maker_for
from benchmarks.common.intervals import bootstrap_mean
from benchmarks.common.rouge import rouge_l
from benchmarks.eviction.cells import FULL, Cell, CellFile, CellKey
from benchmarks.eviction.quality import Judge
from benchmarks.eviction.rules import Rule
from benchmarks.eviction.texts import RunningText, cut_texts
from benchmarks.kvcrush import overhead, signature_bytes
from benchmarks.kvcrush.arm_tables import TABLES, keys, tables
from benchmarks.kvcrush.arms import around, by_page, by_token, crushed, full_key, with_options
from benchmarks.kvcrush.config import (
    QUICK_KVCRUSH,
    FidelityConfig,
    KVCrushBenchConfig,
    OverheadConfig,
    PaperConfig,
    PromptsConfig,
    QualityConfig,
)
from benchmarks.kvcrush.fidelity import compared, run_fidelity
from benchmarks.kvcrush.gains import gain_of
from benchmarks.kvcrush.judging import ManyRules
from benchmarks.kvcrush.overhead import (
    COMPACTION,
    PHASES,
    REPRESENTATIVES,
    SCORING,
    SELECTION,
    SIGNATURES,
    Run,
    Stopwatch,
    timed_rules,
)
from benchmarks.kvcrush.prompts import Recorded, run_prompts
from benchmarks.kvcrush.quality import Results, claims, run_quality
from benchmarks.kvcrush.recorded import recorded
from benchmarks.kvcrush.text_scores import divergence
from quire.errors import ConfigError, InvariantError
from quire.evals.tasks.words import book_text
from quire.models.loader import LoadedModel, load_model
from quire.policies.eviction import make_eviction
from quire.policies.kvcrush import KVCrush
from quire.policies.lane_shape import LaneShape

BOOKS = RunningText(text=book_text(), start="<|doc|>", name="books")


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model("quire-tiny", verify=False)


# ---- arms ----------------------------------------------------------------------------------------


def test_rules_nest_as_bases():
    base = Rule("snapkv:window=16")

    assert with_options(Rule("h2o"), "", "granularity=page").text == "h2o:granularity=page"
    assert with_options(base).text == base.text
    assert crushed(base, 0.25).text == "kvcrush:base=(snapkv:window=16),share=0.25"
    assert around("kmeans", base, "on=keys").text == "kmeans:base=(snapkv:window=16),on=keys"


FULL_RUN = KVCrushBenchConfig()


@pytest.mark.parametrize(
    "config", [FULL_RUN.quality, FULL_RUN.sweeps, QUICK_KVCRUSH.quality, QUICK_KVCRUSH.sweeps]
)
def test_cell_keys_are_unique_and_all_rules_are_valid(config: QualityConfig):
    """One change at a time gives some dozens of arms; all combinations would be thousands."""
    found = keys(config, "m", None)

    assert len(found) == len(set(found))
    assert Counter(key.task for key in found) == dict.fromkeys(
        config.tasks, len(found) // len(config.tasks)
    )
    assert 5 < len(found) / len(config.tasks) < 95
    assert [key.rule for key in found].count(FULL) == len(config.tasks)
    for key in found[: len(found) // len(config.tasks)]:
        lanes = LaneShape(num_layers=8, heads=4, page_tokens=key.page_tokens, page_bytes=1)
        make_eviction(key.evict).for_request(config.tokens - 10, lanes)


def test_compared_arms_retain_equally_many_tokens():
    """The cap of OpenVINO's form is lowered by the tokens that it adds."""
    config = QualityConfig()
    arms = [
        arm
        for one in (*by_token(config), *by_page(config))
        for arm in (one.alone, one.one_set, one.crushing, one.openvino)
        if arm is not None
    ]

    caps = []
    for arm in arms:
        lanes = LaneShape(num_layers=8, heads=4, page_tokens=config.page_tokens, page_bytes=1)
        rule = make_eviction(arm.rule.evict(arm.cap, config.every, arm.when))
        caps.append(rule.for_request(500, lanes).spec.cap)

    assert set(caps) == {128}
    assert len(arms) == 5 * 3 + 4 * 4


def test_paper_config_divides_the_papers_table():
    paper = PaperConfig()

    assert (paper.cap, paper.scaled(paper.page_tokens)) == (168, 8)
    assert PaperConfig(divisor=1).cap == 672
    assert [PaperConfig.for_prompts(n).divisor for n in (9_999, 2_048, 2_047, 512, 1)] == [
        *(1, 1, 2, 4, 32)
    ]
    [table] = tables(QualityConfig(tables=("paper",)))
    assert len(table.rows) == 2 + 2 * 3
    assert {row.arm.cap for row in table.rows} == {168}
    with pytest.raises(ConfigError, match="divisor of 32"):
        PaperConfig(divisor=5)


def test_additive_representatives_are_compared_with_an_equal_cap():
    """h2o protects half of the cap: 128, and a quarter of the 128 above its smallest cap."""
    config = QualityConfig(tables=("additive",), swept=(Rule("h2o"),))
    [table] = tables(config)
    small, large, shared, inside, added = (row.arm for row in table.rows)

    assert (small.cap, small.tokens, added.cap, added.tokens) == (128, 128, 128, 160)
    assert {arm.cap for arm in (large, shared, inside)} == {160}
    assert (table.rows[-1].against, table.rows[-1].one_set) == (large, shared)


def test_each_gain_compares_rules_that_differ_only_in_kvcrush():
    """An arm and the arm it is compared with differ only in KVCrush."""
    for table in tables(KVCrushBenchConfig().sweeps):
        for row in table.rows:
            if row.one_set is not None:
                assert row.against is not None
                assert "share=0" in row.one_set.rule.text
                assert row.against.cap == row.one_set.cap == row.arm.tokens
                assert row.against.when == row.one_set.when == row.arm.when


def test_stored_signatures_run_with_repeated_evictions():
    """For one eviction after a prompt, stored signatures would make no difference."""
    arms = [row.arm for table in tables(FULL_RUN.sweeps) for row in table.rows]
    stored = [arm for arm in arms if "signatures=stored" in arm.rule.text]

    assert [arm.when for arm in stored] == ["prefill_and_decode"]


def test_full_size_config_matches_the_claims():
    config = KVCrushBenchConfig()
    quality, sweeps, cost = config.quality, config.sweeps, config.overhead

    assert {base.text for base in quality.bases} == {
        *("h2o", "average", "snapkv", "expected_attention")
    }
    assert (sweeps.shares[0], sweeps.shares[-1], sweeps.share) == (0.0, 0.9, 0.25)
    assert (sweeps.several, sweeps.chunk_tokens, sweeps.budget) == ((2, 4, 8), 8, 0.25)
    assert {*quality.tables, *config.heads.tables, *sweeps.tables} == set(TABLES)
    assert (config.long.cap, config.long.share, config.long.pyramid) == (2048, 0.25, Rule("snapkv"))
    assert [one.crushing.rule.text for one in compared(config.long)] == [
        "kvcrush:base=(h2o),share=0.25",
        "kvcrush:base=(snapkv),share=0.25",
        "kvcrush:base=(snapkv),share=0.25,budget=pyramid",
    ]
    assert (config.prompts.paper.cap, config.prompts.paper.page_tokens) == (672, 32)
    assert (cost.model, cost.rows, cost.prompt_tokens, cost.new_tokens) == ("125m", 16, 1024, 512)
    assert (cost.cap, cost.every, cost.dtype) == (672, 64, "bfloat16")
    assert json.dumps(asdict(config))
    assert QUICK_KVCRUSH.quality.prompts < quality.prompts


# ---- gains ---------------------------------------------------------------------------------------


def cell(key: CellKey, outcomes: str) -> Cell:
    return Cell(
        key=key,
        hits=outcomes.count("1"),
        old_hits=0,
        old_prompts=0,
        request_bytes=1024.0,
        seconds=1.0,
        outcomes=outcomes,
    )


def by_task(config: QualityConfig, **outcomes: str) -> dict[str, Cell]:
    return {task: cell(full_key(config, task, "m", None), o) for task, o in outcomes.items()}


def test_gain_matches_hand_computation():
    """Task a gains 1 of 4 with each rule, task b loses 1 of 4 with one rule: 1/4, -1/8."""
    config = QualityConfig(prompts=4)
    one = by_task(config, a="0011", b="1100"), by_task(config, a="0111", b="1000")
    other = by_task(config, a="0000", b="1111"), by_task(config, a="0100", b="1111")

    found = gain_of([one, other])

    assert found.mean == pytest.approx((1 / 4 - 1 / 8) / 2)
    assert found.low <= found.prompts_low < found.mean < found.prompts_high <= found.high


def test_missing_outcomes_raise():
    config = QualityConfig(prompts=4)

    with pytest.raises(InvariantError, match="each of 4 prompts"):
        gain_of([(by_task(config, a="0011"), by_task(config, a=""))])


def test_bootstrap_interval_matches_the_normal_interval():
    """200 numbers of variance 1/4: 1.96 * 0.5 / sqrt(200) = 0.0693 on both sides of 1/2."""
    low, high = bootstrap_mean([[0.0, 1.0] * 100], groups_too=False, resamples=20_000)

    assert (low, high) == pytest.approx((0.5 - 0.0693, 0.5 + 0.0693), abs=0.006)


def test_bootstrap_resamples_groups_if_requested():
    """Without variance in groups: means of two draws of 0 and 1 are 0, 1/2, 1; both ends occur."""
    groups = [[0.0] * 50, [1.0] * 50]

    assert bootstrap_mean(groups, groups_too=False) == (0.5, 0.5)
    assert bootstrap_mean(groups, groups_too=True) == (0.0, 1.0)


@pytest.mark.parametrize("groups_too", [False, True])
def test_bootstrap_of_one_number_has_no_spread(groups_too: bool):
    assert bootstrap_mean([[0.25]], groups_too=groups_too) == (0.25, 0.25)


def test_bootstrap_of_one_group_equals_that_of_its_numbers():
    """Other groups are unknown: the interval is that of the group's numbers."""
    numbers = [0.0, 1.0] * 20

    assert bootstrap_mean([numbers], groups_too=True) == bootstrap_mean([numbers], groups_too=False)


def test_claims_match_hand_computation():
    """Base rules alone have two of four correct, one-set rules one, all others three."""
    config = QualityConfig(prompts=4, tasks=("a", "b"))
    alone = {one.alone.rule.text for one in (*by_token(config), *by_page(config))}
    shared = {one.one_set.rule.text for one in (*by_token(config), *by_page(config))}

    def made(key: CellKey) -> Cell:
        known = {FULL: "1111"} | dict.fromkeys(alone, "1100") | dict.fromkeys(shared, "1000")
        return cell(key, known.get(key.rule, "1110"))

    cells = [made(key) for key in keys(config, "m", None)]
    found = claims(Results(config, cells, "m", None))

    assert found["full_quality"] == 1.0
    assert found["quality_gain_mean"] == found["page_gain_mean"] == 0.25
    assert found["openvino_gain_mean"] == found["openvino_over_tokens_gain_mean"] == 0.25
    assert found["quality_gain_one_set_mean"] == found["openvino_gain_one_set_mean"] == 0.5
    assert found["one_set_gain_mean"] == -0.25
    assert found["quality_gain_h2o_mean"] == 0.25
    assert found["quality_gain_one_set_snapkv_budget_pyramid_mean"] == 0.5
    assert found["quality_gain_low"] <= 0.25 <= found["quality_gain_high"]
    assert found["quality_over_full_h2o"] == 0.5
    assert found["quality_over_full_best"] == 0.75


# ---- quality -------------------------------------------------------------------------------------

SMALL = QualityConfig(
    bases=(Rule("h2o"),),
    pyramid=Rule("h2o"),
    swept=(Rule("h2o"),),
    tasks=("lines",),
    tokens=128,
    prompts=2,
    budget=0.5,
    other_budgets=(0.4,),
    shares=(0.0, 0.25),
    anchors=("mean",),
    several=(2,),
    several_kinds=("farthest",),
    chunk_tokens=4,
    paper=PaperConfig(divisor=8),
    every=4,
    rows=2,
)
ALL_TABLES = tuple(TABLES)


def many_rules(model: LoadedModel, config: QualityConfig) -> ManyRules:
    rules = [key.rule for key in keys(config, "m", None)]
    return ManyRules(model, config, prompt_maker_for(model), rules)


@pytest.mark.slow
def test_prompt_is_prefilled_once_for_rules_with_equal_statistics(tiny: LoadedModel):
    """Outputs equal those of separate runs; the second rule of a kind prefills a block or two."""
    config = replace(SMALL, tables=("shares", "schedule"), prompts=3)
    once, separate = many_rules(tiny, config), Judge(tiny, config.cells, prompt_maker_for(tiny))
    processed: dict[str, int] = {}

    for key in keys(config, "m", None):
        cell = once.cell(key)
        assert cell.outcomes == separate.cell(key).outcomes
        assert once.num_processed_tokens > 0
        processed[key.evict] = once.num_processed_tokens - sum(processed.values())

    with_kvcrush = [n for evict, n in processed.items() if "kvcrush" in evict and "end" in evict]
    assert max(with_kvcrush) > 3 * 60
    assert sum(with_kvcrush) < 2 * max(with_kvcrush)
    assert processed["full"] > 3 * 60


@pytest.mark.slow
def test_cells_use_the_papers_pages_and_store_outcomes(tiny: LoadedModel):
    config = replace(SMALL, tables=ALL_TABLES)
    judge = many_rules(tiny, config)
    shown: list[Cell] = []

    result = run_quality(
        judge.cell, config, model="m", commit=None, stored=CellFile(None), show=shown.append
    )

    assert {len(one.outcomes) for one in shown} == {2}
    assert all(one.outcomes.count("1") == one.hits for one in shown)
    assert {one.key.page_tokens for one in shown} == {4}
    assert shown == [Cell.from_json(json.loads(json.dumps(one))) for one in result.raw["cells"]]
    assert [table.name for table in result.tables] == [f"kvcrush-{name}" for name in ALL_TABLES]
    assert {"quality_gain_mean", "openvino_gain_low", "quality_over_full_best"} <= set(
        result.claims
    )
    assert {"dynamic_share_gain_mean", "kmeans_gain_low"} <= set(result.claims)
    for table in result.tables:
        assert {len(row) for row in table.rows} == {len(table.columns)}


# ---- fidelity ------------------------------------------------------------------------------------


def test_divergence_matches_hand_computation():
    """p = (1/2, 1/2), q = (1/4, 3/4): KL = 1/2 log 2 + 1/2 log 2/3; the second row is equal."""
    full = torch.tensor([[0.5, 0.5], [0.25, 0.75]]).log()
    found = torch.tensor([[0.25, 0.75], [0.25, 0.75]]).log()

    kl, top_1 = divergence(full, found)

    assert kl == pytest.approx((math.log(2) + math.log(2 / 3)) / 4)
    assert top_1 == 0.5  # of two equal ones the first is the likeliest


@pytest.mark.slow
def test_rule_that_retains_nearly_all_is_close_to_full_kv(tiny: LoadedModel):
    config = FidelityConfig(
        bases=(Rule("h2o"),), tokens=128, texts=2, new_tokens=8, cap=32, every=4, page_tokens=4
    )

    little = run_fidelity(tiny, config, BOOKS, rouge_l)
    nearly = run_fidelity(tiny, replace(config, cap=115), BOOKS, rouge_l)

    rules = little.raw["rules"]
    assert [len(one["kl"]) for one in rules] == [2] * 4
    assert len({one["kl"] for one in rules}) == 4
    for kind in ("h2o", "kvcrush_base_h2o_share_0_25"):
        name = f"fidelity_{kind}"
        assert 0 < nearly.claims[f"{name}_kl"] < little.claims[f"{name}_kl"] < 2
        assert 0.5 < little.claims[f"{name}_top_1"] <= nearly.claims[f"{name}_top_1"] <= 1
        assert 0 <= little.claims[f"{name}_rouge_l"] <= 1
    kl = [little.claims[f"fidelity_{Rule(one['rule']).name}_kl"] for one in rules[:3]]
    assert little.claims["fidelity_kl_gain_mean"] == pytest.approx(kl[0] - kl[2])
    assert little.claims["fidelity_kl_gain_one_set_mean"] == pytest.approx(kl[1] - kl[2])
    [table] = little.tables
    assert {len(row) for row in table.rows} == {len(table.columns)}
    less = table.columns.index("KL less")
    assert table.rows[2][less] == pytest.approx(kl[0] - kl[2])
    assert table.rows[2][less + 1] == pytest.approx(kl[1] - kl[2])


@pytest.mark.slow
def test_pyramid_budget_is_compared_with_the_other_rules(tiny: LoadedModel):
    config = FidelityConfig(
        name="long",
        bases=(Rule("h2o"),),
        pyramid=Rule("h2o"),
        tokens=96,
        texts=1,
        new_tokens=4,
        cap=40,
        every=4,
        page_tokens=4,
        blocks=0,
    )

    result = run_fidelity(tiny, config, BOOKS, rouge_l)

    assert [row[0] for row in result.tables[0].rows] == [
        *("h2o", "kvcrush:base=(h2o),share=0", "kvcrush:base=(h2o),share=0.25"),
        "h2o:budget=pyramid",
        "kvcrush:base=(h2o),share=0,budget=pyramid",
        "kvcrush:base=(h2o),share=0.25,budget=pyramid",
    ]
    assert {"long_kl_gain_mean", "long_h2o_budget_pyramid_kl"} <= set(result.claims)


# ---- recorded prompts ----------------------------------------------------------------------------

SUMS = [{"question": f"What is {i} and {i}?", "answer": f"#### {i + i}"} for i in range(60)]


def test_recorded_prompts_have_as_many_shots_as_fit(tiny: LoadedModel, tmp_path: Path):
    path = tmp_path / "sums.jsonl"
    path.write_text("\n".join(json.dumps(one) for one in SUMS))
    config = PromptsConfig(tokens=160, prompts=3, new_tokens=4, paper=PaperConfig(divisor=8))

    [found] = recorded({"gsm8k": path}, tiny, config)

    assert len(found.prompts) == len(found.graded) == 3
    shots = [one.prompt.count("####") for one in found.graded]
    assert all(config.min_tokens < len(prompt) <= 160 for prompt in found.prompts)
    assert 2 < min(shots) <= max(shots) < 16
    assert found.graded[0].grade("nothing") == 0.0


def test_short_recorded_prompts_raise(tiny: LoadedModel, tmp_path: Path):
    path = tmp_path / "sums.jsonl"
    path.write_text("\n".join(json.dumps(one) for one in SUMS))

    with pytest.raises(
        ConfigError,
        match=r"expected 8 examples of gsm8k with prompts of more than 1008 tokens, got 0",
    ):
        recorded({"gsm8k": path}, tiny, PromptsConfig())
    with pytest.raises(ConfigError, match="--data gsm8k="):
        recorded({}, tiny, PromptsConfig())


@pytest.mark.slow
def test_paged_h2o_and_kvcrush_run_recorded_prompts(tiny: LoadedModel):
    """Pages of 4, a cap of 84 of 160 tokens; graders give 1 to the continuation of full KV."""
    config = PromptsConfig(
        tokens=160, prompts=2, new_tokens=4, paper=PaperConfig(divisor=8), anchors=("mean",)
    )
    prompts = tuple(cut_texts(tiny, BOOKS, 160, 2))
    requested = tuple(
        GradedPrompt(prompt="", grade=lambda text: float(bool(text))) for _ in prompts
    )
    own = Recorded(name="books", score="accuracy", prompts=prompts, graded=requested)

    result = run_prompts(tiny, config, [own], rouge_l)

    [table] = result.tables
    assert [row[0] for row in table.rows] == [
        *("H2O, one set per head", "H2O, one set per layer (the paper's)"),
        *("KVCrush 25/75, mean", "KVCrush 75/25, mean"),
    ]
    assert {len(row) for row in table.rows} == {len(table.columns)}
    assert {row[-1] for row in table.rows} == {1.0} == {result.claims["books_full_score"]}
    kl = [row[table.columns.index("KL")] for row in table.rows]
    assert len(set(kl)) == 4
    assert result.claims["books_kl_gain_mean"] == pytest.approx(kl[0] - (kl[2] + kl[3]) / 2)
    assert result.claims["books_kl_gain_one_set_mean"] == pytest.approx(kl[1] - (kl[2] + kl[3]) / 2)


# ---- overhead ------------------------------------------------------------------------------------


def ticking(*times: float) -> Iterator[float]:
    yield from times


def test_stopwatch_charges_the_innermost_phase():
    """Selection from 1 to 11, nested signatures from 3 to 7: six seconds and four."""
    times = ticking(1.0, 3.0, 7.0, 11.0)
    watch = Stopwatch(lambda: next(times))

    with watch.phase(SELECTION), watch.phase(SIGNATURES):
        pass

    assert watch.seconds[SELECTION] == 6.0
    assert watch.seconds[SIGNATURES] == 4.0


def test_timed_rules_restore_methods_after_a_failure():
    before = vars(KVCrush)["represent"]

    def failing() -> None:
        with timed_rules(Stopwatch()):
            assert vars(KVCrush)["represent"] is not before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert vars(KVCrush)["represent"] is before


def test_each_phase_takes_time_and_their_sum_is_below_the_run():
    config = OverheadConfig(model="tiny", rows=2, prompt_tokens=48, new_tokens=8, cap=32, every=4)

    runs = overhead.measure(config)

    for name, run in runs.items():
        there = {phase for phase in PHASES if run.seconds[phase] > 0}
        representing = {SIGNATURES, REPRESENTATIVES} if name != overhead.ALONE else set()
        assert there == {SCORING, SELECTION, COMPACTION} | representing
        assert 0 < run.fraction(*PHASES) < 1
    assert overhead.run_overhead(config).tables[0].rows[1][0] == "kvcrush"


def test_overhead_claims_match_hand_computation():
    def run(*seconds: int) -> Run:
        """Seconds of the phases in the order of `PHASES`; the run is 100 s."""
        by_phase = dict(zip(PHASES, map(float, seconds), strict=True))
        return Run(evict="", run_s=100.0, seconds=by_phase)

    found = overhead.claims(
        {
            "alone": run(1, 2, 0, 0, 3),
            "kvcrush": run(4, 2, 3, 5, 6),
            "heads": run(4, 2, 3, 7, 6),
            "kmeans": run(4, 2, 3, 45, 6),
        }
    )

    assert found == {
        "overhead_fraction": 0.1,
        "heads_overhead_fraction": 0.12,
        "added_overhead_fraction": 0.08,
        "heads_added_overhead_fraction": 0.1,
        "added_scoring_fraction": 0.03,
        "heads_added_scoring_fraction": 0.03,
        "signatures_fraction": 0.03,
        "representatives_fraction": 0.05,
        "selection_fraction": 0.02,
        "alone_selection_fraction": 0.02,
        "base_scoring_fraction": 0.04,
        "compaction_fraction": 0.06,
        "kmeans_overhead_fraction": 0.5,
        "kmeans_overhead_over_rest": 1.0,
    }


# ---- bytes ---------------------------------------------------------------------------------------


def test_signature_is_64_times_smaller_than_a_key():
    """32 query heads are 32 bits, a key of 128 16-bit elements 2,048; 8 KV heads have 8 keys."""
    assert signature_bytes.claims() == {
        "key_bits_over_signature_bits": 64,
        "all_keys_bits_over_signature_bits": 512,
    }
    [paper, *_] = signature_bytes.run_bytes().tables[0].rows
    assert paper == ("Llama-3-8B (paper)", 32, 2048, 64.0, 16384, 512.0, 8, 32)
