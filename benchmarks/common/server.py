"""A `quire serve` process: its start, its resident memory and the state of its KV memory."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

START_S, END_S, IDLE_S = 120.0, 30.0, 60.0
_SOURCE = Path(__file__).parents[2] / "src"


@dataclass(frozen=True, slots=True)
class Server:
    """A running server.

    Attributes:
        process: its process.
        url: its base URL, without a path.
    """

    process: subprocess.Popen[str]
    url: str

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, port = self.url.removeprefix("http://").rsplit(":", 1)
        return host, int(port)

    def rss_bytes(self) -> int:
        """Resident memory of the process."""
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def get(self, path: str) -> Any:
        """The JSON body of a path."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=END_S) as response:
            return json.loads(response.read())

    def wait_until_idle(self) -> dict[str, Any]:
        """Wait until no request is open; return the overview of the KV memory.

        Raises:
            TimeoutError: requests are still open.
        """
        end_s = time.monotonic() + IDLE_S
        while (load := self.get("/load")["server_load"]) > 0:
            if time.monotonic() > end_s:
                raise TimeoutError(f"{load} requests are open {IDLE_S:g} s after their clients")
            time.sleep(0.1)
        found: dict[str, Any] = self.get("/v1/kv/overview")
        return found


def start(options: Sequence[str], model: str = "quire-tiny") -> Server:
    """Start a server on a free port and wait until it accepts requests.

    Args:
        options: further options of `quire serve`.
        model: quire-tiny, or the folder of a model.
    """
    command = [sys.executable, "-m", "quire", "serve", model, "--port", "0", *options]
    path = os.pathsep.join(filter(None, (str(_SOURCE), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"at (http://\S+)/v1", line):
            return Server(process, found[1])
    raise RuntimeError(f"the server ended with exit code {process.wait(END_S)}")


@contextmanager
def served(options: Sequence[str], model: str = "quire-tiny") -> Iterator[Server]:
    """Run a server; it is stopped at the end."""
    server = start(options, model)
    try:
        yield server
    finally:
        stop(server)


def stop(server: Server) -> None:
    """Stop a server, and kill it if it does not end."""
    server.process.terminate()
    try:
        server.process.wait(END_S)
    except subprocess.TimeoutExpired:
        server.process.kill()
        server.process.wait()
    if server.process.stdout is not None:
        server.process.stdout.close()
