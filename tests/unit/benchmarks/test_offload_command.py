"""`python -m benchmarks offload` as a command, at tiny sizes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.offload import command


@pytest.fixture
def tiny(monkeypatch):
    small = replace(command.QUICK_OFFLOAD, repeats=1, engine_tokens=128, engine_steps=3)
    monkeypatch.setattr(command, "QUICK_OFFLOAD", small)


def test_run_writes_tables(tiny, tmp_path: Path):
    out = tmp_path / "out"

    result = CliRunner().invoke(
        app, ["offload", "--quick", "--json", "--parts", "engine", "--out", str(out)]
    )

    assert result.exit_code == 0, result.output
    run = json.loads(result.stdout.splitlines()[-1])
    assert run["name"] == "bench offload"
    assert list(run["arms"]) == ["engine"]
    assert "engine_auto_over_off" in run["quick_figures"]
    names = {path.name for path in out.iterdir()}
    assert {"offload.json", "offload-engine.csv"} <= names


@pytest.mark.parametrize(
    ("arguments", "message"), [(("--parts", "speed"), "restore"), (("--repeats", "0"), "1")]
)
def test_invalid_options_raise_before_a_run(arguments: tuple[str, ...], message: str):
    result = CliRunner().invoke(app, ["offload", *arguments])

    assert result.exit_code != 0
    assert message in result.output + str(result.exception)
