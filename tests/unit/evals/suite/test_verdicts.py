"""Verdicts need a passed sanity check and a task that full KV solves; cells are stored."""

import json
import re
from dataclasses import asdict

import pytest

from quire.config.kv_config import KVConfig
from quire.evals.suite import sanity
from quire.evals.suite.cells import CellFolder, CellResult, PromptResult
from quire.evals.suite.engines import full_kv, is_full, kv_name
from quire.evals.suite.registry import task_of
from quire.evals.suite.runner import compare
from quire.evals.suite.sanity import FAILED, NO_CASE, PASSED, SKIPPED, Sanity
from quire.evals.tasks import rough_measure

GOOD = Sanity(status=PASSED)
CASES = ["lines", "kv", "niah"]
SIZES = {"tasks": CASES, "measure": rough_measure, "context_tokens": 4096, "seed": 1}


def cell(values, metric="accuracy", arm="full", task="lines"):
    same = {"chance": 0.0, "prompt_tokens": 100, "output_tokens": 5, "output": "x"}
    prompts = tuple(
        PromptResult(
            scores={metric: value}, depth=(index % 5) / 4, kv_peak_bytes=1000 + index, **same
        )
        for index, value in enumerate(values)
    )
    return CellResult(task=task, tokens=256, arm=arm, prompts=prompts, seconds=2.0)


@pytest.mark.parametrize(
    ("zeros", "verdict"), [(10, "worse"), (0, "no difference found"), (1, "no difference found")]
)
def test_verdict_follows_from_the_interval_of_the_difference(zeros, verdict):
    values = [0.0] * zeros + [1.0] * (10 - zeros)
    found = compare(task_of("lines"), cell([1.0] * 10), cell(values), GOOD)
    assert (found.verdict, found.difference.mean) == (verdict, pytest.approx(-zeros / 10))


@pytest.mark.parametrize(("count", "verdict"), [(5, "none"), (6, "worse")])
def test_a_verdict_needs_six_prompts(count, verdict):
    full, found = cell([1.0] * count), cell([0.0] * count)
    nlls = cell([2.0] * count, "nll"), cell([3.0] * count, "nll")

    scored = compare(task_of("lines"), full, found, GOOD)
    measured = compare(task_of("perplexity"), *nlls, GOOD)

    assert (scored.verdict, measured.verdict) == (verdict, verdict)
    expected = "expected 6 prompts or more for a verdict, got 5: raise --num-prompts"
    assert scored.reason == measured.reason == (expected if count < 6 else "")
    assert full.means()["accuracy"].low < 1 == full.means()["accuracy"].high


def test_lower_perplexity_is_better_and_the_exponential_of_the_mean():
    means = cell([1.0, 3.0], "nll").means()
    assert list(means) == ["perplexity", "nll"]
    assert means["perplexity"].mean == pytest.approx(7.389056)
    assert means["perplexity"].low < means["perplexity"].mean < means["perplexity"].high
    found = compare(task_of("perplexity"), cell([2.0] * 9, "nll"), cell([1.0] * 9, "nll"), GOOD)

    assert (found.verdict, found.difference.mean) == ("better", -1.0)


@pytest.mark.parametrize("check", [SKIPPED, Sanity(status=FAILED, reason="lines at 256")])
def test_without_passed_sanity_check_there_is_no_verdict(check):
    found = compare(task_of("lines"), cell([1.0] * 10), cell([0.0] * 10), check)
    assert (found.verdict, found.difference.mean) == ("none", -1.0)
    assert found.reason == check.reason


def test_a_failed_task_of_the_check_takes_its_own_verdict_only():
    """SmolLM2 finds needles, but fails on lines: its verdicts about needles are given."""
    cases = (
        {"task": "lines", "tokens": 256, "full": 0.1, "evicted": 0.0, "passed": False},
        {"task": "niah", "tokens": 512, "full": 1.0, "evicted": 0.0, "passed": True},
    )
    check = Sanity(status=FAILED, reason="lines", cases=cases)

    tasks = map(task_of, ("lines", "niah", "retold"))
    found = [compare(task, cell([1.0] * 10), cell([0.0] * 10), check) for task in tasks]
    assert [one.verdict for one in found] == ["none", "worse", "worse"]
    assert {one.difference.mean for one in found} == {-1.0}
    assert "got lines at 256 tokens: 10% with full KV" in found[0].reason


def test_task_that_full_kv_does_not_solve_gets_no_verdict():
    half = [0.0, 0.0, 1.0, 0.0, 1.0] * 2

    found = compare(task_of("lines"), cell(half), cell(half), GOOD)
    assert (found.verdict, found.difference.mean) == ("none", 0.0)
    assert found.reason == "expected at least 0.5 with full KV, got 0.40"
    nll = compare(task_of("perplexity"), cell(half, "nll"), cell(half, "nll"), GOOD)
    assert nll.verdict == "no difference found"  # a perplexity has no bound


