"""A sample of absurd values for every option: one-line errors, and no traceback."""

import itertools
from collections.abc import Iterator

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from quire.cli.main import app
from quire.cli.settings import Settings
from quire.errors import QuireError
from support.option_sweep import VALUES, arguments_of, commands, options_of, problem

LOADING = ("generate", "chat", "batch", "serve", "eval gate")
HUGE = "100000000000"


@pytest.fixture(autouse=True)
def _commands_made_once(monkeypatch):
    made = get_command(app)  # of hundreds of options, which would be made for every line
    monkeypatch.setattr("typer.testing._get_command", lambda _: made)


@pytest.fixture
def stop_at_the_model(monkeypatch):
    def stop(self: object) -> None:
        self.set_threads()
        raise QuireError("a model would be loaded")

    monkeypatch.setattr(Settings, "open_llm", stop)


def ended(arguments: list[str]) -> str | None:
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return repr(result.exception)
    return problem(result.exit_code, result.stderr)


def sample(name: str) -> Iterator[str]:
    """Each option once, with one value after the other."""
    start = LOADING.index(name) if name in LOADING else 0
    values = itertools.islice(itertools.cycle(VALUES), start, None)
    for option in options_of(commands()[name]):
        yield f"{option}={next(values)}"


@pytest.mark.parametrize("name", LOADING)
def test_absurd_values_end_in_one_line_before_a_model_is_loaded(
    name, tmp_path, monkeypatch, stop_at_the_model
):
    monkeypatch.chdir(tmp_path)
    start = arguments_of(name, tmp_path)
    assert CliRunner().invoke(app, start).stderr == "error: a model would be loaded\n"

    found = {given: ended([*start, given]) for given in sample(name)}

    assert {given: wrong for given, wrong in found.items() if wrong} == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["simulate", *LOADING])
def test_all_absurd_values_end_in_one_line(name, tmp_path, monkeypatch, stop_at_the_model):
    monkeypatch.chdir(tmp_path)
    start = arguments_of(name, tmp_path)
    given = [f"{o}={value}" for o in options_of(commands()[name]) for value in VALUES]

    found = {each: ended([*start, each]) for each in given}

    assert {each: wrong for each, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize(
    "given",
    [
        f"--max-num-seqs={HUGE}",
        f"--max-num-batched-tokens={HUGE}",
        f"--chunk-tokens={HUGE}",
        f"--block-size={HUGE}",
        f"--max-tokens={HUGE}",
        f"--threads={HUGE}",
        f"--kv-memory={HUGE}TiB",
        f"--swap-space={HUGE}TiB",
        f"--batcher=baton_pd:queue={HUGE}",
        "--max-num-seqs=1000000000",
    ],
)
def test_a_huge_number_ends_in_one_line(given, zoo_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"prompt": [3, 4]}\n')
    engine = ["--kv-memory=64KiB", "--max-tokens=2", "--no-verify", "--threads=1"]

    assert ended(["batch", str(zoo_folder), "in.jsonl", "out.jsonl", *engine, given]) is None


def test_a_problem_is_what_is_neither_a_run_nor_a_refusal():
    fine = [
        (0, ""),
        (1, "x"),
        (None, ""),
        (2, "error: no\n"),
        (2, "note\nerror: no\n"),
        (2, "Usage: q"),
    ]
    wrong = [(2, ""), (2, "error: \n"), (2, "error: no\nmore\n"), (97, "error: no"), (-11, "")]

    assert [problem(*each) for each in fine] == [None] * len(fine)
    assert all(problem(*each) for each in wrong)
    assert problem(1, "Traceback (most recent call last):\n  x\nValueError: y\n") == "ValueError: y"
