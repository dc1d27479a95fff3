"""`quire profile` and the benches of throughput and prefill: quick runs, JSON, wrong options."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from quire.bench import ceilings
from quire.bench.workload import Workload
from quire.cli.bench_throughput import peer_note
from quire.cli.main import app
from quire.plan.ceilings import Ceilings, NotUsable, read_ceilings
from quire.plan.machine import this_machine

CLAIMS = (
    "total_ratio_vs_hf_static",
    "total_ratio_vs_hf_cb",
    "decode_step_over_floor",
    "attention_over_read_ceiling",
)


def quire(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def last_line(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def small_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """--quick, smaller still: what it finds is compared with itself."""
    small = replace(ceilings.QUICK_PROFILE, repeats=2, buffer_bytes=8 << 20)
    monkeypatch.setattr(ceilings, "QUICK_PROFILE", small)


def test_a_profile_is_written_and_read_again(tmp_path: Path):
    path = tmp_path / "ceilings.json"
    run = last_line(quire("profile", "--quick", "--output", str(path), "--json"))

    found = read_ceilings(path, this_machine(run["config"]["threads"]))
    assert isinstance(found, Ceilings)
    assert run["name"] == "profile"
    assert run["claims"]["read_bytes_per_s"] == found.read_bytes_per_s
    assert run["claims"]["bfloat16_flops_per_s"] == found.peak_product_rate()
    assert isinstance(read_ceilings(path, this_machine(run["config"]["threads"] + 1)), NotUsable)


@pytest.mark.slow
def test_a_profile_keeps_the_rates_of_models_measured_before(tmp_path: Path):
    path = tmp_path / "ceilings.json"
    arguments = ("profile", "--quick", "--output", str(path), "--json")
    first = last_line(quire(*arguments, "--model", "quire-tiny"))
    last_line(quire(*arguments))

    found = read_ceilings(path, this_machine(first["config"]["threads"]))
    assert isinstance(found, Ceilings)
    [(key, rates)] = found.prefill.items()
    assert key.endswith("bfloat16, cpu")
    assert rates.token_s == first["arms"]["ceilings"]["prefill"][key]["token_s"]
    assert found.copies["cpu"].out.bytes_per_s > 0


def test_a_profile_of_a_model_that_is_not_there_measures_nothing(tmp_path: Path):
    result = quire("profile", "--quick", "--model", str(tmp_path / "none"))

    assert result.exit_code != 0
    assert "GB/s" not in result.output


def test_rules_without_a_model_are_refused():
    result = quire("profile", "--quick", "--evict", "h2o")

    assert result.exit_code == 2
    assert "--evict 'h2o' has no effect: " in result.stderr


def test_a_quick_profile_takes_no_ones_place(cache: Path):
    assert last_line(quire("profile", "--quick", "--json"))["config"]["output"] is None
    assert not cache.exists()


def test_throughput_prints_its_claims_and_writes_the_page(tmp_path: Path):
    path = tmp_path / "page.html"
    result = quire("bench", "throughput", "--quick", "--json", "--page", str(path))
    run = last_line(result)

    assert run["claims"] == {}
    assert set(CLAIMS) <= set(run["quick_figures"])
    assert all(isinstance(value, int | float) for value in run["quick_figures"].values())
    assert [part["kind"] for part in run["arms"]["parts"]] == ["prefill", "decode"]
    assert len(run["arms"]["rounds"]) == run["config"]["repeats"] == 2
    assert "support no claim" in result.output
    assert "vLLM" not in result.output
    assert "ceilings.json is not there: run `quire profile`" in result.output
    shown = path.read_text(encoding="utf-8")
    assert "output projection" in shown
    assert "quire_tokens_per_s" not in shown


def test_another_engine_s_time_stands_beside_its_own_shape_only():
    assert "3.98 s" in peer_note(Workload(prompts=32, prompt_tokens=512, new_tokens=64))
    assert "3.98 s" not in peer_note(Workload(prompts=32, prompt_tokens=512, new_tokens=65))


def test_throughput_runs_quire_alone():
    run = last_line(quire("bench", "throughput", "--quick", "--json", "--peers", "none"))

    assert not [name for name in run["quick_figures"] if "hf_" in name]
    assert run["quick_figures"]["quire_tokens_per_s"] > 0


def test_prefill_prints_every_budget():
    run = last_line(quire("bench", "prefill", "--quick", "--json"))

    figures = run["quick_figures"]
    assert run["claims"] == {}
    assert figures["best_step_tokens"] in run["config"]["budgets"]
    assert figures[f"over_best_{figures['best_step_tokens']}"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--peers", "vllm"), "unknown arm 'vllm'"),
        (("--prompt-tokens", "9000"), "over the context"),
        (("--page", "nowhere/page.html"), "no folder nowhere"),
        (("--quick", "--attention", "nativ"), "unknown attention backend"),
    ],
)
def test_wrong_options_of_throughput_are_one_line(arguments: tuple[str, ...], message: str):
    result = quire("bench", "throughput", *arguments)

    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.startswith("error: ")


def test_a_page_without_matplotlib_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "matplotlib" else real(name, *rest),
    )

    result = quire("bench", "throughput", "--quick", "--page", "page.html")

    assert result.exit_code == 2
    assert "quire[report]" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("bench", "offload", "--rho", "nan"), "--rho"),
        (("bench", "offload", "--rho", "inf"), "--rho"),
        (("bench", "offload", "--xi", "inf"), "--xi"),
        (("bench", "rebatch", "--scale", "inf"), "--scale"),
        (("bench", "eviction", "--budgets", "nan"), "per cents above 0"),
        (("bench", "kvcrush", "--budget", "50,0"), "per cents above 0"),
        (("kv-store", "--memory", "1MiB", "--host", ""), "say 0.0.0.0 for that"),
        (("serve", "--host", ""), "0.0.0.0 for all"),
        (("calibrate", "--model", "quire-tiny", "--kv-codec", " ; "), "--kv-codec with one codec"),
    ],
)
def test_values_that_mean_nothing_are_refused(arguments, says):
    result = quire(*arguments)

    assert result.exit_code == 2
    assert says in result.stderr
