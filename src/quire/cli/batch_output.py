"""The output file of `quire batch`: one record per input line, resumable after a kill.

    OUT.jsonl         records, appended in groups: one write, then fsync
    OUT.jsonl.state   input and options of the run, written before the first record

A kill can leave an incomplete last line; the next start truncates it. Completed lines are read from
the records themselves, so that no second file can contradict them.
"""

import json
import os
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from quire.errors import ConfigError

if sys.platform != "win32":
    import fcntl

STATE_SUFFIX = ".state"
_START_OVER = "use --overwrite to start over, or another output file"


@dataclass(frozen=True, slots=True)
class RunState:
    """Identity of a run: a run may resume an output with an equal state.

    Attributes:
        input_sha256: hash of the whole input file.
        input_lines: number of its lines.
        config: every option that changes outputs, as JSON values.
        seed: seed of lines without one; line n samples with seed + n. A resumed run keeps the seed
            of its first start.
    """

    input_sha256: str
    input_lines: int
    config: Mapping[str, Any]
    seed: int

    def as_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self._content()) + "\n"

    def _content(self) -> dict[str, Any]:
        # through JSON and back: tuples become lists, as in the file
        whole: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return whole

    def difference(self, other: Mapping[str, Any]) -> str | None:
        """Describe how another state differs; None if its records belong to this run."""
        content = self._content()
        if content["input_sha256"] != other.get("input_sha256"):
            return "the records belong to another input, or the input has changed"
        current, earlier = content["config"], other.get("config")
        earlier = earlier if isinstance(earlier, dict) else {}
        changed = [
            f"{key}: {earlier.get(key)!r} before, {current.get(key)!r} now"
            for key in sorted(current.keys() | earlier.keys())
            if current.get(key) != earlier.get(key)
        ]
        return f"other options ({'; '.join(changed)})" if changed else None


class BatchOutput:
    """An output file, open for appending and locked against a second writer.

    Use as a context manager; its exit writes the buffered records.

    Args:
        path: file of the records.
        state: state of this run.
        overwrite: discard existing records.
        retry_failed: discard error records, so that their lines run again.

    Attributes:
        completed: numbers of the input lines with a record.
        failed: numbers of the input lines with an error record.
        seed: seed of this run, from its first start.

    Raises:
        ConfigError: the file belongs to another run, is damaged, in use, or cannot be written.
    """

    def __init__(
        self, path: Path, state: RunState, *, overwrite: bool, retry_failed: bool = False
    ) -> None:
        self.path = path
        self._state = state
        self._held: list[bytes] = []
        self.completed: set[int] = set()
        self.failed: set[int] = set()
        self.seed = state.seed
        try:
            self._file: BinaryIO = path.open("ab+", buffering=0)
        except OSError as error:
            raise _unwritable(path, error) from error
        try:
            self._open(overwrite=overwrite)
            if retry_failed and self.failed:
                self._drop_failed()
        except OSError as error:
            self._file.close()
            raise _unwritable(path, error) from error
        except BaseException:
            self._file.close()
            raise

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Buffer records until `flush`."""
        self.failed |= {record["line"] for record in records if record.get("error") is not None}
        self._held += [json.dumps(record).encode() + b"\n" for record in records]

    @property
    def num_held(self) -> int:
        """Number of buffered records, which a kill would lose."""
        return len(self._held)

    def flush(self) -> None:
        """Write all buffered records to disk.

        Raises:
            ConfigError: the disk is full or not available; earlier records stay valid.
        """
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.flush()
        finally:
            self._file.close()

    # ---- opening -------------------------------------------------------------------------------

    def _open(self, *, overwrite: bool) -> None:
        if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            raise ConfigError(f"{self.path} is not a regular file, so a run could not be resumed")
        self._lock()
        if overwrite:
            # truncated before the state changes: records must never appear with another run's state
            self._file.truncate(0)
        if not self._file.seek(0, os.SEEK_END):
            write_atomically(self._state_path, self._state.as_json())
            return
        self._check_state()
        self.completed = self._scan()

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

    def _check_state(self) -> None:
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

    def _scan(self) -> set[int]:
        completed: set[int] = set()
        whole_bytes = 0
        self._file.seek(0)
        with self.path.open("rb") as lines:
            for count, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    break
                completed.add(self._number(line, count, completed))
                whole_bytes += len(line)
        self._file.truncate(whole_bytes)
        return completed

    def _number(self, line: bytes, count: int, completed: set[int]) -> int:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        number, error = None, None
        if isinstance(record, dict):
            number, error = record.get("line"), record.get("error")
        last = self._state.input_lines
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
        self._file.close()  # file and lock of the replaced file
        self._file = self.path.open("ab+", buffering=0)
        self._lock()
        self.completed -= self.failed
        self.failed.clear()


def state_path(path: Path) -> Path:
    """Path of the state file of an output file, in the same folder."""
    return path.with_name(path.name + STATE_SUFFIX)


def write_atomically(path: Path, text: str) -> None:
    """Replace a text file; see `replace_atomically`."""
    replace_atomically(path, text.encode())


def replace_atomically(path: Path, content: bytes) -> None:
    """Replace a file atomically: readers see the old or the new content, never a partial one.

    Raises:
        ConfigError: the file cannot be written.
    """
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
