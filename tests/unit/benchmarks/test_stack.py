"""The stack benchmark: one load, one memory size, five KV configurations."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.stack import (
    ARMS,
    QUICK_STACK,
    StackConfig,
    StackFound,
    StackLoad,
    StackRun,
    claims,
    measure_stack,
)
from quire.errors import ConfigError


@pytest.fixture(scope="module")
def found() -> StackFound:
    return measure_stack(QUICK_STACK)


def test_all_arms_complete_all_requests(found):
    expected = [new_tokens for _, new_tokens in QUICK_STACK.load.drawn()]
    (runs,) = found.rounds

    assert [run.arm for run in runs] == [arm.name for arm in ARMS]
    for run in runs:
        assert [len(answer) for answer in run.answers] == expected
        assert len(run.first_s) == len(expected)
        assert len(run.token_s) == sum(expected) - len(expected)


def test_each_arm_holds_more_sequences_in_equal_bytes(found):
    contiguous, paged, int8, shared, int4 = (run.max_batch for run in found.rounds[0])

    assert contiguous == QUICK_STACK.load.contiguous_rows
    assert contiguous < paged < int8 < shared <= int4


def test_full_precision_has_min_regret(found):
    contiguous, paged, int8, shared, int4 = found.regrets

    assert contiguous < 1e-3
    assert paged < 1e-3
    assert int8 == pytest.approx(shared, abs=1e-3)
    assert int4 > int8


def made_up(arm: str, total_s: float, max_batch: int) -> StackRun:
    return StackRun(
        arm=arm,
        total_s=total_s,
        tokens=100,
        max_batch=max_batch,
        mean_batch=1.0,
        token_s=(0.1,),
        first_s=(0.1,),
        kv_peak_bytes=1,
        used_share=0.5,
        preemptions=0,
        answers=((1,),),
    )


def test_ratios_are_medians_of_ratios_within_rounds():
    """Rounds 10 s / 5 s, 12 s / 4 s, 10 s / 2 s have ratios 2, 3 and 5; the median is 3."""
    times = ((10.0, 5.0), (12.0, 4.0), (10.0, 2.0))
    rounds = [[made_up("contiguous", a, 4), made_up("int4", b, 22)] for a, b in times]
    numbers = claims(StackFound(rounds=rounds, regrets=(0.0, 0.1), computed_s=2.0))

    assert numbers["stack_total_ratio"] == numbers["stack_int4_ratio"] == pytest.approx(3)
    assert numbers["stack_max_batch_ratio"] == pytest.approx(5.5)
    assert numbers["stack_int4_utilisation"] == pytest.approx(0.5)
    assert numbers["stack_int4_mean_regret"] == 0.1
    assert numbers["stack_contiguous_tokens_per_s"] == pytest.approx(10)


def test_load_is_an_eighth_of_the_articles():
    load = StackLoad()
    prompts, new_tokens = zip(*load.drawn(), strict=True)

    assert load.system_tokens + load.question_tokens == 1_024 // 8
    assert load.answer_tokens == 512 // 8
    assert load.longest_tokens == 8_192 // 8
    assert sum(map(len, prompts)) / len(prompts) == pytest.approx(128, rel=0.05)
    assert sum(new_tokens) / len(new_tokens) == pytest.approx(64, rel=0.05)
    assert len({tuple(prompt[: load.system_tokens]) for prompt in prompts}) == 1
    assert StackConfig().load == load


def test_requests_longer_than_a_contiguous_lane_raise():
    with pytest.raises(ConfigError, match=r"longest_tokens=100, got up to 256"):
        replace(StackLoad(), longest_tokens=100)


def test_command_prints_one_json_object(tmp_path):
    requested = ["stack", "--quick", "--requests", "4", "--json", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, requested)

    assert result.exit_code == 0, result.output
    run = json.loads(result.output.strip().splitlines()[-1])
    assert run["name"] == "bench stack"
    assert run["quick_figures"]["stack_total_ratio"] > 0
    assert run["config"]["load"]["requests"] == 4
    assert {"stack.md", "stack.json", "stack.csv", "stack.svg"} <= {
        path.name for path in tmp_path.iterdir()
    }


def test_unknown_shape_is_named_in_the_error():
    result = CliRunner().invoke(app, ["stack", "--model", "huge"])

    assert result.exit_code == 2
    assert "choose from 1100m, 125m, small, tiny, wide" in result.output
