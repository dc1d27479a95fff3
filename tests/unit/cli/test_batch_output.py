import os
from dataclasses import replace
from pathlib import Path

import pytest

from quire.cli.batch_files import BatchOutput, RunState, survey_of, write_atomically
from quire.errors import ConfigError
from support.command_line import read_records

STATE = RunState(input_sha256="abc", input_lines=9, config={"model": "m", "stop": ("a",)}, seed=5)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def start(path: Path, state: RunState = STATE, *, overwrite: bool = False) -> BatchOutput:
    return BatchOutput(path, path.with_name("in.jsonl"), state, overwrite=overwrite)


def fill(path: Path, *numbers: int) -> bytes:
    with start(path) as output:
        output.write([{"line": number, "text": f"é {number}"} for number in numbers])
    return path.read_bytes()


def test_records_are_written_to_disk_by_flush_and_at_an_exception(path: Path):
    with start(path) as output:
        output.write([{"line": 1}, {"line": 2}])
        before = path.read_bytes()
        held = output.num_held
        output.flush()

        assert (before, held, output.num_held) == (b"", 2, 0)
        assert [record["line"] for record in read_records(path)] == [1, 2]

    output = start(path)
    output.write([{"line": 4}])
    output.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    with start(path) as output:
        assert output.completed == {1, 2, 4}


def test_truncated_line_is_removed_and_not_completed(path: Path):
    whole = fill(path, 1, 2, 3)
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        num_whole = whole[:length].count(b"\n")

        with start(path) as output:
            assert output.completed == set(range(1, num_whole + 1))

        assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:num_whole])
    path.write_bytes(whole[:-3])
    assert fill(path, 3) == whole  # on a new line


def seeds(path: Path, content: str) -> dict[int, int]:
    source = path.with_name("in.jsonl")
    source.write_text(content)
    found = survey_of(source)
    state = replace(STATE, line_digests=found.line_digests)
    with start(path, state, overwrite=True) as output, source.open("rb") as lines:
        return {n: output.seed_of(n, raw) for n, raw in enumerate(lines, start=1)}


def test_seed_of_a_line_follows_its_content_and_equal_lines_differ(path: Path):
    first = seeds(path, "\ufeffa\nb\na\n")
    moved = seeds(path, "corrected\na \nb\na")

    assert len(set(moved.values())) == 4
    assert first == {1: moved[2], 2: moved[3], 3: moved[4]}
    path.unlink()
    Path(f"{path}.state").unlink()
    fill(path, 1)  # a restarted run keeps its first seed
    with start(path, replace(STATE, config={"model": "m", "stop": ["a"]}, seed=77)) as output:
        assert output.seed == 5


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (RunState("other", 9, STATE.config, 5), "another input"),
        (RunState("abc", 9, {"model": "n", "stop": ["a"]}, 5), "model: 'm' before, 'n' now"),
        (RunState("abc", 9, {"model": "m"}, 5), "stop"),
        (
            RunState("abc", 9, {**STATE.config, **dict.fromkeys("edcba", 1), "f": None}, 5),
            r"other options \(a, b, c and 2 more: new since the file was written\); use",
        ),
    ],
)
def test_output_of_another_run_is_refused_and_unchanged(path: Path, state, reason):
    whole = fill(path, 1)
    with pytest.raises(ConfigError, match=reason):
        start(path, state)
    assert path.read_bytes() == whole


def test_overwrite_replaces_records_and_state(path: Path):
    fill(path, 1)
    other = RunState("other", 2, {}, 1)
    with start(path, other, overwrite=True) as output:
        assert output.completed == set()
    assert path.read_bytes() == b""
    with start(path, other) as output:
        assert output.seed == 1


def test_files_of_others_concurrent_runs_and_irregular_paths_are_refused(path, tmp_path):
    path.write_text("my notes\n")
    with pytest.raises(ConfigError, match="not an output of quire batch"):
        start(path)
    assert path.read_text() == "my notes\n"
    path.write_text("")  # an empty file is accepted
    fill(path, 1)
    with start(path), pytest.raises(ConfigError, match="another quire batch"):
        start(path)
    start(path).__exit__(None, None, None)

    for folder in (tmp_path, tmp_path / "nowhere" / "out.jsonl"):
        with pytest.raises(ConfigError, match="cannot be written"):
            start(folder)
    with pytest.raises(ConfigError, match="not a regular file"):
        start(Path(os.devnull))


