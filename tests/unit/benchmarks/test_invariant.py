"""Cost of `--batch-invariant`: both arms run in turn, and ratios are computed by round."""

import json

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.invariant import INVARIANT, PLAIN, InvariantConfig, Speeds, summarise
from benchmarks.throughput.arms import ArmResult


def test_ratios_are_medians_over_rounds():
    found = [
        Speeds(8, arm, prefill, decode)
        for arm, prefill, decode in (
            (PLAIN, 100.0, 10.0),
            (INVARIANT, 50.0, 9.0),
            (PLAIN, 200.0, 20.0),
            (INVARIANT, 160.0, 10.0),
            (PLAIN, 300.0, 10.0),
            (INVARIANT, 180.0, 7.0),
        )
    ]
    claims = summarise(found)

    assert claims["plain_prefill_tokens_per_s_8"] == 200.0
    assert claims["invariant_decode_tokens_per_s_8"] == 9.0
    assert claims["invariant_over_plain_prefill_8"] == 0.6
    assert claims["invariant_over_plain_decode_8"] == 0.7


def test_prefill_and_decode_speeds_are_separate():
    timed = ArmResult(
        arm="quire", total_s=3.0, prefill_s=2.0, decode_step_s=0.1, kv_bytes=0, tokens=((1,),)
    )
    work = InvariantConfig(prompt_tokens=100, new_tokens=11).workload(4)

    assert Speeds.of(PLAIN, work, timed) == Speeds(4, PLAIN, 200.0, 40.0)


def test_command_runs_both_arms():
    result = CliRunner().invoke(app, ["invariant", "--quick", "--threads", "1", "--json"])
    run = json.loads(result.output.splitlines()[-1])

    assert result.exit_code == 0
    assert run["claims"] == {}
    assert set(run["config"]["rows"]) == {1, 4}
    assert {one["arm"] for one in run["arms"]["rounds"]} == {PLAIN, INVARIANT}


@pytest.mark.slow
def test_command_compares_answers_with_those_in_ample_memory():
    """Swapped sequences are restored byte for byte, and in steps like the others'."""
    result = CliRunner().invoke(app, ["differences", "--quick", "--threads", "1", "--json"])
    run = json.loads(result.output.splitlines()[-1])

    assert result.exit_code == 0
    assert run["claims"] == {}
    assert run["arms"].keys() == {"none full", "kivi4 full"}
    for found in run["arms"].values():
        assert found["recompute"]["events"] > 0
        assert found["prefix hit"]["events"] > 0
        assert found["recompute"]["of"] == found["batches"]["of"] > 5
    assert run["arms"]["none full"]["recompute"]["logprob"] < 1e-4
