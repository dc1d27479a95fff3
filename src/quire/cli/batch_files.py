"""The files of `quire batch`: the input, and the output with one record per input line.

    OUT.jsonl           records, appended in groups: one write, then fsync
    OUT.jsonl.state     input and options of the run, written before the first record
    OUT.jsonl.changed   the records with the line numbers of a changed input, for a moment

A kill can leave an incomplete last line; the next start truncates it. Completed lines are read from
the records themselves, so that no second file can contradict them. If the input has changed, its
lines find their records by their content. The new records and then the new state are complete on
disk before they replace the old records: the next start completes a replacement after a kill.
"""

import codecs
import hashlib
import json
import os
import stat
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import typer

from quire.batch.lines import BatchError, LineFormat, line_head, line_seed, parse_line
from quire.batch.records import moved_record
from quire.errors import ConfigError

if sys.platform != "win32":
    import fcntl

DIGEST_CHARACTERS = 16
"""Hexadecimal characters of the digest of a line."""

_CHANGED = "changed"
"""Suffix of the file with changed records, and the member of the state while they are replaced."""

_MAX_NEW = 3
"""Options of later versions that a message names."""

_START_OVER = "use --overwrite to start over, or another output file"


@dataclass(frozen=True, slots=True)
class RunState:
    """Identity of a run: a run may resume an output with an equal state."""

    input_sha256: str
    input_lines: int
    config: Mapping[str, Any]  # every option that changes outputs, as JSON values
    # of lines without one, with their content; a resumed run keeps that of its first start
    seed: int
    line_digests: str = ""  # DIGEST_CHARACTERS of each line; empty in files of earlier versions

    def content(self) -> dict[str, Any]:
        # through JSON and back: tuples become lists, as in the file
        whole: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return whole

    def difference(self, other: Mapping[str, Any]) -> str | None:
        current, earlier = self.content()["config"], other.get("config")
        earlier = earlier if isinstance(earlier, dict) else {}
        changed = [
            key
            for key in sorted(current.keys() | earlier.keys())
            if current.get(key) != earlier.get(key)
        ]
        new = [key for key in changed if key not in earlier]
        listed = [
            f"{key}: {earlier[key]!r} before, {current.get(key)!r} now"
            for key in changed
            if key in earlier
        ]
        if new:  # of a version of Quire after that which wrote the file
            more = f" and {len(new) - _MAX_NEW} more" if len(new) > _MAX_NEW else ""
            listed.append(f"{', '.join(new[:_MAX_NEW])}{more}: new since the file was written")
        return f"other options ({'; '.join(listed)})" if listed else None


