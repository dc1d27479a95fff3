"""The output of `quire batch`: whole lines only, each input line once, whenever it is killed.

    OUT.jsonl         records, appended in groups: one write, then fsync
    OUT.jsonl.state   which input and which options they belong to, written before the first record

A kill can only leave a half last line; the next start cuts it off. What is answered is read from
the records themselves, so there is no second book that could disagree.
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
_START_OVER = "give --overwrite to start over, or another output"


@dataclass(frozen=True, slots=True)
class RunState:
    """What a run is of: equal states may share an output.

    Attributes:
        input_sha256: of the whole input file.
        input_lines: lines of it.
        config: every option that changes answers, JSON values.
        seed: of the lines that set none; line n draws with seed + n. A run that is continued goes
            on with the seed it began with.
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
        """What makes another state's records not ours; None where nothing does."""
        mine = self._content()
        if mine["input_sha256"] != other.get("input_sha256"):
            return "it was made from another input, or the input has changed since"
        theirs = other.get("config")
        theirs = theirs if isinstance(theirs, dict) else {}
        changed = [
            f"{key}: {theirs.get(key)!r} then, {mine['config'].get(key)!r} now"
            for key in sorted(mine["config"].keys() | theirs.keys())
            if mine["config"].get(key) != theirs.get(key)
        ]
        return f"it was made with other options ({'; '.join(changed)})" if changed else None


class BatchOutput:
    """An output file, open for appending and locked against a second writer.

    Use as a context manager; leaving it writes what is still held back.

    Args:
        path: of the records.
        state: of this run.
        overwrite: throw away what is there.
        retry_failed: throw away records of errors, so that their lines are tried again.

    Attributes:
        answered: numbers of the input lines that have a record.
        failed: of them, those whose record tells of an error.
        seed: of this run, from its first start.

    Raises:
        ConfigError: it belongs to another run, is damaged, in use, or cannot be written.
    """

    def __init__(
        self, path: Path, state: RunState, *, overwrite: bool, retry_failed: bool = False
    ) -> None:
        self.path = path
        self._state = state
        self._held: list[bytes] = []
        self.answered: set[int] = set()
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
        """Hold records back until `flush`."""
        self.failed |= {record["line"] for record in records if record.get("error") is not None}
        self._held += [json.dumps(record).encode() + b"\n" for record in records]

    @property
    def num_held(self) -> int:
        """Records that a kill would lose."""
        return len(self._held)

    def flush(self) -> None:
        """Bring all records to the disk.

        Raises:
            ConfigError: the disk is full or gone; what was written before stays good.
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
            raise ConfigError(f"{self.path} is no regular file, so a run could not be continued")
        self._lock()
        if overwrite:
            # emptied before its state changes: no record ever stands under a foreign state
            self._file.truncate(0)
        if not self._file.seek(0, os.SEEK_END):
            write_atomically(self._state_path, self._state.as_json())
            return
        self._check_state()
        self.answered = self._scan()

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
                f"{self.path} is there already and is no output of quire batch "
                f"({self._state_path.name} is missing); {_START_OVER}"
            ) from error
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self._state_path} cannot be read ({error}); {_START_OVER}"
            ) from error
        found = found if isinstance(found, dict) else {}
        difference = self._state.difference(found)
        if difference:
            raise ConfigError(f"{self.path} cannot be continued: {difference}; {_START_OVER}")
        seed = found.get("seed")
        self.seed = seed if isinstance(seed, int) else self.seed

    def _scan(self) -> set[int]:
        answered: set[int] = set()
        whole_bytes = 0
        self._file.seek(0)
        with self.path.open("rb") as lines:
            for count, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    break
                answered.add(self._number(line, count, answered))
                whole_bytes += len(line)
        self._file.truncate(whole_bytes)
        return answered

    def _number(self, line: bytes, count: int, answered: set[int]) -> int:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        number, error = None, None
        if isinstance(record, dict):
            number, error = record.get("line"), record.get("error")
        last = self._state.input_lines
        if not isinstance(number, int) or not 1 <= number <= last or number in answered:
            raise ConfigError(
                f"{self.path} is damaged: its line {count} is no record of a line that has none "
                f"before; remove that line to have it answered again, or {_START_OVER}"
            )
        if error is not None:
            self.failed.add(number)
        return number

    def _drop_failed(self) -> None:
        """Put the other records in the place of all: at once, so that a kill loses none of them."""
        with self.path.open("rb") as lines:
            kept = [line for line in lines if json.loads(line)["line"] not in self.failed]
        replace_atomically(self.path, b"".join(kept))
        self._file.close()  # it was the old file, and so was its lock
        self._file = self.path.open("ab+", buffering=0)
        self._lock()
        self.answered -= self.failed
        self.failed.clear()


def state_path(path: Path) -> Path:
    """Where the state of an output lies: beside it."""
    return path.with_name(path.name + STATE_SUFFIX)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file of text; see `replace_atomically`."""
    replace_atomically(path, text.encode())


def replace_atomically(path: Path, content: bytes) -> None:
    """Replace a file by a whole new one: whoever reads it sees the old or the new, never a part.

    Raises:
        ConfigError: it cannot be written.
    """
    beside = path.with_name(path.name + ".new")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path} cannot be written: {error.strerror or error}")
