"""Presses of kvpress on a leaderboard, with a process that stands in for kvpress's environment."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.kvpress.run import (
    CHECKED_PROMPTS,
    KVPRESS,
    PRESSES,
    PressProcess,
    PressRunner,
    chosen_presses,
    entry_of,
    frees_memory,
    left_out,
    press_lines,
    removed_of,
    result_of,
    spec_of,
)
from quire.api.llm import LLM
from quire.config.kv_config import KVConfig
from quire.errors import ConfigError
from quire.evals.board.grid import BoardEntry, Grid
from quire.evals.board.pages import chart, page
from quire.evals.board.result import BoardResult
from quire.evals.board.run import BoardConfig, BoardRunner
from quire.evals.pace import Pace
from quire.evals.suite.cells import CellFolder
from quire.evals.suite.engines import Engines
from quire.evals.suite.registry import task_of
from support import press_stub

SNAP = {"name": "SnapKVPress", "options": {"window_size": 16}}
TASK, COUNT = "repeats", 3
TESTED = ("KnormPress", "MaskPress", "WrongPress", "RefusedPress")
KV = KVConfig(memory="8MiB")
GRID = Grid(rules=("full",), budgets=("50%", "25%"), schedules=("prefill_end",), codecs=("none",))
CONFIG = BoardConfig(
    entries=GRID.entries(),
    tasks=(task_of(TASK),),
    tokens=200,
    count=COUNT,
    seeds=(1,),
    sanity=False,
)
ABOUT = {"folder": "model", "dtype": "float32", "device": "cpu", "threads": 1}


@pytest.fixture(scope="module")
def llm():
    opened = LLM("quire-tiny", dtype="float32", device="cpu", kv=KV)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def full(llm, tmp_path_factory):
    """The leaderboard without presses, its prompts, and the runner that made them."""
    engines = Engines(lambda kv: llm)
    runner = BoardRunner(
        engines,
        KV,
        CONFIG,
        identity=(),
        stored=CellFolder(tmp_path_factory.mktemp("board")),
        pace=Pace(),
    )
    return runner.run(), runner


def stub(folder: Path, outputs: dict[str, list[int]]) -> Path:
    """A Python of another environment: it runs the stub whatever it is told to run."""
    plan, python = folder / "plan.json", folder / "python"
    plan.write_text(json.dumps({"outputs": outputs, "log": str(folder / "log")}))
    script = Path(press_stub.__file__)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "{plan}"\n')
    python.chmod(0o755)
    return python


def outputs_of(llm, board, runner, *, changed: bool = False) -> dict[str, list[int]]:
    found = {}
    [cells] = board.cells.values()
    for sample, prompt in zip(runner.samples(CONFIG.tasks[0]), cells[0].prompts, strict=True):
        text = "0" if changed else prompt.output
        found[str(llm.encode(sample.prompt))] = llm.encode(text)
    return found


def with_presses(llm, full, folder, presses=TESTED, python=None):
    return run_presses(llm, full, folder, presses, python)[0]


def run_presses(llm, full, folder, presses=TESTED, python=None):
    """The leaderboard with presses, and what is known about their environment."""
    board, runner = full
    python = python or stub(folder, outputs_of(llm, board, runner))
    with PressProcess(python, ABOUT) as process:
        press_runner = PressRunner(
            process,
            llm,
            CONFIG,
            presses,
            grid=GRID,
            samples=runner.samples,
            identity=(),
            stored=CellFolder(folder),
            report=lambda line: None,
        )
        return press_runner.run(board), press_runner.about


def jobs(folder: Path) -> list[str]:
    return (folder / "log").read_text().splitlines()


def test_text_of_a_press_has_nested_presses_and_typed_values():
    text = "AdaKVPress:press=(SnapKVPress:window_size=16),alpha_safeguard=0.5,a=true,b=key"

    assert spec_of(text) == {
        "name": "AdaKVPress",
        "options": {"press": SNAP, "alpha_safeguard": 0.5, "a": True, "b": "key"},
    }
    assert all(spec_of(text)["name"] for text in PRESSES)


@pytest.mark.parametrize("text", ["Snap KV", "SnapKVPress:window_size", "A:press=(B:(c=1)"])
def test_invalid_text_of_a_press_is_refused(text):
    with pytest.raises(ConfigError, match=r"expected|parentheses"):
        chosen_presses(text, ("25%",))


def test_cap_becomes_the_fraction_that_is_removed():
    assert removed_of("25%") == 0.75
    assert removed_of("100%") == 0.0
    assert str(entry_of("KnormPress", "25%", "prefill_end")) == "kvpress/KnormPress 25% prefill_end"
    assert entry_of("KnormPress", "25%", "prefill_end").evict == ""


@pytest.mark.parametrize("budget", ["64", "0%", "2MiB", "101%", "x%"])
def test_other_caps_than_fractions_are_refused(budget):
    with pytest.raises(ConfigError, match=f"fractions of the prompt.*{budget!r}"):
        chosen_presses("KnormPress", (budget,))


def test_presses_that_are_not_run_have_a_reason():
    found = left_out(["KnormPress", "DMSPress", "TOVAPress"], ["KnormPress"])

    assert found == {
        "DMSPress": "set a threshold, not a budget",
        "TOVAPress": "not among --presses",
    }


def test_python_without_kvpress_is_refused():
    with pytest.raises(
        ConfigError, match=r"got .*: ModuleNotFoundError: No module named 'kvpress'"
    ):
        PressProcess(Path(sys.executable), ABOUT)


def test_presses_become_rows_and_those_that_differ_at_ratio_0_are_refused(llm, full, tmp_path):
    board = with_presses(llm, full, tmp_path)

    result = result_of(board)
    rows = {(row.entry.rule, row.entry.budget): row for row in result.rows}
    assert {key for key in rows if key[0] != "full"} == {
        (f"{KVPRESS}/{name}", budget)
        for name in ("KnormPress", "MaskPress")
        for budget in ("50%", "25%")
    }
    row, masked = rows[f"{KVPRESS}/KnormPress", "25%"], rows[f"{KVPRESS}/MaskPress", "25%"]
    assert (row.visible, masked.visible) == (0.25, 0.25)
    assert row.quality.mean == 0.0  # the stub's output for a removed token is wrong
    assert frees_memory(row)
    assert not frees_memory(masked)
    assert not frees_memory(result.reference)
    refused = {str(key): why for key, why in board.refused.items()}
    assert refused == {
        f"{KVPRESS}/WrongPress 50%,25% prefill_end": (
            "at a compression ratio of 0 its scores of repeats are not full KV's"
        ),
        f"{KVPRESS}/RefusedPress 50%,25% prefill_end": "AssertionError: too short",
    }
    assert jobs(tmp_path)[:3] == [
        f" 0.0 prefill_end {COUNT}",
        f"KnormPress 0.0 prefill_end {CHECKED_PROMPTS}",
        f"KnormPress 0.5 prefill_end {COUNT}",
    ]


def test_environment_with_other_scores_than_full_kv_is_refused(llm, full, tmp_path):
    python = stub(tmp_path, outputs_of(llm, *full, changed=True))

    with pytest.raises(ConfigError, match=r"task 'repeats' as full KV does \(1\), got 0 without"):
        with_presses(llm, full, tmp_path, python=python)


def test_pages_show_which_presses_free_memory(llm, full, tmp_path):
    board, about = run_presses(llm, full, tmp_path)
    result = result_of(board)

    section = list(press_lines(result.rows, about))
    text = page(result, "quire-tiny", has_chart=False, section=section)

    section = text[text.index("## Presses of kvpress") : text.index("## All entries")]
    assert "another environment (kvpress 0)" in section
    assert "* set a threshold, not a budget: `DMSPress`" in section
    [knorm] = [line for line in section.splitlines() if line.startswith("| `KnormPress` | 25%")]
    [mask] = [line for line in section.splitlines() if line.startswith("| `MaskPress` | 25%")]
    assert knorm.endswith("| 0.250 | yes |")
    assert mask.endswith("| 0.250 | no |")
    assert "| `kvpress/KnormPress` | 25% | prefill_end | `none` | 0.000" in text
    assert b"kvpress, prefill_end" in chart(result)


def test_rules_and_presses_of_the_same_method_are_compared(llm, full, tmp_path):
    board, about = run_presses(llm, full, tmp_path)
    result = result_of(board)
    [press] = [row for row in result.rows if str(row.entry) == "kvpress/KnormPress 50% prefill_end"]
    entries = (
        entry_of("TOVAPress", "50%", "prefill_end"),
        BoardEntry("tova", "50%", "prefill_end", "none"),
        entry_of("KeyDiffPress", "50%", "prefill_end"),
        BoardEntry("keydiff", "50%", "prefill_end", "none"),
        BoardEntry("sinks", "50%", "prefill_end", "none"),
    )
    rows = [replace(press, entry=entry) for entry in entries]
    rows[-2] = replace(rows[-2], scores={TASK: 0.5})

    text = "\n".join(press_lines([*result.rows, *rows], about))

    assert "1 of 2 pairs have equal scores on every task" in text
    assert "| `tova` | `TOVAPress` | 50% | 0.000 | 0.000 |" in text
    assert "The same method" not in "\n".join(press_lines(result.rows, about))


def test_rows_of_another_run_are_added_if_full_kv_is_the_same(llm, full, tmp_path):
    board, _ = full
    plain = BoardResult.of(board)
    pressed = result_of(with_presses(llm, full, tmp_path))
    stored = BoardResult.stored(
        json.loads(json.dumps({"arms": pressed.arms(), "config": pressed.options()}))
    )

    joined = plain.joined(stored)

    assert joined.arms() == pressed.arms() == stored.arms()
    assert joined.joined(stored).arms() == joined.arms()  # not twice
    with pytest.raises(ConfigError, match="rows of another source, got one without"):
        plain.joined(plain)
    with pytest.raises(ConfigError, match="same prompts and the same full KV"):
        plain.joined(replace(stored, tokens=512))


SMALL = (
    *("kvpress", "quire-tiny", "--kv-memory", "8MiB", "--dtype", "float32", "--tasks", "repeats"),
    *("--budgets", "50%", "--schedules", "prefill_end", "--num-prompts", "3", "--seeds", "1"),
    *("--tokens", "200", "--json"),
)


def invoke(*arguments):
    return CliRunner().invoke(app, [*SMALL, *map(str, arguments)])


def test_the_command_writes_rows_that_a_leaderboard_takes(llm, full, tmp_path):
    python = stub(tmp_path, outputs_of(llm, *full))

    run = invoke("--python", python, "--presses", "KnormPress", "--out", tmp_path / "out")

    assert run.exit_code == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["claims"] == {"kvpress_entries": 1}
    assert result["arms"]["presses"]["versions"] == {"kvpress": "0"}
    stored = json.loads((tmp_path / "out" / "kvpress.json").read_text(encoding="utf-8"))
    assert stored["arms"] == result["arms"]


def test_options_of_the_command_are_refused_before_a_cell_runs(tmp_path):
    missing = invoke("--python", tmp_path / "python", "--out", tmp_path)
    cap = invoke("--budgets", "64", "--python", "python", "--out", tmp_path)

    assert missing.exit_code == cap.exit_code == 2
    assert f"got {tmp_path / 'python'}: No such file" in " ".join(missing.stderr.split())
    assert "fractions of the prompt" in cap.stderr
    assert not list(tmp_path.iterdir())


KVPRESS_PYTHON = os.environ.get("QUIRE_KVPRESS_PYTHON")
REAL = "KnormPress;AdaKVPress:press=(KeyDiffPress);SnapKVPress:window_size=16;NopePress"


@pytest.mark.slow
@pytest.mark.skipif(
    KVPRESS_PYTHON is None, reason="QUIRE_KVPRESS_PYTHON names no environment with kvpress"
)
def test_presses_of_kvpress_become_rows(tmp_path):
    schedules = ("--schedules", "prefill_end,prefill_and_decode")
    run = invoke("--python", KVPRESS_PYTHON, "--presses", REAL, *schedules, "--out", tmp_path)

    assert run.exit_code == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    rows = {
        (row["entry"]["rule"], row["entry"]["schedule"]): row
        for row in result["arms"]["rows"]
        if row["entry"]["source"] == "kvpress"
    }
    knorm = rows["kvpress/KnormPress", "prefill_end"]
    masks = rows["kvpress/AdaKVPress:press=(KeyDiffPress)", "prefill_end"]
    assert ("kvpress/KnormPress", "prefill_and_decode") in rows
    assert result["claims"]["kvpress_entries"] == len(rows) == 5
    assert knorm["visible"] == pytest.approx(0.5, abs=0.01)
    assert masks["visible"] == pytest.approx(0.5, abs=0.01)
    assert knorm["retained_share"] < 0.55 < masks["retained_share"]
    assert result["arms"]["presses"]["versions"]["kvpress"]
    refused = result["arms"]["refused"]
    [nope] = {why for entry, why in refused.items() if "NopePress" in entry}
    assert nope == "ValueError: this version of kvpress has no press 'NopePress'"
    snap = refused["kvpress/SnapKVPress:window_size=16 50% prefill_and_decode"]
    assert snap == "AssertionError: Query length 1 should be greater than the window size 16"