class BatchOutput:
    """An output file, open for appending and locked against a second writer.

    Use as a context manager; its exit writes the buffered records.

    Attributes:
        completed: numbers of the input lines with a record.
        failed: numbers of the input lines with an error record.
        seed: seed of this run, from its first start.
        repeats: by the number of a line, how many lines before it are equal, if any.
    """

    def __init__(
        self,
        path: Path,
        source: Path,
        state: RunState,
        *,
        overwrite: bool,
        retry_failed: bool = False,
    ) -> None:
        self.path = path
        self._source, self._state = source, state
        self._held: list[bytes] = []
        self.completed: set[int] = set()
        self.failed: set[int] = set()
        self.seed = state.seed
        seen: Counter[str] = Counter()
        self.repeats: dict[int, int] = {}
        for number, digest in enumerate(_digests(state.line_digests), start=1):
            if seen[digest]:
                self.repeats[number] = seen[digest]
            seen[digest] += 1
        try:
            self._file: BinaryIO = path.open("ab+", buffering=0)
        except OSError as error:
            raise _unwritable(path, error) from error
        try:
            self._open(overwrite=overwrite, may_discard=retry_failed)
            if retry_failed and self.failed:
                self._drop_failed()
        except OSError as error:
            self._file.close()
            raise _unwritable(path, error) from error
        except BaseException:
            self._file.close()
            raise

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        self.failed |= {record["line"] for record in records if record.get("error") is not None}
        self._held += [json.dumps(record).encode() + b"\n" for record in records]

    def seed_of(self, number: int, raw: bytes) -> int:
        return line_seed(self.seed, raw, self.repeats.get(number, 0))

    @property
    def num_held(self) -> int:
        return len(self._held)

    def flush(self) -> None:
        """Write all buffered records to disk."""
        if not self._held:
            return
        group = memoryview(b"".join(self._held))
        self._held.clear()
        try:
            while group:
                group = group[self._file.write(group) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def __enter__(self) -> "BatchOutput":
        return self

    def __exit__(self, *raised: object) -> None:
        try:
            self.flush()
        finally:
            self._file.close()

    # ---- opening -------------------------------------------------------------------------------

    def _open(self, *, overwrite: bool, may_discard: bool) -> None:
        if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            raise ConfigError(f"{self.path} is not a regular file, so a run could not be resumed")
        self._lock()
        if overwrite:
            self._changed_path.unlink(missing_ok=True)
            # truncated before the state changes: records must never appear with another run's state
            self._file.truncate(0)
        if not self._file.seek(0, os.SEEK_END):
            self._write_state(self._state.content())
            return
        found = self._earlier_state()
        if found.pop(_CHANGED, False):  # a kill interrupted the replacement of the records
            self._replace_records(found)
        self._changed_path.unlink(missing_ok=True)  # of a replacement that did not begin
        earlier = str(found.get("line_digests") or "")
        is_same = found.get("input_sha256") == self._state.input_sha256
        if not is_same and not earlier:
            raise self._of_another_input()
        last = self._state.input_lines if is_same else len(earlier) // DIGEST_CHARACTERS
        self.completed = self._scan(last)
        if is_same and not earlier:
            self._write_state(replace(self._state, seed=self.seed).content())
        if not is_same:
            self._follow_input(_digests(earlier), may_discard=may_discard)

    def _of_another_input(self) -> ConfigError:
        return ConfigError(
            f"{self.path} cannot be resumed: the records belong to another input, or the input "
            f"has changed; {_START_OVER}"
        )

    def _follow_input(self, earlier: Sequence[str], *, may_discard: bool) -> None:
        """Give the records the numbers that their lines have in the changed input."""
        current = _digests(self._state.line_digests)
        pairs = enumerate(zip(earlier, current, strict=False), start=1)
        numbers = {n: n for n, (old, new) in pairs if old == new and n in self.completed}
        free: dict[str, deque[int]] = defaultdict(deque)
        for number, digest in enumerate(current, start=1):
            if number not in numbers:
                free[digest].append(number)
        for number in sorted(self.completed - numbers.keys()):
            if lines := free[earlier[number - 1]]:
                numbers[number] = lines.popleft()
        total, gone = len(self.completed), len(self.completed) - len(numbers)
        if not numbers and self.completed - self.failed:
            raise self._of_another_input()
        if gone and not may_discard:
            raise ConfigError(
                f"{self.path} cannot be resumed: {gone:,} of {total:,} records belong to "
                "lines that were changed or removed; --retry-failed discards them and runs changed "
                f"lines; {_START_OVER}"
            )
        replace_atomically(self._changed_path, self._moved(numbers))
        content = replace(self._state, seed=self.seed).content()
        self._write_state(content | {_CHANGED: True})
        self._replace_records(content)
        self.failed = {numbers[n] for n in self.failed if n in numbers}
        self.completed = set(numbers.values())
        discarded = f"; {gone:,} of changed or removed lines are discarded" if gone else ""
        kept = f"{len(numbers):,} of {total:,} records are kept{discarded}"
        typer.echo(f"the input has changed: {kept}", err=True)

    def _moved(self, numbers: Mapping[int, int]) -> bytes:
        """The records of these lines, with new numbers."""
        moved = {new for old, new in numbers.items() if old != new}
        with self._source.open("rb") as lines:
            heads = {n: line_head(raw, n) for n, raw in enumerate(lines, start=1) if n in moved}
        if moved - heads.keys():
            raise ConfigError(f"{self._source} has changed while it was read; start again")
        written = []
        with self.path.open("rb") as lines:
            for line in lines:
                record = json.loads(line)
                new = numbers.get(record["line"])
                if new in heads:
                    written.append(json.dumps(moved_record(record, heads[new])).encode() + b"\n")
                elif new is not None:
                    written.append(line)
        return b"".join(written)

    def _replace_records(self, state: Mapping[str, Any]) -> None:
        """Put the changed records into place, if that is not done yet, and then their state."""
        if self._changed_path.exists():
            self._changed_path.replace(self.path)
            self._reopen()
        self._write_state(state)

    def _write_state(self, content: Mapping[str, Any]) -> None:
        write_atomically(self._state_path, json.dumps(content) + "\n")

    def _reopen(self) -> None:
        self._file.close()  # file and lock of the replaced file
        self._file = self.path.open("ab+", buffering=0)
        self._lock()

    @property
    def _changed_path(self) -> Path:
        return self.path.with_name(f"{self.path.name}.{_CHANGED}")

    @property
    def _state_path(self) -> Path:
        return state_path(self.path)

    def _lock(self) -> None:
        if sys.platform == "win32":
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{self.path} is being written by another quire batch") from error
        if os.fstat(self._file.fileno()).st_ino != self.path.stat().st_ino:
            raise ConfigError(f"another quire batch has replaced {self.path}; start this one again")

    def _earlier_state(self) -> dict[str, Any]:
        try:
            found = json.loads(self._state_path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ConfigError(
                f"{self.path} exists and is not an output of quire batch "
                f"({self._state_path.name} is missing); {_START_OVER}"
            ) from error
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self._state_path} cannot be read ({error}); {_START_OVER}"
            ) from error
        found = found if isinstance(found, dict) else {}
        difference = self._state.difference(found)
        if difference:
            raise ConfigError(f"{self.path} cannot be resumed: {difference}; {_START_OVER}")
        seed = found.get("seed")
        self.seed = seed if isinstance(seed, int) else self.seed
        return found

    def _scan(self, last: int) -> set[int]:
        completed: set[int] = set()
        whole_bytes = 0
        self._file.seek(0)
        with self.path.open("rb") as lines:
            for count, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    break
                completed.add(self._number(line, count, completed, last))
                whole_bytes += len(line)
        self._file.truncate(whole_bytes)
        return completed

    def _number(self, line: bytes, count: int, completed: set[int], last: int) -> int:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        number, error = None, None
        if isinstance(record, dict):
            number, error = record.get("line"), record.get("error")
        if not isinstance(number, int) or not 1 <= number <= last or number in completed:
            raise ConfigError(
                f"{self.path} is damaged: line {count} is not a record, or a second record of an "
                f"input line; remove line {count} to run the input line again, or {_START_OVER}"
            )
        if error is not None:
            self.failed.add(number)
        return number

    def _drop_failed(self) -> None:
        """Remove error records by replacing the file atomically: a kill loses no other record."""
        with self.path.open("rb") as lines:
            retained = [line for line in lines if json.loads(line)["line"] not in self.failed]
        replace_atomically(self.path, b"".join(retained))
        self._reopen()
        self.completed -= self.failed
        self.failed.clear()


