"""The KVCrush benchmark: arms, gains on given values, small runs of every part."""

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest
import torch

from benchmarks.common.graded_prompts import prompt_maker_for
from benchmarks.common.intervals import bootstrap_mean
from benchmarks.common.rouge import rouge_l
from benchmarks.kvcrush import overhead
from benchmarks.kvcrush.arms import Arm, around, by_page, by_token, crushed, with_options
from benchmarks.kvcrush.config import (
    QUICK_KVCRUSH,
    FidelityConfig,
    KVCrushBenchConfig,
    OverheadConfig,
    QualityConfig,
)
from benchmarks.kvcrush.fidelity import arms_of, run_fidelity
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
from benchmarks.kvcrush.quality import (
    ArmTable,
    ManyRules,
    Results,
    claimed_tables,
    claims,
    gain_of,
    heads_table,
    key_of,
    keys,
    quality_result,
)
from benchmarks.quality.cells import Cell, CellKey, Judge
from benchmarks.quality.rules import Rule
from benchmarks.quality.texts import RunningText, divergence
from quire.errors import InvariantError
from quire.evals.tasks.words import book_text
from quire.models.loader import LoadedModel, load_model
from quire.policies.eviction import LaneShape, make_eviction
from quire.policies.kvcrush import KVCrush
from quire.policies.registry import FULL

BOOKS = RunningText(text=book_text(), start="<|doc|>", name="books")
FULL_RUN = KVCrushBenchConfig()


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model("quire-tiny", verify=False)


def arms_in(*tables: ArmTable) -> dict[Arm, None]:
    return dict.fromkeys(arm for table in tables for row in table.rows for arm in row.arms)


# ---- arms ----------------------------------------------------------------------------------------


def test_rules_nest_as_bases():
    base = Rule("snapkv:window=16")

    assert with_options(Rule("h2o"), "", "granularity=page").text == "h2o:granularity=page"
    assert with_options(base).text == base.text
    assert crushed(base, 0.25).text == "kvcrush:base=(snapkv:window=16),share=0.25"
    assert around("kmeans", base, "on=keys").text == "kmeans:base=(snapkv:window=16),on=keys"


@pytest.mark.parametrize("config", [FULL_RUN.quality, FULL_RUN.heads, QUICK_KVCRUSH.quality])
def test_cell_keys_are_unique_and_all_rules_are_valid(config: QualityConfig):
    arms = arms_in(*claimed_tables(config), heads_table(config))
    found = keys(config, arms, "m", None)

    assert len(found) == len(set(found)) == len(config.tasks) * (len(arms) + 1)
    assert [key.rule for key in found].count(FULL) == len(config.tasks)
    for key in found[: len(arms) + 1]:
        lanes = LaneShape(num_layers=8, heads=4, page_tokens=key.page_tokens, page_bytes=1)
        make_eviction(key.evict).for_request(config.tokens - 10, lanes)


def test_compared_arms_retain_equally_many_tokens():
    """The cap of OpenVINO's form is lowered by the tokens that it adds."""
    config = QualityConfig()
    caps = Counter(
        make_eviction(arm.rule.evict(arm.cap, config.every, arm.when))
        .for_request(500, LaneShape(num_layers=8, heads=4, page_tokens=8, page_bytes=1))
        .spec.cap
        for one in (*by_token(config), *by_page(config))
        for arm in (one.alone, one.one_set, *one.forms)
    )

    assert caps == {128: 5 * 3 + 4 * 4}


def test_full_size_config_matches_the_claims():
    config = KVCrushBenchConfig()
    cost = config.overhead

    assert [base.text for base in config.quality.bases] == [
        *("h2o", "average", "snapkv", "expected_attention")
    ]
    assert (config.long.first, config.long.share, config.long.pyramid) == (
        2048,
        0.25,
        Rule("snapkv"),
    )
    assert [one.crushing.rule.text for one in arms_of(config.long)] == [
        "kvcrush:base=(h2o),share=0.25",
        "kvcrush:base=(snapkv),share=0.25",
        "kvcrush:base=(snapkv),share=0.25,budget=pyramid",
    ]
    assert (cost.model, cost.rows, cost.prompt_tokens, cost.new_tokens) == ("125m", 16, 1024, 512)
    assert (cost.cap, cost.every, cost.dtype) == (672, 64, "bfloat16")
    assert json.dumps(asdict(config))


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
    return {task: cell(key_of(config, None, task, "m", None), o) for task, o in outcomes.items()}


