"""`python -m benchmarks kvcrush`: phases, computation on given values, and small runs."""

import json
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from benchmarks import kvcrush
from benchmarks.__main__ import app
from benchmarks.kvcrush import (
    COMPACTION,
    PHASES,
    REPRESENTATIVES,
    SCORING,
    SELECTION,
    SIGNATURES,
    OverheadConfig,
    Run,
    Stopwatch,
    timed_rules,
)
from quire.policies.kvcrush import KVCrush

TINY = OverheadConfig(model="tiny", rows=2, prompt_tokens=48, new_tokens=8, cap=32, every=4)


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
    runs = kvcrush.measure(TINY)

    for name, run in runs.items():
        there = {phase for phase in PHASES if run.seconds[phase] > 0}
        added = {SCORING, SIGNATURES, REPRESENTATIVES} if name != kvcrush.ALONE else set()
        assert there == {SELECTION, COMPACTION} | added
        assert 0 < run.fraction(*PHASES) < 1
    assert kvcrush.run_overhead(TINY).tables[0].rows[1][0] == "kvcrush"


def test_overhead_claims_match_hand_computation():
    def run(*seconds: int) -> Run:
        """Seconds of the phases in the order of `PHASES`; the run is 100 s."""
        by_phase = dict(zip(PHASES, map(float, seconds), strict=True))
        return Run(evict="", run_s=100.0, seconds=by_phase)

    found = kvcrush.claims(
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


def test_full_size_config_matches_the_claims():
    cost = OverheadConfig()

    assert (cost.model, cost.rows, cost.prompt_tokens, cost.new_tokens) == ("125m", 16, 1024, 512)
    assert (cost.cap, cost.every, cost.dtype) == (672, 64, "bfloat16")


def test_command_prints_claims_of_the_given_rule_and_type(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kvcrush, "QUICK_KVCRUSH", TINY)

    arguments = ["kvcrush", "--quick", "--json", "--base", "average", "--dtype", "float32"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)

    assert result.exit_code == 0, result.output
    run = json.loads(result.stdout.splitlines()[-1])
    assert (run["config"]["base"], run["config"]["dtype"]) == ("average", "float32")
    assert {"overhead_fraction", "kmeans_overhead_fraction"} <= set(run["quick_figures"])
    assert "base=(average)" in run["arms"]["overhead"]["raw"]["runs"]["kvcrush"]["evict"]


@pytest.mark.parametrize(
    ("arguments", "message"), [(("--base", "h2p"), "h2o"), (("--dtype", "bfloat17"), "bfloat16")]
)
def test_command_refuses_invalid_values(arguments: tuple[str, ...], message: str):
    result = CliRunner().invoke(app, ["kvcrush", "--quick", *arguments])

    assert result.exit_code != 0, result.output
    assert message in " ".join(f"{result.exception} {result.output}".split())
