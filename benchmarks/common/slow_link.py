"""A link of limited speed to a local server: a TCP proxy that delays its responses."""

import socket
import socketserver
import threading
import time
from contextlib import suppress
from typing import cast

_PIECE_BYTES = 256 << 10


class SlowLink:
    """Forwards connections until it is closed.

    Args:
        port: port of the server on this machine.
        bytes_per_s: rate of all responses together.

    Attributes:
        port: port to connect to.
    """

    def __init__(self, port: int, bytes_per_s: float) -> None:
        self._server = _Proxy(port, bytes_per_s)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="slow link", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Accept no further connections."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Proxy(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, port: int, bytes_per_s: float) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.port, self.bytes_per_s = port, bytes_per_s
        self.turn = threading.Lock()
        self.deadline_s = 0.0

    def delay(self, num_bytes: int) -> None:
        """Wait for the time of a transfer: all connections share absolute deadlines."""
        with self.turn:
            start_s = max(self.deadline_s, time.perf_counter())
            self.deadline_s = start_s + num_bytes / self.bytes_per_s
            left_s = self.deadline_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)


class _Connection(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        proxy = cast("_Proxy", self.server)
        with suppress(OSError), socket.create_connection(("127.0.0.1", proxy.port)) as server:
            back = threading.Thread(target=_forward, args=(self.request, server), daemon=True)
            back.start()
            while data := server.recv(_PIECE_BYTES):
                proxy.delay(len(data))
                self.request.sendall(data)


def _forward(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(_PIECE_BYTES):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
