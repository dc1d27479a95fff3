import io
import json
import os
import pty
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.common.tables import show_claims, with_unit
from quire.cli import report
from quire.cli.evaluate_run import _SCORES, _cell_rows
from quire.cli.main import app
from quire.cli.progress import LiveProgress
from quire.cli.report import json_only, print_json
from quire.cli.tables import show_table
from quire.config.kv_config import KVConfig
from quire.engine.core import Engine
from quire.engine.stats import EngineStats
from quire.evals.suite.cells import CellResult, PromptResult
from quire.version import __version__
from support import engines

BENCH = """bench throughput --num-prompts 1 --input-len 4 --output-len 2 --num-iters 1
    --num-iters-warmup 0 --kv-memory 2MiB --no-verify"""


def test_texts_go_to_standard_error_until_the_object_is_printed(capsys):
    with json_only(enabled=True):
        typer.echo("a text")
        Console().print("a table")
        print_json({"a": 1})
    with json_only(enabled=False):
        typer.echo("after")

    captured = capsys.readouterr()
    assert captured == ('{"a": 1}\nafter\n', "a text\na table\n")
    with pytest.raises(ValueError, match="wrong"), json_only(enabled=True):
        raise ValueError("wrong")
    typer.echo("after")
    assert capsys.readouterr().out == "after\n"


@pytest.mark.parametrize("line", ["plan quire-tiny --memory 1GiB", BENCH])
def test_standard_output_of_commands_is_one_json_object(line):
    result = CliRunner().invoke(app, [*line.split(), "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    assert isinstance(json.loads(result.stdout), dict)


@pytest.mark.parametrize(
    ("settings", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_colours_are_for_terminals_that_show_them(settings, coloured):
    ours, theirs = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    environment |= {"COLUMNS": "80", "TERM": "xterm-256color"} | settings
    line = [sys.executable, "-m", "quire", "--help"]
    subprocess.run(line, stdout=theirs, stderr=subprocess.DEVNULL, env=environment, check=True)
    os.close(theirs)
    shown = os.read(ours, 1 << 16)
    assert (b"\x1b[3" in shown or b"\x1b[1;3" in shown) == coloured


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        *(("kv_peak_bytes", 1 << 20, "1.00 MiB"), ("run_s", 2.5, "2.50 s")),
        *(("token_p50_s", 0.0123, "12.3 ms"), ("prefill_s_512", 0.5, "500.0 ms")),
        *(("tokens_per_s", 1234.56, "1,234.6 tokens/s"), ("read_bytes_per_s", 2.5e9, "2.5 GB/s")),
        ("bfloat16_flops_per_s", 3e11, "300.0 GFLOP/s"),
        *(("preemptions", 1200, "1,200"), ("mean_regret", 0.01234567, "0.01235")),
    ],
)
def test_value_has_the_unit_of_its_claim(name, value, text):
    assert with_unit(name, value) == text


@pytest.mark.parametrize("columns", ["40", "80"])
def test_long_names_wrap_and_are_not_cut(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    name = "a_claim_with_a_long_name_that_a_document_cites_per_model_and_shape_s"
    show_claims("Claims", {name: 1.5})

    lines = capsys.readouterr().out.splitlines()
    cells = "".join(line.split("│")[1].strip() for line in lines if line.startswith("│"))
    assert cells == name
    assert max(map(len, lines)) <= int(columns)


def test_scores_fit_into_80_columns_but_lines_of_a_file_may_be_wide_and_markup_is_text(
    monkeypatch, capsys
):
    monkeypatch.delenv("COLUMNS", raising=False)
    resources = {"prompt_tokens": 400, "output_tokens": 9, "kv_peak_bytes": 134_400}
    scores = [number / 100 for number in range(1, 100)] * 2
    resources |= {"depth": None, "chance": 0.0, "output": ""}
    prompts = tuple(PromptResult(scores={"recall": score}, **resources) for score in scores)
    rule = "snapkv:cap=25%,when=prefill_end,window=16"
    cell = CellResult(task="niah_multiquery", tokens=512, arm=rule, prompts=prompts, seconds=1.0)
    show_table("Scores", _SCORES, _cell_rows(cell))

    shown = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= 80
    cells = "niah_multiquery_512;recall;cap=25%,;0.459 to 0.541;131.25 KiB;window=16"
    assert all(text in shown for text in cells.split(";")), shown

    monkeypatch.delenv("COLUMNS", raising=False)
    show_table("[bold]", ("a", "value"), [("[red]x[/red]", "x" * 120)])

    shown = capsys.readouterr().out
    assert all(text in shown for text in ("[red]x[/red]", "[bold]", "x" * 120))


def test_envelope_is_json_with_config_versions_and_hardware():
    envelope = report.envelope("demo", {"x": 1}, {"ours": [1.5, 2.5]}, {"seed": 3}, seconds=4.5)

    parsed = json.loads(json.dumps(envelope))
    given = {"name": "demo", "claims": {"x": 1}, "arms": {"ours": [1.5, 2.5]}}
    given |= {"config": {"seed": 3}, "seconds": 4.5}
    assert given.items() <= parsed.items()
    assert parsed["versions"]["quire"] == __version__
    assert set(parsed["versions"]) == {"quire", "python", "torch", "transformers", "numpy"}
    assert parsed["hardware"]["cores"] >= 1
    assert parsed["hardware"]["memory_bytes"] > 1 << 20
    assert parsed["hardware"]["cpu"]
    assert 0 < report.envelope("demo", {}, {}, {})["seconds"] < 24 * 3600  # of the process
    assert report.versions(["no-such-package"])["no-such-package"] is None


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_commit_is_reported_only_if_git_tracks_the_file(tmp_path, monkeypatch):
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    (tmp_path / "report.py").write_text("")
    (tmp_path / "other.py").write_text("")
    monkeypatch.setattr(report, "__file__", str(tmp_path / "report.py"))

    assert report.commit() is None
    git("init", "-q")
    git("add", "other.py")
    git("commit", "-q", "-m", "Start")
    assert report.commit() is None
    git("add", "report.py")
    git("commit", "-q", "-m", "Add it")
    assert report.commit() == git("rev-parse", "HEAD")


@pytest.fixture(scope="module")
def stats() -> EngineStats:
    idle = Engine(engines.load("llama"), KVConfig(memory="64KiB")).stats()
    return replace(idle, kv_total_bytes=100, kv_used_bytes=40, num_running=3, num_waiting=5)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_shows_kv_memory_use_and_completed_requests(monkeypatch, stats):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("TERM", "xterm")

    with LiveProgress("batch", 9, refresh_s=0.0) as live:
        live.show(2, lambda: stats)

    assert "2/9" in screen.getvalue()
    assert "KV 40%, 3 running, 5 waiting" in screen.getvalue()


def test_stats_are_read_a_few_times_per_second_and_only_for_a_terminal(monkeypatch, stats):
    not_a_terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", not_a_terminal)
    reads = []

    with LiveProgress("batch", 9) as live:
        live.show(2, lambda: reads.append(1))

    assert (not_a_terminal.getvalue(), reads) == ("", [])

    monkeypatch.setattr(sys, "stderr", Terminal())
    reads = []

    with LiveProgress("batch", 9) as live:
        for _ in range(1000):
            live.show(2, lambda: reads.append(1) or stats)

    assert len(reads) <= 3