def _digests(text: str) -> list[str]:
    return [text[i : i + DIGEST_CHARACTERS] for i in range(0, len(text), DIGEST_CHARACTERS)]


def state_path(path: Path) -> Path:
    """Path of the state file of an output file, in the same folder."""
    return path.with_name(path.name + ".state")


def write_atomically(path: Path, text: str) -> None:
    """Replace a text file; see `replace_atomically`."""
    replace_atomically(path, text.encode())


def replace_atomically(path: Path, content: bytes) -> None:
    """Replace a file atomically: readers see the old or the new content, never a partial one."""
    temporary = path.with_name(path.name + ".new")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path} cannot be written: {error.strerror or error}")


@dataclass(frozen=True, slots=True)
class RepeatedName:
    """A duplicate name."""

    key: str  # custom_id or id
    name: str | int
    earlier: int  # number of the first line with the name
    line: int


class Names:
    """The names of all added lines."""

    def __init__(self) -> None:
        self.models: dict[str, int] = {}
        self.first: RepeatedName | None = None
        self.num_repeated = 0
        self._lines: dict[tuple[str, str | int], int] = {}

    def add(self, raw: bytes, number: int) -> None:
        if b'id"' not in raw and b'"model"' not in raw:
            return
        try:
            value = json.loads(raw.decode("utf-8-sig"))
        except (ValueError, RecursionError):  # the line gets an error record when it is run
            return
        for key in ("custom_id", "id") if isinstance(value, dict) else ():
            name = value.get(key)
            if isinstance(name, str | int) and not isinstance(name, bool):
                self._note(key, name, number)
        if isinstance(value, dict):
            body = value.get("body", value)
            model = body.get("model") if isinstance(body, dict) else None
            if isinstance(model, str):
                self.models.setdefault(model, number)

    def _note(self, key: str, name: str | int, number: int) -> None:
        earlier = self._lines.setdefault((key, name), number)
        if earlier == number:
            return
        self.num_repeated += 1
        if self.first is None:
            self.first = RepeatedName(key, name, earlier, number)


