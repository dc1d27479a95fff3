"""A Redis or Valkey server of its own, on a free port and a socket, without files."""

import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from quire.errors import ConfigError

PROGRAMS = ("redis-server", "valkey-server")
_READY = "Ready to accept connections"
_END_S = 10.0


def server_program() -> str | None:
    """Path of a server program; None if none is installed."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class RedisServer:
    """A server that runs until it is closed.

    Args:
        options: further options of the program, such as ("--requirepass", "x").
        port: port to listen at; 0: a free one.
        tls: files (certificate, key, authority) for a port with TLS instead of a plain one.

    Attributes:
        port: port of the server.
        process: its process.

    Raises:
        ConfigError: no program is installed, or it does not start.
    """

    def __init__(
        self,
        options: Sequence[str] = (),
        *,
        port: int = 0,
        tls: tuple[Path, Path, Path] | None = None,
    ) -> None:
        program = server_program()
        if program is None:
            raise ConfigError(
                f"expected one of {', '.join(PROGRAMS)} to be installed, got none: install the "
                "package redis-server or valkey-server of the system"
            )
        self._folder = tempfile.TemporaryDirectory(prefix="redis-")
        self._reserved: socket.socket | None = None
        self.port = port
        if not port:
            self.port, self._reserved = _reserve_port()
        plain = ["--port", "0" if tls else str(self.port)]
        if tls is not None:
            names = ("--tls-cert-file", "--tls-key-file", "--tls-ca-cert-file")
            plain += ["--tls-port", str(self.port), "--tls-auth-clients", "no"]
            plain += [text for pair in zip(names, map(str, tls), strict=True) for text in pair]
        self.process = subprocess.Popen(
            [
                *(program, *plain, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"),
                *("--unixsocket", self.socket, "--dir", self._folder.name, *options),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        self._wait_until_ready()

    @property
    def socket(self) -> str:
        """Path of its Unix socket."""
        return f"{self._folder.name}/socket"

    @property
    def url(self) -> str:
        """URL of its port."""
        return f"redis://127.0.0.1:{self.port}/0"

    def _wait_until_ready(self) -> None:
        assert self.process.stdout is not None, "the output is a pipe"
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if _READY in line:
                return
        self.close()
        raise ConfigError(f"the server did not start: {''.join(lines[-3:])}")

    def pause(self) -> None:
        """Stop the process, so that it accepts connections and does not respond."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue a paused process."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.wait(_END_S)

    def close(self) -> None:
        """End the process and delete its folder."""
        if self.process.poll() is None:
            self.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()
        if self._reserved is not None:
            self._reserved.close()
        self._folder.cleanup()


def _reserve_port() -> tuple[int, socket.socket]:
    """Return a free port, and a socket that is bound to it and does not listen.

    On Linux the server can listen at the port as long as both reuse addresses, and the system gives
    the port to no one else. On other systems the port is only free at this time.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    port = int(reserved.getsockname()[1])
    if sys.platform != "linux":
        reserved.close()
    return port, reserved
