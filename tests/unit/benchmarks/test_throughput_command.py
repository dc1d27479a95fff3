"""`python -m benchmarks throughput` and `roofline`: quick runs, JSON, invalid options."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from benchmarks.__main__ import app
from benchmarks.roofline.command import environment_of, sets_of

CLAIMS = (
    "total_ratio_vs_hf_static",
    "total_ratio_vs_hf_cb",
    "decode_step_over_floor",
    "attention_over_read_ceiling",
)


def benchmark(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def last_line(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_throughput_prints_claims():
    result = benchmark("throughput", "--quick", "--json")
    run = last_line(result)

    assert run["claims"] == {}
    assert set(CLAIMS) <= set(run["quick_figures"])
    assert all(isinstance(value, int | float) for value in run["quick_figures"].values())
    assert len(run["arms"]["rounds"]) == run["config"]["repeats"] == 2
    assert "support no claim" in result.output


@pytest.mark.slow
def test_roofline_measures_a_cell():
    names = ("--weight-codecs", "auto", "--model-impls", "auto", "--instruction-sets")
    lowest = sets_of("all")[-1]
    result = benchmark("roofline", "--quick", "--json", *names, lowest)
    run = last_line(result)

    assert run["claims"] == {}
    assert run["quick_figures"]["small_batch_step_over_floor"] > 1
    [cell] = run["arms"]["cells"]
    assert cell["instruction_set"] == lowest
    assert [(step["kind"], step["rows"]) for step in cell["steps"]] == [
        ("prefill", 4),
        ("decode", 1),
        ("decode", 4),
    ]
    assert "support no claim" in result.output


def test_lower_instruction_sets_limit_other_libraries_too():
    assert environment_of("avx2") == {
        "QUIRE_MAX_CPU_ISA": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
    }
    assert environment_of("avx512_bf16") == {"QUIRE_MAX_CPU_ISA": "avx512_bf16"}


def test_throughput_runs_without_peers():
    run = last_line(benchmark("throughput", "--quick", "--json", "--peers", "none"))

    assert not [name for name in run["quick_figures"] if "hf_" in name]
    assert run["quick_figures"]["quire_tokens_per_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--peers", "vllm"), "unknown arm 'vllm'"),
        (("--prompt-tokens", "9000"), "exceeds the context"),
    ],
)
def test_invalid_throughput_options_print_one_line(arguments: tuple[str, ...], message: str):
    assert_one_line(benchmark("throughput", *arguments), message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--instruction-sets", "avx3"), "did you mean avx2"),
        (("--rows", "1,0"), "expected numbers of sequences"),
    ],
)
def test_invalid_roofline_options_print_one_line(arguments: tuple[str, ...], message: str):
    assert_one_line(benchmark("roofline", *arguments), message)


def assert_one_line(result: Result, message: str) -> None:

    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.startswith("error: ")


def test_meaningless_values_raise():
    result = benchmark("rebatch", "--scale", "inf")

    assert result.exit_code == 2
    assert "--scale" in result.stderr
