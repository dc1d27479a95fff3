"""The processes of the ranks from 1 on: started, watched and ended by rank 0."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol, runtime_checkable

from quire.errors import QuireError, RankFailed


@runtime_checkable  # for the type checks in tests
class Messages(Protocol):
    """One end of a connection to another rank."""

    def send(self, message: object) -> None:
        """Send a message."""

    def receive(self, timeout_s: float | None = None) -> object:
        """Wait for a message."""

    def close(self) -> None:
        """Close this end."""


class Channel:
    """One end of a socket pair; see `Messages`."""

    def __init__(self, connection: Connection, peer: str) -> None:
        self._connection, self._peer = connection, peer

    def send(self, message: object) -> None:
        try:
            self._connection.send(message)
        except OSError as error:
            raise RankFailed(f"{self._peer} has closed its connection") from error

    def receive(self, timeout_s: float | None = None) -> object:
        try:
            if not self._connection.poll(timeout_s):
                raise RankFailed(f"{self._peer} did not respond within {timeout_s:g} s")
            message: object = self._connection.recv()
        except (OSError, EOFError) as error:
            raise RankFailed(f"{self._peer} has closed its connection") from error
        return message

    def close(self) -> None:
        self._connection.close()


def channel_of(end: socket.socket, peer: str) -> Channel:
    """The channel of one end of a socket pair; the socket object is used up."""
    return Channel(Connection(end.detach()), peer)


END_S = 5.0
"""Time in seconds that a process gets to end before it is killed."""

_LOOK_S = 0.5  # time in seconds for the report or the exit status of a failed process


@dataclass(frozen=True, slots=True)
class Report:
    """The last message of a rank that failed."""

    error: QuireError | str
    is_first: bool  # whether it is a failure of its own; False: it saw another rank fail


class RankProcesses:
    """The processes of the ranks from 1 on."""

    def __init__(self, module: str, size: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="quire-ranks-"))
        self.channels: list[Channel] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._end = weakref.finalize(
            self, _end, self._processes, self.channels, self.folder, os.getpid()
        )
        try:
            for rank in range(1, size):
                self._start(module, rank)
        except BaseException:
            self.close()
            raise

    def _start(self, module: str, rank: int) -> None:
        own, other = socket.socketpair()
        with other:
            process = subprocess.Popen(
                [sys.executable, "-c", _program(module), str(other.fileno()), str(rank)],
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output belongs to rank 0
                pass_fds=[other.fileno()],
            )
        self._processes.append(process)
        self.channels.append(channel_of(own, f"rank {rank} (process {process.pid})"))

    @property
    def process_ids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def failure(self, seen: BaseException) -> QuireError:
        reports = [self._last_report(channel) for channel in self.channels]
        for report in reports:
            if report is not None and report.is_first and isinstance(report.error, QuireError):
                return report.error
        texts = [
            f"rank {rank}: {report.error}"
            for rank, report in enumerate(reports, start=1)
            if report is not None and report.is_first
        ]
        for rank, (process, report) in enumerate(zip(self._processes, reports, strict=True), 1):
            code = _exit_code(process)
            if code is not None and report is None:
                texts.append(f"rank {rank} (process {process.pid}) ended {_how(code)}")
        return RankFailed(
            f"a rank of the tensor-parallel engine failed: {'; '.join(texts) or seen}; restart the "
            "engine"
        )

    def _last_report(self, channel: Channel) -> Report | None:
        """Return the report of a rank, which may follow other messages; None if there is none."""
        deadline_s = time.monotonic() + _LOOK_S
        try:
            while True:
                message = channel.receive(max(0.0, deadline_s - time.monotonic()))
                if isinstance(message, Report):
                    return message
        except RankFailed:
            return None

    def close(self) -> None:
        """End all processes: close their channels, then kill those that do not end."""
        self._end()


def _program(module: str) -> str:
    """Return a program that runs a module with the search path of this process."""
    return (
        f"import runpy, sys; sys.path[:] = {sys.path!r}; "
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(_LOOK_S)
    except subprocess.TimeoutExpired:
        return None


def _how(code: int) -> str:
    return f"by signal {-code}" if code < 0 else f"with exit status {code}"


def _end(
    processes: Sequence[subprocess.Popen[bytes]],
    channels: Sequence[Channel],
    folder: Path,
    owner: int,
) -> None:
    if os.getpid() != owner:  # a fork of the process that started them
        return
    for channel in channels:
        channel.close()
    deadline_s = time.monotonic() + END_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    shutil.rmtree(folder, ignore_errors=True)
