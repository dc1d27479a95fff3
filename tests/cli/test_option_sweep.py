"""Invalid and extreme values for every option: one-line errors without a traceback."""

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from quire.cli.main import app
from quire.cli.settings import Settings
from quire.errors import QuireError

LOADING = ("generate", "chat", "batch", "serve")
HUGE = "100000000000"
COMMAND = get_command(app)
VALUES = ("0", "-1", "100000000000", "nan", "inf", "1e400", "", "9" * 400, "9" * 5_000)
OWN_ERROR, PARSER_ERROR = "error: ", "Usage: "


def options_of(name: str) -> list[str]:
    """Options of a command that take a value."""
    command: Any = COMMAND
    for word in name.split():
        command = command.commands[word]
    options = [p for p in command.params if p.param_type_name == "option"]
    return [p.opts[0] for p in options if not p.is_flag]


def arguments_of(name: str, folder: Path) -> list[str]:
    """Arguments of a short run of a command that needs no other option."""
    lines, trace = folder / "in.jsonl", folder / "trace.jsonl"
    lines.write_text('{"prompt": "a"}\n', encoding="utf-8")
    request = {"timestamp": 0, "input_length": 20, "output_length": 3, "hash_ids": [1]}
    trace.write_text(json.dumps(request) + "\n", encoding="utf-8")
    model = ["--kv-memory=2MiB", "--threads=1", "--no-verify"]
    engine = [*model, "--max-tokens=2"]
    own = {
        "generate": ["quire-tiny", "a", *engine],
        "chat": engine,
        "batch": ["quire-tiny", str(lines), str(folder / "out.jsonl"), "--overwrite", *engine],
        "serve": ["--port=0", *model],
        "simulate": ["quire-tiny", f"--trace={trace}"],
    }
    return [*name.split(), *own[name]]


def problem(code: object, stderr: str) -> str | None:
    """What is wrong with the end of a command; None if it is correct."""
    if "Traceback" in stderr:
        return stderr.strip().splitlines()[-1]
    if code in (None, 0, 1) or (code == 2 and PARSER_ERROR in stderr):
        return None
    lines = stderr.strip().splitlines()
    if code == 2 and lines and lines[-1].startswith(OWN_ERROR) and len(lines[-1]) > len(OWN_ERROR):
        return None
    return f"exit code {code}: {stderr[-300:]!r}"


@pytest.fixture
def stop_at_the_model(monkeypatch):
    def stop(self: object) -> None:
        self.set_threads()
        raise QuireError("a model would be loaded")

    monkeypatch.setattr(Settings, "open_llm", stop)


def problem_of(arguments: list[str]) -> str | None:
    """Run a command line as `CliRunner.invoke` does, without building all options again."""
    exit_code: object = 0
    with CliRunner().isolation() as (_, stderr, _):
        try:
            COMMAND.main(args=arguments, prog_name="quire")
        except SystemExit as end:
            exit_code = end.code
        except Exception as error:  # noqa: BLE001 - any exception is a problem
            return repr(error)
        sys.stderr.flush()
        return problem(exit_code, stderr.getvalue().decode())


def sample(name: str) -> Iterator[str]:
    """Each option once, with the values in turn."""
    start = LOADING.index(name) if name in LOADING else 0
    values = itertools.islice(itertools.cycle(VALUES), start, None)
    for option in options_of(name):
        yield f"{option}={next(values)}"


@pytest.mark.parametrize("name", LOADING)
def test_sampled_invalid_values_are_one_line_errors_before_a_model_is_loaded(
    name, tmp_path, monkeypatch, stop_at_the_model
):
    monkeypatch.chdir(tmp_path)
    start = arguments_of(name, tmp_path)
    assert CliRunner().invoke(app, start).stderr == "error: a model would be loaded\n"

    found = {option: problem_of([*start, option]) for option in sample(name)}

    assert {option: text for option, text in found.items() if text} == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["simulate", *LOADING])
def test_all_invalid_values_are_one_line_errors(name, tmp_path, monkeypatch, stop_at_the_model):
    monkeypatch.chdir(tmp_path)
    start = arguments_of(name, tmp_path)
    options = [f"{flag}={value}" for flag in options_of(name) for value in VALUES]

    found = {option: problem_of([*start, option]) for option in options}

    assert {option: text for option, text in found.items() if text} == {}


@pytest.mark.parametrize(
    "option",
    [
        *(f"--max-num-{name}={HUGE}" for name in ("seqs", "batched-tokens")),
        *(f"--{name}={HUGE}" for name in ("chunk-tokens", "block-size", "max-tokens", "threads")),
        *(f"--{name}={HUGE}TiB" for name in ("kv-memory", "swap-space")),
        *(f"--batcher=baton_pd:queue={HUGE}", "--max-num-seqs=1000000000"),
    ],
)
def test_huge_number_is_a_one_line_error(option, zoo_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"prompt": [3, 4]}\n')
    engine = ["--kv-memory=64KiB", "--max-tokens=2", "--no-verify", "--threads=1"]
    assert problem_of(["batch", str(zoo_folder), "in.jsonl", "out.jsonl", *engine, option]) is None


def test_problem_detects_results_that_are_neither_success_nor_refusal():
    valid = [(0, ""), (1, "x"), (None, ""), (2, "error: no\n"), (2, "note\nerror: no\n")]
    valid += [(2, "Usage: q")]
    invalid = [(2, ""), (2, "error: \n"), (2, "error: no\nmore\n"), (97, "error: no"), (-11, "")]
    assert [problem(*option) for option in valid] == [None] * len(valid)
    assert all(problem(*option) for option in invalid)
    assert problem(1, "Traceback (most recent call last):\n  x\nValueError: y\n") == "ValueError: y"
