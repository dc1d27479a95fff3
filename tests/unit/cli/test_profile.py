"""`quire profile`: quick runs, JSON, invalid options."""

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
    """A profile smaller than --quick: the measured values are only compared with each other."""
    small = replace(ceilings.QUICK_PROFILE, repeats=2, buffer_bytes=8 << 20)
    monkeypatch.setattr(ceilings, "QUICK_PROFILE", small)


def test_profile_is_written_and_read_back(tmp_path: Path):
    path = tmp_path / "ceilings.json"
    run = last_line(quire("profile", "--quick", "--output", str(path), "--json"))

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
    first = last_line(quire(*arguments, "quire-tiny"))
    last_line(quire(*arguments))

    found = read_ceilings(path, this_machine(first["config"]["threads"]))
    assert isinstance(found, Ceilings)
    [(key, rates)] = found.prefill.items()
    assert key.endswith("bfloat16, cpu")
    assert rates.token_s == first["arms"]["ceilings"]["prefill"][key]["token_s"]
    assert found.copies["cpu"].out.bytes_per_s > 0


def test_profile_of_a_missing_model_fails_before_measuring(tmp_path: Path):
    result = quire("profile", "--quick", str(tmp_path / "none"))

    assert result.exit_code != 0
    assert "GB/s" not in result.output


def test_eviction_rule_without_a_model_is_refused():
    result = quire("profile", "--quick", "--evict", "h2o")

    assert result.exit_code == 2
    assert "--evict 'h2o' has no effect without a model: " in result.stderr


def test_quick_profile_does_not_replace_the_stored_profile(cache: Path):
    assert last_line(quire("profile", "--quick", "--json"))["config"]["output"] is None
    assert not cache.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("serve", "--host", ""), "0.0.0.0 for all"),
        (("calibrate", "quire-tiny", "--kv-codec", " ; "), "--kv-codec with one or more codecs"),
    ],
)
def test_empty_option_values_are_refused(arguments, message):
    result = quire(*arguments)

    assert result.exit_code == 2
    assert message in result.stderr
