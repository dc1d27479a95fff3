"""Tables and pictures of the memory benchmark, and its command."""

import csv
import io
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from benchmarks.__main__ import app
from benchmarks.common.command import names_of, show_parts
from benchmarks.common.rendering import as_csv, report, shown, svg
from benchmarks.common.result import Chart, PartResult, Table
from benchmarks.memory import command
from quire.errors import ConfigError

TABLE = Table(
    name="made",
    caption="What it is.",
    columns=("name", "value"),
    rows=(("a", 1234), ("bb", 0.123456), ("c", None)),
)
BARS = Chart(name="made", title="T", x_label="x", y_label="y", lines={"a": (("p", 1), ("q", 2.5))})


def benchmark(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


@pytest.mark.parametrize(
    ("cell", "text"),
    [(None, ""), (12345, "12,345"), (12345.6, "12,346"), (0.01234567, "0.01235"), ("a", "a")],
)
def test_cells_are_formatted(cell, text):
    assert shown(cell) == text


def test_table_renders_in_three_formats(capsys):
    show_parts([("part", PartResult(tables=(TABLE,), claims={}, seconds=0.5))])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == "What it is."
    assert [re.split(r"[│┃]", line)[1:3] for line in lines if line[:1] in ("│", "┃")] == [
        [" name ", "  value "],
        [" a    ", "  1,234 "],
        [" bb   ", " 0.1235 "],
        [" c    ", "        "],
    ]
    assert "(part: 0.5 s)" in lines
    assert report("memory", [TABLE]).splitlines()[4:6] == ["| name | value |", "| --- | ---: |"]
    [head, first, second, last] = csv.reader(io.StringIO(as_csv(TABLE)))
    assert (head, first, second, last) == (
        ["name", "value"],
        ["a", "1234"],
        ["bb", "0.123456"],
        ["c", ""],
    )


def test_part_result_round_trips_through_json():
    line = Chart(name="l", title="", x_label="", y_label="", lines={"b": ((1, 2),)}, log_y=True)
    result = PartResult(claims={"a": 1.5}, tables=(TABLE,), charts=(BARS, line), seconds=2)

    assert PartResult.from_json(json.loads(json.dumps(result.to_json()))) == result


def test_equal_charts_render_equal_pictures():
    pytest.importorskip("matplotlib")

    assert svg(BARS) == svg(BARS)
    assert b"<svg" in svg(BARS)


@pytest.fixture
def only_made_parts(monkeypatch: pytest.MonkeyPatch):
    """Two parts without work; the first records whether it runs at small size."""

    def first(config):
        small = int(config.simulated.requests is not None)
        return PartResult(claims={"small": small}, tables=(TABLE,), charts=(BARS,))

    made = {"waste": first, "beam": lambda _: PartResult(claims={"b": 2}, tables=())}
    monkeypatch.setattr(command, "PARTS", made)


@pytest.mark.usefixtures("only_made_parts")
def test_command_writes_tables_pictures_and_json(tmp_path: Path):
    pytest.importorskip("matplotlib")
    trace = tmp_path / "conversations.csv"

    result = benchmark(
        *("memory", "--quick", "--json", "--trace", str(trace), "--out"),
        str(tmp_path / "out"),
    )

    assert result.exit_code == 0, result.output
    run = json.loads(result.stdout.splitlines()[-1])
    assert run["name"] == "bench memory"
    assert run["claims"] == {}
    assert run["quick_figures"] == {"small": 1, "b": 2}
    assert [part["claims"] for part in run["arms"].values()] == [{}, {}]
    assert list(run["arms"]) == ["waste", "beam"]
    assert run["config"]["simulated"]["trace"] == "conversations.csv"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "memory.json",
        "memory.md",
        "made.csv",
        "made.svg",
    }
    assert json.loads((tmp_path / "out" / "memory.json").read_text()) == run


@pytest.mark.usefixtures("only_made_parts")
def test_only_requested_parts_run():
    result = benchmark("memory", "--parts", "beam", "--json")

    assert json.loads(result.stdout.splitlines()[-1])["claims"] == {"b": 2}


def test_unknown_part_is_named_in_the_error(capsys: pytest.CaptureFixture[str]):
    result = CliRunner().invoke(app, ["memory", "--parts", "beans"])

    assert result.exit_code != 0
    assert "beans" in str(result.exception) + result.output


def test_missing_trace_is_named_in_the_error(tmp_path: Path):
    result = CliRunner().invoke(
        app, ["memory", "--quick", "--parts", "waste", "--trace", str(tmp_path / "no.csv")]
    )

    assert result.exit_code != 0
    assert "no.csv" in str(result.exception) + result.output


def test_parts_run_in_their_own_order_and_once():
    assert names_of("", command.PARTS) == tuple(command.PARTS)
    assert names_of("beam, waste", command.PARTS) == ("waste", "beam")
    with pytest.raises(ConfigError, match="each part once"):
        names_of("waste,waste", command.PARTS)