@dataclass(frozen=True, slots=True)
class Survey:
    """Summary of the input file, from one pass over it."""

    sha256: str  # of the whole file
    lines: int
    requests: int  # lines that are not blank
    repeated: RepeatedName | None  # the first duplicate name
    num_repeated: int  # lines with the name of an earlier line
    models: Mapping[str, int]  # model named in a body, to the number of the first such line
    line_digests: str  # DIGEST_CHARACTERS of each line


def refuse_one_file_for_two(source: Path, target: Path, kv_events: Path | None) -> None:
    """Refuse output files that are equal to each other or to the input, before writing."""
    if target.is_dir():
        raise ConfigError(
            f"expected a file for the records, got folder {target}: name a file in it, such as "
            f"{target / 'records.jsonl'}"
        )
    if _is_same(target, source):
        raise ConfigError(f"{target} is the input; give another file for the records")
    uses = {source: "the input", target: "for the records", state_path(target): "their state"}
    for path, use in uses.items():
        if kv_events is not None and _is_same(kv_events, path):
            raise ConfigError(f"{kv_events} is {use}; give another file to --kv-events")


def _is_same(one: Path, other: Path) -> bool:
    """Whether two paths name the same file, existing or not; follows links."""
    try:
        if one.exists() and other.exists():
            return one.samefile(other)
        return one.resolve() == other.resolve()
    except OSError:  # opening the file reports the error
        return False


def survey_of(source: Path) -> Survey:
    """Read the input file once."""
    digest, lines, requests, names = hashlib.sha256(), 0, 0, Names()
    line_digests = []
    try:
        if not source.is_file():
            wrong = "not a regular file" if source.exists() else "no such file"
            raise ConfigError(f"expected a file of requests, got {source}: {wrong}")
        with source.open("rb") as file:
            for line in file:
                digest.update(line)
                text = line.removeprefix(codecs.BOM_UTF8) if not lines else line
                own = hashlib.blake2b(text.strip(), digest_size=DIGEST_CHARACTERS // 2)
                line_digests.append(own.hexdigest())
                lines += 1
                requests += bool(line.strip())
                names.add(line, lines)
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error.strerror}") from error
    return Survey(
        sha256=digest.hexdigest(),
        lines=lines,
        requests=requests,
        repeated=names.first,
        num_repeated=names.num_repeated,
        models=names.models,
        line_digests="".join(line_digests),
    )