def test_gain_matches_hand_computation():
    """Task a gains 1 of 4 with each rule, task b loses 1 of 4 with one rule: 1/4, -1/8."""
    config = QualityConfig(prompts=4)
    one = by_task(config, a="0011", b="1100"), by_task(config, a="0111", b="1000")
    other = by_task(config, a="0000", b="1111"), by_task(config, a="0100", b="1111")

    found = gain_of([one, other])

    assert found.mean == pytest.approx((1 / 4 - 1 / 8) / 2)
    assert found.low < found.mean < found.high


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

    tables, heads = claimed_tables(config), heads_table(config)
    cells = [made(key) for key in keys(config, arms_in(*tables, heads), "m", None)]
    results = Results(config, cells, "m", None)
    found = claims(results, tables)

    assert found["full_quality"] == 1.0
    assert found["quality_gain_mean"] == found["page_gain_mean"] == 0.25
    assert found["quality_gain_h2o_mean"] == found["openvino_gain_mean"] == 0.25
    assert found["quality_gain_one_set_mean"] == found["openvino_gain_one_set_mean"] == 0.5
    assert found["one_set_gain_mean"] == -0.25
    assert found["quality_gain_low"] <= 0.25 <= found["quality_gain_high"]
    assert found["quality_over_full_h2o"] == 0.5
    assert found["quality_over_full_best"] == 0.75
    of_heads = claims(results, (heads,))
    assert of_heads["heads_quality_gain_25_mean"] == 0.25
    assert of_heads["heads_rules_not_below_50"] == 5


# ---- quality -------------------------------------------------------------------------------------

SMALL = QualityConfig(
    bases=(Rule("h2o"),),
    pyramid=Rule("h2o"),
    tasks=("lines",),
    tokens=128,
    prompts=3,
    budget=0.5,
    heads_budgets=(0.5,),
    page_tokens=4,
    every=4,
    rows=2,
)


@pytest.mark.slow
def test_prompt_is_prefilled_once_for_rules_with_equal_statistics(tiny: LoadedModel):
    """Outputs equal those of separate runs; the second rule of a kind prefills a block or two."""
    tables = (*claimed_tables(SMALL), heads_table(SMALL))
    wanted = keys(SMALL, arms_in(*tables), "m", None)
    make_prompts = prompt_maker_for(tiny)
    once = ManyRules(tiny, SMALL, make_prompts, [key.rule for key in wanted])
    separate = Judge(tiny, SMALL.rows, make_prompts)
    processed: dict[str, int] = {}
    cells = []

    for key in wanted:
        cells.append(once.cell(key))
        assert cells[-1].outcomes == separate.cell(key).outcomes
        processed[key.evict] = once.num_processed_tokens - sum(processed.values())

    crushing = [n for evict, n in processed.items() if evict.startswith("kvcrush:")]
    assert max(crushing) > 3 * 60
    assert sum(crushing) < 3 * max(crushing)
    result = quality_result(Results(SMALL, cells, "m", None), tables)
    assert [table.name for table in result.tables] == [
        *("kvcrush-bases", "kvcrush-pages", "kvcrush-heads")
    ]
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
        bases=(Rule("h2o"),), tokens=128, texts=2, new_tokens=8, first=32, every=4, page_tokens=4
    )

    little = run_fidelity(tiny, config, BOOKS, rouge_l)
    nearly = run_fidelity(tiny, replace(config, first=115), BOOKS, rouge_l)

    rules = little.raw["rules"]
    assert [len(one["kl"]) for one in rules] == [2] * 4
    assert len({one["kl"] for one in rules}) == 4
    for kind in ("h2o", "kvcrush_base_h2o_share_0_25"):
        name = f"fidelity_{kind}"
        assert 0 < nearly.claims[f"{name}_kl"] < little.claims[f"{name}_kl"] < 2
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
        first=40,
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
        added = {SCORING, SIGNATURES, REPRESENTATIVES} if name != overhead.ALONE else set()
        assert there == {SELECTION, COMPACTION} | added
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
        "kmeans_overhead_fraction": 0.5,
    }
