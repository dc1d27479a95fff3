"""`--json`: standard output is one line of JSON; colours only on a terminal."""

import json
import os
import pty
import subprocess
import sys

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from quire.cli.main import app
from quire.cli.report import json_only, print_json

BENCH = (
    *("--num-prompts", "1", "--input-len", "4", "--output-len", "2", "--num-iters", "1"),
    *("--num-iters-warmup", "0", "--kv-memory", "2MiB", "--no-verify"),
)


def test_texts_go_to_standard_error(capsys):
    with json_only(enabled=True):
        typer.echo("a text")
        Console().print("a table")
        print_json({"a": 1})
    typer.echo("after")

    captured = capsys.readouterr()
    assert captured.out == '{"a": 1}\nafter\n'
    assert captured.err == "a text\na table\n"


def test_nothing_changes_without_the_option(capsys):
    with json_only(enabled=False):
        typer.echo("a text")
        print_json({"a": 1})

    assert capsys.readouterr().out == 'a text\n{"a": 1}\n'


def test_standard_output_is_restored_after_an_error(capsys):
    with pytest.raises(ValueError, match="wrong"), json_only(enabled=True):
        raise ValueError("wrong")
    typer.echo("after")

    assert capsys.readouterr().out == "after\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "quire-tiny", "--memory", "1GiB"),
        ("bench", "throughput", *BENCH),
    ],
)
def test_standard_output_of_commands_is_one_json_object(arguments):
    result = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)

    assert result.exit_code == 0
    assert isinstance(json.loads(result.stdout), dict)


@pytest.mark.parametrize(
    ("settings", "coloured"),
    [
        ({"TERM": "xterm-256color"}, True),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, False),
        ({"TERM": "dumb"}, False),
    ],
)
def test_colours_are_for_terminals_that_show_them(settings, coloured):
    ours, theirs = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    subprocess.run(
        [sys.executable, "-m", "quire", "--help"],
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        env=environment | settings | {"COLUMNS": "80"},
        check=True,
    )
    os.close(theirs)
    shown = os.read(ours, 1 << 16)

    assert (b"\x1b[3" in shown or b"\x1b[1;3" in shown) == coloured