def warn_of_repeated(survey: Survey) -> None:
    """Warn on standard error of names that more than one line has."""
    found = survey.repeated
    if found is None:
        return
    more = survey.num_repeated - 1
    others = f"; {more:,} more lines have a duplicate" if more else ""
    typer.echo(
        f"warning: line {found.line} has the same {found.key} {found.name!r} as line "
        f"{found.earlier}{others}. All lines run; use `line` to distinguish their records",
        err=True,
    )


def warn_of_other_models(survey: Survey, model: str) -> None:
    """Warn on standard error of lines that name another model: the loaded model runs them too."""
    others = {
        name: line
        for name, line in survey.models.items()
        if name != model and Path(name).name != Path(model).name
    }
    if others:
        name, line = next(iter(others.items()))
        more = f"; {len(others) - 1:,} more names in other lines" if len(others) > 1 else ""
        typer.echo(
            f"warning: line {line} names model {name!r}, but {model} runs all lines{more}",
            err=True,
        )


MAX_REASON_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class FirstFailure:
    """The error record with the lowest line number."""

    line: int
    reason: str  # shortened


def report_failures(
    source: Path, target: Path, failed: Collection[int], requests: int, form: LineFormat | None
) -> None:
    """Print the number of error records and the first one; without `form` a server parsed."""
    with target.open("rb") as lines:
        records = (json.loads(line) for line in lines)
        errors = ((record["line"], record["error"]) for record in records if record["error"])
        number, error = min(errors, key=lambda found: found[0])
    text = error.get("message", error) if isinstance(error, dict) else error
    reason = " ".join(str(text).split())
    if len(reason) > MAX_REASON_CHARACTERS:
        reason = reason[:MAX_REASON_CHARACTERS] + "..."
    first = FirstFailure(number, reason)
    typer.echo(f"error records: {len(failed)} of {requests} lines, in {target}", err=True)
    typer.echo(f"first error: line {first.line}: {first.reason}", err=True)
    invalid = 0 if form is None else _num_invalid(source, failed, form)
    hint = "--retry-failed runs them again, for example with more memory"
    if invalid == len(failed):
        hint = (
            "correct them in the input and use --retry-failed: the other lines keep their records"
        )
    elif invalid or form is None:
        some = f"{invalid} of them" if invalid else "invalid ones"
        hint = (
            f"correct {some} in the input; --retry-failed runs all again, for example with "
            "more memory"
        )
    typer.echo(hint, err=True)


def _num_invalid(source: Path, failed: Collection[int], form: LineFormat) -> int:
    with source.open("rb") as lines:
        return sum(
            number in failed and not _is_request(line, number, form)
            for number, line in enumerate(lines, start=1)
        )


def _is_request(line: bytes, number: int, form: LineFormat) -> bool:
    try:
        parse_line(line, number, form)
    except BatchError:
        return False
    return True


GROUP_RECORDS = 32
GROUP_S = 0.5
"""A group is written when it has `GROUP_RECORDS` records, or after `GROUP_S` seconds."""


class RecordGroups:
    """Writes records in groups, because each write waits for the disk."""

    def __init__(self, output: BatchOutput) -> None:
        self._output = output
        self._written_s = time.monotonic()

    def put(self, record: Mapping[str, Any]) -> None:
        self._output.write([record])
        if self._output.num_held >= GROUP_RECORDS or self._waited_s >= GROUP_S:
            self._flush()

    def flush_if_due(self) -> None:
        if self._output.num_held and self._waited_s >= GROUP_S:
            self._flush()

    @property
    def _waited_s(self) -> float:
        return time.monotonic() - self._written_s

    def _flush(self) -> None:
        self._output.flush()
        self._written_s = time.monotonic()
