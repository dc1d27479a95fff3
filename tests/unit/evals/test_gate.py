"""The recall gate with stub models: perfect recall, no recall, recall without its cache."""

import re

import pytest

from quire.errors import ConfigError
from quire.evals.gate import (
    DEPTHS,
    GATE_ARMS,
    GATE_CASES,
    GateCase,
    evaluate,
    questions,
    run_gate,
)
from quire.evals.tasks import rough_measure

CASES = (GateCase(task="lines", tokens=200, n=10), GateCase(task="niah", tokens=300, n=5))


def recall(text):
    """Return the value of the queried key in the text, as a model with perfect recall does."""
    key = re.findall(r"[a-z]+-[a-z]+", text)[-1]
    found = re.search(rf"{key}(?:: <| is: )(\d+)", text)
    return found.group(1) if found else "0"


class Reader:
    """Stub model that recalls from the tokens retained by the eviction rule; records its calls."""

    def __init__(self):
        self.calls = []

    def __call__(self, prompts, evict, max_tokens):
        self.calls.append((len(prompts), evict, max_tokens))
        return [recall(self.visible(prompt, evict)) + "> and more" for prompt in prompts]

    def visible(self, prompt, evict):
        if evict == "full":
            return prompt
        cap = int(re.match(r"recent:cap=(\d+),every=32,sinks=4", evict).group(1))
        return prompt[-3 * cap :]


def test_model_that_recalls_from_its_cache_passes():
    report = run_gate(Reader(), measure=rough_measure, cases=CASES)

    assert report.passed
    assert report.claims() == {
        "lines_200_full": 1.0,
        "lines_200_evicted": 0.0,
        "niah_300_full": 1.0,
        "niah_300_evicted": 0.0,
    }


def test_a_model_that_cannot_recall_fails():
    report = run_gate(
        lambda prompts, evict, max_tokens: ["12345"] * len(prompts),
        measure=rough_measure,
        cases=CASES,
    )

    assert not report.passed
    assert report.claims()["lines_200_full"] == 0.0


def test_model_that_recalls_evicted_tokens_fails():
    class Oracle(Reader):
        def visible(self, prompt, evict):
            return prompt

    report = run_gate(Oracle(), measure=rough_measure, cases=CASES)

    assert not report.passed
    assert report.claims()["niah_300_full"] == 1.0
    assert report.claims()["niah_300_evicted"] == 1.0


def test_one_failing_case_fails_the_gate():
    reader = Reader()

    def generate(prompts, evict, max_tokens):
        if "magic" in prompts[0]:
            return ["unknown"] * len(prompts)
        return reader(prompts, evict, max_tokens)

    report = run_gate(generate, measure=rough_measure, cases=CASES)

    assert [verdict.passed for verdict in report.verdicts] == [True, False]
    assert not report.passed


def test_evicted_accuracy_counts_old_records_only():
    rows = run_gate(Reader(), measure=rough_measure, cases=CASES).rows
    recent = {row.depth: row.accuracy for row in rows if (row.task, row.arm) == ("lines", "recent")}

    assert recent[0.0] == recent[0.25] == 0.0
    assert recent[0.75] == recent[1.0] == 1.0


def test_each_case_runs_once_per_arm_with_all_prompts():
    reader = Reader()
    evaluate(CASES, GATE_ARMS, reader, measure=rough_measure)

    assert [call[:2] for call in reader.calls] == [
        (10, "full"),
        (10, "recent:cap=100,every=32,sinks=4"),
        (5, "full"),
        (5, "recent:cap=150,every=32,sinks=4"),
    ]


def test_max_tokens_is_the_longest_expected_answer():
    reader = Reader()
    evaluate(CASES[:1], GATE_ARMS, reader, measure=len)

    assert {call[2] for call in reader.calls} == {5}


def test_arm_can_be_any_policy_text():
    reader = Reader()
    rows = evaluate(
        CASES[:1],
        {"tenth": lambda tokens: f"recent:cap={tokens // 10},every=32,sinks=4"},
        reader,
        measure=rough_measure,
    )

    assert reader.calls[0][1] == "recent:cap=20,every=32,sinks=4"
    assert {row.arm for row in rows} == {"tenth"}
    assert [row.depth for row in rows] == list(DEPTHS)
    assert [row.requested for row in rows] == [2] * 5


def test_seed_determines_the_prompts():
    first = questions(CASES[1], measure=rough_measure)

    assert questions(CASES[1], measure=rough_measure) == first
    assert questions(CASES[1], measure=rough_measure, seed=2) != first


def test_gate_cases_are_the_published_lengths():
    assert {(case.task, case.tokens) for case in GATE_CASES} == {
        ("lines", 512),
        ("kv", 512),
        ("niah", 512),
        ("niah", 1024),
        ("niah", 2048),
    }


def test_too_few_prompts_are_refused():
    with pytest.raises(ConfigError, match="n >= 5"):
        GateCase(task="lines", tokens=200, n=4)
