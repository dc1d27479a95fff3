"""`python -m benchmarks device` as a command, at toy sizes on a CPU."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app


def device(*arguments: str):
    return CliRunner().invoke(app, ["device", "--device", "cpu", *arguments])


def test_run_writes_tables_and_pictures_and_states_the_cpu(tmp_path: Path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"

    result = device(
        *("--quick", "--json", "--parts", "link,step", "--models", "toy", "--rows", "2"),
        *("--context", "32", "--repeats", "1", "--pinned", "4MiB", "--out", str(out)),
    )

    assert result.exit_code == 0, result.output
    run = json.loads(result.stdout.splitlines()[-1])
    assert run["name"] == "bench device"
    assert list(run["arms"]) == ["link", "step"]
    assert run["config"]["pinned_bytes"] == 4 << 20
    assert [case["rows"] for case in run["config"]["cases"]] == [2]
    facts = run["config"]["machine_facts"]
    assert (facts["device"], facts["on_gpu"]) == ("cpu", False)
    assert "copies use no link" in result.stdout
    assert {"device.json", "device-link.svg", "device-step.csv"} <= {p.name for p in out.iterdir()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--parts", "speed"), "sweep"),
        (("--models", "toys", "--quick"), "toy"),
        (("--quick", "--parts", "step", "--pinned", "1KiB"), "--pinned"),
        (("--quick", "--parts", "accuracy", "--folder", "nowhere"), "--folder"),
        (("--quick", "--parts", "step", "--pinned", "99999GiB"), "lower --pinned"),
    ],
)
def test_invalid_options_raise(arguments: tuple[str, ...], message: str):
    result = device(*arguments)

    assert result.exit_code != 0
    assert message in result.output + str(result.exception)
