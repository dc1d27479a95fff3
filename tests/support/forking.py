"""Programs in forked processes: one process loads torch, Transformers and the server for all."""

import atexit
import importlib
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import cache
from types import FrameType

import pytest

LOADED = ("torch", "quire.api.llm", "quire.cli.batch", "quire.cli.main", "quire.cli.serve")
"""Modules that are loaded before the forks."""


class Program:
    """A running function "module:name" with the methods of `subprocess.Popen` that tests need."""

    def __init__(self, function: str, *arguments: object) -> None:
        if not hasattr(os, "fork"):
            pytest.skip("no fork on this system")
        ends = [os.pipe() for _ in range(3)]
        request = json.dumps([function, *arguments]).encode()
        socket.send_fds(_forker(), [request], [write for _, write in ends])
        for _, write in ends:
            os.close(write)
        self.stdout, self.stderr, self._states = (os.fdopen(read) for read, _ in ends)
        self.pid = int(self._states.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, negative for the signal that ended it; None while it runs."""
        return self.returncode if self.returncode is not None else self._wait(0.0)

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the end; return the exit status."""
        if self.returncode is None and self._wait(timeout_s) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout_s or 0.0)
        assert self.returncode is not None
        return self.returncode

    def _wait(self, timeout_s: float | None) -> int | None:
        if select.select([self._states], [], [], timeout_s)[0]:
            self.returncode = os.waitstatus_to_exitcode(int(self._states.readline()))
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def close(self) -> None:
        """Kill the process if it still runs."""
        self.send_signal(signal.SIGKILL)
        self.wait()
        for file in (self.stdout, self.stderr, self._states):
            file.close()


@cache
def _forker() -> socket.socket:
    """The socket of the process that forks; it ends when this process closes the socket."""
    ours, theirs = socket.socketpair()
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import fork_programs"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{code}; fork_programs({theirs.fileno()})"],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
    )
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def fork_programs(number: int) -> None:
    """Fork for each request of the socket with this file number; runs in its own process."""
    for name in LOADED:
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    requests = socket.socket(fileno=number)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the monitors are reaped by the system
    while True:
        request, files, _, _ = socket.recv_fds(requests, 1 << 20, 3)
        if not request:
            return
        if os.fork() == 0:
            requests.close()
            _monitor(json.loads(request), *files)
        for file in files:
            os.close(file)


def _monitor(request: list[object], stdout: int, stderr: int, states: int) -> None:
    """Fork the program; report its process and its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child == 0:
        os.close(states)
        _become(request, stdout, stderr)
    os.close(stdout)
    os.close(stderr)
    os.write(states, b"%d\n" % child)
    os.write(states, b"%d\n" % os.waitpid(child, 0)[1])
    os._exit(0)


def _become(request: list[object], stdout: int, stderr: int) -> None:
    status = 1
    try:
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
        function, *arguments = request
        module, _, name = str(function).partition(":")
        run: Callable[..., None] = getattr(importlib.import_module(module), name)
        run(*arguments)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as an interpreter at its end
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # never return to the loop of the parent


def run_quire(*arguments: str) -> None:
    """Run a command line of `quire`."""
    from quire.cli.main import run

    sys.argv = ["quire", *arguments]
    run()


def run_batch_until(call: int | None, *arguments: str) -> None:
    """Run `quire batch`, which kills itself at a call; print the number of calls."""
    from quire.cli import batch_files

    # written often, so that kills occur at many states of the file, and never by the time
    batch_files.GROUP_RECORDS, batch_files.GROUP_S = 4, math.inf
    calls = [0]

    def count(frame: FrameType, _event: str, _argument: object) -> None:
        if "batch" in frame.f_code.co_filename:
            calls[0] += 1
            if calls[0] == call:
                os.kill(os.getpid(), signal.SIGKILL)

    atexit.register(lambda: print(calls[0]))
    sys.settrace(count)
    run_quire("batch", *arguments)
