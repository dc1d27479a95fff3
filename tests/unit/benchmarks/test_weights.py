"""The weight codec benchmark at tiny sizes and with given values."""

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.weights import (
    QUICK_WEIGHTS,
    StepTimes,
    WeightsBenchConfig,
    mean_kl,
    run_random,
    step_claims,
)
from quire.errors import ConfigError
from quire.models.native_linear import available_products

needs_products = pytest.mark.skipif(
    available_products() is None, reason="no C extension with vector instructions"
)


def test_kl_matches_hand_computation() -> None:
    """p = (1/2, 1/2), q = (1/4, 3/4): KL = 1/2 log 2 + 1/2 log 2/3; the second row is equal."""
    plain = torch.tensor([[0.5, 0.5], [0.25, 0.75]]).log()
    found = torch.tensor([[0.25, 0.75], [0.25, 0.75]]).log()

    assert mean_kl(plain, found) == pytest.approx((math.log(2) + math.log(2 / 3)) / 4)


def test_step_claims_are_ratios_of_medians_of_equal_rows() -> None:
    times = [
        StepTimes("auto", 1, (2.0, 4.0, 9.0)),
        StepTimes("int8", 1, (2.0, 2.0, 2.0)),
        StepTimes("auto", 8, (6.0,)),
        StepTimes("int8", 8, (3.0,)),
    ]

    assert step_claims(times) == {
        "weights_int8_step_speedup_1": 2.0,
        "weights_int8_step_speedup_8": 2.0,
    }


@needs_products
def test_random_weights_differ_less_with_more_bits() -> None:
    found = run_random(QUICK_WEIGHTS).claims

    assert 0 < found["weights_random_int8_kl"] < found["weights_random_int4_kl"] < 0.01


def test_unknown_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match="125m"):
        WeightsBenchConfig(shape="126m")


@needs_products
def test_all_parts_print_claims() -> None:
    result = CliRunner().invoke(app, ["weights", "--quick", "--json"])
    run = json.loads(result.stdout.splitlines()[-1])

    assert result.exit_code == 0
    assert list(run["arms"]) == ["random", "decode"]
    assert {"weights_int8_step_speedup_1", "weights_random_int4_kl"} <= set(run["quick_figures"])