@pytest.mark.parametrize("failing", range(1, 5))
def test_change_of_the_input_survives_a_fault_at_any_write(path: Path, monkeypatch, failing):
    source = path.with_name("in.jsonl")

    def state_of(*ids: str) -> RunState:
        source.write_text("".join(f'{{"id": "{name}"}}\n' for name in ids))
        survey = survey_of(source)
        return RunState(survey.sha256, survey.lines, STATE.config, 5, survey.line_digests)

    with start(path, state_of("a", "b", "c")) as output:
        output.write([{"line": 2, "id": "b"}, {"line": 1, "id": "a"}])
    changed, calls = state_of("x", "a", "b"), iter(range(1, 9))
    move = Path.replace

    def fail_once(one: Path, other: Path) -> Path:
        if next(calls) == failing:
            raise OSError(28, "No space left on device")
        return move(one, other)

    monkeypatch.setattr(Path, "replace", fail_once)
    with pytest.raises(ConfigError, match="No space left"):
        start(path, changed)

    with start(path, changed) as output:
        assert output.completed == {2, 3}
        assert output.seed == 5
    assert read_records(path) == [{"line": 3, "id": "b"}, {"line": 2, "id": "a"}]
    names = {source.name, path.name, "out.jsonl.state"}
    assert {one.name for one in path.parent.iterdir()} == names


NO_OBJECTS = ("", "{", "[]", "{}")


def test_invalid_records_with_their_line_numbers_and_damaged_states_are_refused(path: Path):
    first = fill(path, 1)
    for line in (*NO_OBJECTS, '{"line": 0}', '{"line": 10}', '{"line": 1}', '{"line": "2"}'):
        whole = first + line.encode() + b"\n"
        path.write_bytes(whole)
        with pytest.raises(ConfigError, match="line 2 is not a record"):
            start(path)
        assert path.read_bytes() == whole
    path.write_bytes(first)
    for state in (*NO_OBJECTS, "null", '"x"'):
        Path(f"{path}.state").write_text(state)
        with pytest.raises(ConfigError, match="--overwrite"):
            start(path)


def test_file_that_was_replaced_before_it_was_locked_is_refused(path: Path, monkeypatch):
    fill(path, 1)

    def replaced(*_: object) -> None:
        path.with_name("other").write_bytes(path.read_bytes())
        path.with_name("other").replace(path)

    monkeypatch.setattr("quire.cli.batch_files.fcntl.flock", replaced)
    with pytest.raises(ConfigError, match="another quire batch has replaced"):
        start(path)


def test_full_disk_raises_an_error_and_keeps_written_records(path: Path, monkeypatch):
    whole = fill(path, 1)
    output = start(path)
    output.write([{"line": 2}])

    write_atomically(path.with_name("state"), "old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left"):
        output.flush()
    with pytest.raises(ConfigError):
        write_atomically(path.with_name("state"), "new")
    assert path.with_name("state").read_text() == "old"
    monkeypatch.undo()
    output.__exit__(None, None, None)
    assert path.read_bytes().startswith(whole)


ERRORS = ({"line": 1, "error": None}, {"line": 2, "error": "x"}, {"line": 3, "error": {"code": 1}})


def test_failed_lines_are_dropped_by_a_retry_under_the_lock_unless_it_fails(path, monkeypatch):
    with start(path) as output:
        output.write(ERRORS)
        assert output.failed == {2, 3}
    with start(path) as output:
        assert (output.failed, output.completed) == ({2, 3}, {1, 2, 3})

    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(ConfigError, match="No space left"):
            BatchOutput(path, path, STATE, overwrite=False, retry_failed=True)
    assert path.read_bytes() == before
    with BatchOutput(path, path, STATE, overwrite=False, retry_failed=True) as output:
        assert (output.completed, output.failed) == ({1}, set())
        assert [record["line"] for record in read_records(path)] == [1]
        with pytest.raises(ConfigError, match="being written"):
            start(path)
        output.write([{"line": 2, "error": None}])

    assert [record["line"] for record in read_records(path)] == [1, 2]


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")
