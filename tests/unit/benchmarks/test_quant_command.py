"""`python -m benchmarks quant` as a command, at tiny sizes."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from benchmarks.__main__ import app


def benchmark(*arguments: str) -> Result:
    arguments = ("quant", "--quick", "--json", "--no-verify", *arguments)
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def last_object(result: Result) -> dict:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
def test_all_parts_print_claims_and_an_interrupted_run_continues(tmp_path: Path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"

    run = last_object(benchmark("--out", str(out)))
    cells = (out / "cells.jsonl").read_text()
    continued = last_object(benchmark("--parts", "quality", "--out", str(out)))

    assert run["name"] == "bench quant"
    assert list(run["arms"]) == [
        *("capacity", "attention", "throughput", "quality", "orderings", "eviction"),
    ]
    assert {
        *("int8_attention_speedup", "int4_attention_speedup", "int8_over_read_ceiling"),
        *("int8_capacity_ratio", "int4_capacity_ratio", "int4_outliers_capacity_ratio"),
        *("int8_gain_max_batch", "int4_gain_max_batch", "int8_kl", "int4_kl"),
        *("int8_perplexity_change", "key_over_value_bits_4_2", "outliers_over_none_4"),
        "mixed_over_uniform_50",
    } <= set(run["quick_figures"])
    assert 0 < run["quick_figures"]["int8_kl"] < run["quick_figures"]["int4_kl"]
    assert {"quant.json", "quant-tasks.csv", "quant-grid.svg"} <= {p.name for p in out.iterdir()}
    assert (out / "cells.jsonl").read_text() == cells
    assert continued["quick_figures"]["int8_tasks"] == run["quick_figures"]["int8_tasks"]


def test_codecs_are_selected():
    run = last_object(benchmark("--parts", "capacity,attention", "--codecs", "int8/int4"))

    assert run["config"]["attention"]["codecs"] == ["int8/int4"]
    assert "int8_int4_attention_speedup" in run["quick_figures"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--codecs", "int5"), "int4"), (("--parts", "speed"), "throughput")],
)
def test_invalid_options_raise_before_a_run(arguments: tuple[str, ...], message: str):
    result = CliRunner().invoke(app, ["quant", *arguments])

    assert result.exit_code != 0
    assert message in result.output + str(result.exception)