def test_cell_has_scores_by_depth_bytes_and_rates():
    found = cell([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])

    summary = found.summary()
    assert found.name == "lines_256"
    assert summary["by_depth"] == {"0": 0.5, "0.25": 0.0, "0.5": 1.0, "0.75": 1.0, "1": 0.0}
    assert summary["kv_peak_bytes"] == 1005
    assert summary["output_tokens_per_s"] == 15.0
    assert summary["total_tokens_per_s"] == 315.0
    assert summary["scores"]["accuracy"]["mean"] == 0.5


def test_stored_cell_is_read_again_for_equal_options_only(tmp_path):
    stored, found = CellFolder(tmp_path), cell([1.0, 0.0])
    assert stored.cell("a", "x") is None
    stored.write("a", "x", asdict(found))

    assert CellFolder(tmp_path).cell("a", "x") == found
    assert stored.cell("a", "y") is None
    assert [path.name for path in (tmp_path / "cells").iterdir()] == ["a.json"]  # no parts left
    for damaged in ('{"of": "x", "val', '{"of": "x", "values": {}}'):
        (tmp_path / "cells" / "a.json").write_text(damaged, encoding="utf-8")
        assert stored.cell("a", "x") is None
    CellFolder(None).write("a", "x", {})
    assert CellFolder(None).read("a", "x") is None


def test_full_kv_has_no_rule_and_no_codec():
    kv = KVConfig(memory="1MiB", evict="recent:cap=64", codec="int8", record_evictions=True)
    assert not is_full(kv)
    assert is_full(full_kv(kv))
    assert (kv_name(kv), kv_name(full_kv(kv))) == ("int8 recent:cap=64", "full")
    assert full_kv(kv).memory == kv.memory
    assert is_full(KVConfig(memory="2MiB"))


def test_sanity_check_evicts_to_a_quarter_and_states_failures():
    rules = []

    def knows_everything(prompts, evict, max_tokens):
        rules.append(evict)
        return ["12345"] * len(prompts)

    found = sanity.check(knows_everything, **SIZES)

    assert rules[:2] == ["full", "recent:cap=64,every=16,sinks=4"]
    assert found.status == FAILED
    assert "lines at 256 tokens: 0% with full KV" in found.reason
    assert json.dumps(found.as_dict())
    short = sanity.check(knows_everything, **SIZES | {"context_tokens": 30})
    assert (short.status, "--tokens" in short.reason) == (FAILED, True)


@pytest.mark.parametrize(
    ("tasks", "status", "ran"),
    [(["niah", "qa"], FAILED, ["niah"]), (["qa", "retold"], NO_CASE, []), (CASES, FAILED, CASES)],
)
def test_sanity_check_runs_the_cases_of_the_evaluated_tasks_only(tasks, status, ran):
    found = sanity.check(lambda prompts, *_: [""] * len(prompts), **SIZES | {"tasks": tasks})
    assert (found.status, [case["task"] for case in found.cases]) == (status, ran)
    assert all(task in found.reason for task in ran)
    assert not any(task in found.reason for task in set(CASES) - set(ran))
    assert found.passed == (not ran)
    assert compare(task_of("retold"), cell([1.0] * 10), cell([0.0] * 10), found).verdict == "worse"


def reads_visible(visible):
    """Answer as a model that reads the visible part of a prompt."""

    def answer(prompts, evict, max_tokens):
        found = []
        for prompt in prompts:
            key = re.findall(r"[a-z]+-[a-z]+", prompt)[-1]
            shown = rf"{key}[>\"']*(?:: [<\"']?| is: )([^>\"',]+)"
            found.append(re.search(shown, visible(prompt, evict)))
        return ["" if match is None else f"{match[1]}> and more" for match in found]

    return answer


def newest(prompt, evict):
    """The text that full KV, or a cap in tokens of about 3 characters, retains."""
    cap = re.match(r"recent:cap=(\d+)", evict)
    return prompt if cap is None else prompt[-3 * int(cap[1]) :]


@pytest.mark.parametrize(
    ("visible", "full", "evicted"),
    [(newest, 1.0, 0.0), (lambda prompt, _: prompt, 1.0, 1.0), (lambda *_: "", 0.0, 0.0)],
    ids=["its context", "more than its context", "nothing"],
)
def test_sanity_check_passes_a_model_that_reads_only_its_context(visible, full, evicted):
    found = sanity.check(reads_visible(visible), **SIZES)
    assert {case["full"] for case in found.cases} == {full}
    assert {case["evicted"] for case in found.cases} == {evicted}
    assert found.passed == ((full, evicted) == (1.0, 0.0))
