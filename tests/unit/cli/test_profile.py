"""`quire profile` and `quire bench`: quick runs, JSON, invalid options."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from quire.cli.main import app
from quire.plan.ceilings import Ceilings, NotUsable, read_ceilings
from quire.plan.machine import this_machine
from quire.profile import ceilings


def quire(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def profile_of(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a profile smaller than --quick: values are only compared."""
    small = replace(ceilings.QUICK_PROFILE, repeats=2, buffer_bytes=8 << 20)
    monkeypatch.setattr(ceilings, "QUICK_PROFILE", small)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_profile_is_written_and_read_back(tmp_path: Path):
    path = tmp_path / "ceilings.json"
    run = profile_of(quire("profile", "--quick", "--output", str(path), "--json"))

    found = read_ceilings(path, this_machine(run["config"]["threads"]))
    assert isinstance(found, Ceilings)
    assert run["name"] == "profile"
    assert run["claims"]["read_bytes_per_s"] == found.read_bytes_per_s
    assert run["claims"]["bfloat16_flops_per_s"] == found.peak_product_rate()
    assert isinstance(read_ceilings(path, this_machine(run["config"]["threads"] + 1)), NotUsable)


@pytest.mark.slow
def test_profile_retains_the_rates_of_models_measured_before(tmp_path: Path):
    path = tmp_path / "ceilings.json"
    arguments = ("profile", "--quick", "--output", str(path), "--json")
    first = profile_of(quire(*arguments, "quire-tiny"))
    profile_of(quire(*arguments))

    found = read_ceilings(path, this_machine(first["config"]["threads"]))
    assert isinstance(found, Ceilings)
    [(key, rates)] = found.prefill.items()
    assert key.endswith("bfloat16, cpu")
    assert rates.token_s == first["arms"]["ceilings"]["prefill"][key]["token_s"]
    assert found.copies["cpu"].out.bytes_per_s > 0


def test_quick_profile_does_not_replace_the_stored_profile(cache: Path):
    missing = quire("profile", "--quick", str(cache / "none"))  # fails before measuring
    assert missing.exit_code != 0
    assert "GB/s" not in missing.output
    assert profile_of(quire("profile", "--quick", "--json"))["config"]["output"] is None
    assert not cache.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("profile", "--quick", "--evict", "h2o"), "'h2o' has no effect without a model: "),
        (("serve", "--host", ""), "0.0.0.0 for all"),
        (("calibrate", "quire-tiny", "--kv-codec", " ; "), "--kv-codec with one or more codecs"),
    ],
)
def test_empty_or_unused_option_values_are_refused(arguments, message):
    result = quire(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


SMALL = ("--kv-memory", "4MiB", "--no-verify", "--threads", "1", "--dtype", "float32")
SHAPE = ("--input-len", "24", "--output-len", "4", "--num-iters", "2", "--num-iters-warmup", "1")


def bench(*arguments: str) -> dict[str, Any]:
    return profile_of(quire("bench", *arguments, *SMALL, *SHAPE, "--json"))


def test_throughput_counts_requests_and_tokens_per_second():
    run = bench("throughput", "quire-tiny", "--num-prompts", "3")

    claims = run["claims"]
    assert len(run["arms"]["rounds"]) == 2
    assert claims["requests_per_s"] == pytest.approx(3 / claims["total_s"])
    assert claims["output_tokens_per_s"] == pytest.approx(12 / claims["total_s"])
    assert claims["total_tokens_per_s"] == pytest.approx((72 + 12) / claims["total_s"])
    assert 0 < claims["kv_peak_bytes"] <= claims["kv_total_bytes"] <= 4 << 20


def test_latency_reports_percentiles_of_batches():
    run = bench("latency", "quire-tiny", "--batch-size", "2")

    claims, totals = run["claims"], [found["total_s"] for found in run["arms"]["rounds"]]
    assert min(totals) <= claims["latency_p50_s"] <= claims["latency_p99_s"] <= max(totals)
    assert 0 < claims["first_token_p50_s"] < claims["latency_mean_s"]
    assert run["config"]["shape"]["requests"] == 2


def test_length_beyond_the_context_is_refused():
    result = quire("bench", "throughput", *SMALL, "--input-len", "99999")
    assert result.exit_code == 2
    assert "--input-len + --output-len" in result.stderr
