"""Servers and commands of tests on Ray."""

import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

import httpx
import pytest

START_S = 120.0


def require_ray():
    """Import Ray, or skip the tests of a module."""
    return pytest.importorskip(
        "ray", reason="Ray is not installed: pip install 'quire-llm[ray,serve]'"
    )


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def command(*arguments):
    """Run `quire` in a process of its own; SIGTERM at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "quire", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=START_S)


def wait_until_ready(url, process=None):
    """Wait until a server accepts requests."""
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        assert process is None or process.poll() is None, process.stdout.read()
        with suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready", timeout=5).status_code == 200:
                return
        time.sleep(0.2)
    raise AssertionError(f"{url} is not ready after {START_S} s")
