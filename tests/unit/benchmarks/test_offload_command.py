"""`python -m benchmarks offload` as a command, at tiny sizes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.offload import config
from benchmarks.offload.layer_shape import LayerShape


@pytest.fixture
def tiny(monkeypatch):
    shape = LayerShape(hidden=16, tokens=48, rows=2, num_layers=3)
    small = replace(config.QUICK_OFFLOAD, shape=shape, others=(), layers=2)
    monkeypatch.setattr(config, "QUICK_OFFLOAD", small)


def test_run_writes_tables_pictures_and_a_trace(tiny, tmp_path: Path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    arguments = ["offload", "--quick", "--json", "--parts", "arms,position"]

    result = CliRunner().invoke(
        app, [*arguments, "--repeats", "1", "--rho", "0.4", "--out", str(out)]
    )

    assert result.exit_code == 0, result.output
    run = json.loads(result.stdout.splitlines()[-1])
    assert run["name"] == "bench offload"
    assert list(run["arms"]) == ["arms", "position"]
    assert run["config"]["ratios"]["recompute"] == 0.4
    assert "gain_lB_over_prefetch" in run["quick_figures"]
    assert "trace" not in run["arms"]["arms"]["raw"]
    names = {path.name for path in out.iterdir()}
    assert {"offload.json", "offload-arms.csv", "offload-timeline.svg"} <= names
    trace = json.loads((out / "offload-trace.json").read_text())
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X"}


@pytest.mark.parametrize(
    ("arguments", "message"), [(("--parts", "speed"), "sweep"), (("--rho", "0"), "0.01")]
)
def test_invalid_options_raise_before_a_run(arguments: tuple[str, ...], message: str):
    result = CliRunner().invoke(app, ["offload", *arguments])

    assert result.exit_code != 0
    assert message in result.output + str(result.exception)
