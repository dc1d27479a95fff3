"""The weight codec benchmark at tiny sizes and with given values."""

import json

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.quality.texts import TextScores
from benchmarks.quant.quality import claims
from benchmarks.weights import (
    QUICK_WEIGHTS,
    StepTimes,
    WeightsBenchConfig,
    run_random,
    step_claims,
    task_claims,
)
from quire.errors import ConfigError
from quire.models.native_linear import available_products

needs_products = pytest.mark.skipif(
    available_products() is None, reason="no C extension with vector instructions"
)


def texts(kl: float, nats: float) -> TextScores:
    return TextScores(kl=(kl, kl), top_1=(1.0, 0.5), nats=(nats, nats), request_bytes=1)


def test_claims_compare_codecs_with_the_weights_as_stored() -> None:
    scores = {"auto": texts(0.0, 0.0), "int4": texts(0.25, 0.0)}
    found = claims(scores, "auto", "weights_")

    assert found == {
        "weights_int4_kl": 0.25,
        "weights_int4_top_1": 0.75,
        "weights_int4_perplexity_change": 0.0,
    }
    assert task_claims({"auto": 0.5, "int8": 0.25}) == {
        "weights_tasks": 0.5,
        "weights_int8_tasks_change": -0.25,
    }


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
@pytest.mark.slow
def test_all_parts_print_claims() -> None:
    result = CliRunner().invoke(app, ["weights", "--quick", "--json", "--no-verify"])
    run = json.loads(result.stdout.splitlines()[-1])

    assert result.exit_code == 0
    assert list(run["arms"]) == ["quality", "random", "decode"]
    figures = run["quick_figures"]
    assert 0 < figures["weights_int8_kl"] < figures["weights_int4_kl"]
    assert figures["weights_int4_byte_ratio"] > figures["weights_int8_byte_ratio"] > 1.5
    assert {"weights_int8_step_speedup_1", "weights_random_int4_kl"} <= set(figures)
