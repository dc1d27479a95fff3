"""The store behind a network tier: serves another tier over TCP, with an optional rate limit."""

import socket
import socketserver
import threading
import time
from collections.abc import Callable
from typing import cast

from quire.errors import CorruptData, StorageError
from quire.offload.tiers.base import Tier
from quire.offload.tiers.network import BadMessage, Message, What, receive

_PIECE_BYTES = 256 << 10


class StoreServer:
    """Serves a tier until it is closed.

    Args:
        tier: stores the bytes.
        host: address to listen at.
        port: port to listen at; 0: any free port.
        bytes_per_s: rate limit of all responses together; None: no limit.
        delay: seconds to delay a response, by request; for tests.

    Attributes:
        address: host and port.

    Raises:
        StorageError: it cannot listen at the address.
    """

    def __init__(
        self,
        tier: Tier,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        bytes_per_s: int | float | None = None,
        delay: Callable[[Message], int | float] | None = None,
    ) -> None:
        try:
            self._server = _Server((host, port), tier, bytes_per_s, delay)
        except OSError as error:
            raise StorageError(f"cannot listen at {host}:{port}: {error.strerror}") from error
        self.address: tuple[str, int] = self._server.server_address[:2]  # type: ignore[assignment]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="kv store", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving; the tier is not closed."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(
        self,
        address: tuple[str, int],
        tier: Tier,
        bytes_per_s: int | float | None,
        delay: Callable[[Message], int | float] | None,
    ) -> None:
        super().__init__(address, _Handler)
        self.tier, self.bytes_per_s, self.delay = tier, bytes_per_s, delay
        self.turn = threading.Lock()
        self.deadline_s = 0.0


class _Handler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        server, connection = cast("_Server", self.server), self.request
        try:
            while True:
                message = receive(connection, server.tier.total_bytes)
                if message is None:
                    return
                if server.delay is not None:
                    time.sleep(server.delay(message))
                self._send(connection, server, _respond(server.tier, message))
        except OSError:
            return  # the client has disconnected or uses another protocol

    def _send(self, connection: socket.socket, server: _Server, response: Message) -> None:
        connection.sendall(response.head())
        for start in range(0, response.data.nbytes, _PIECE_BYTES):
            piece = response.data[start : start + _PIECE_BYTES]
            if server.bytes_per_s is not None:
                self._wait(server, piece.nbytes / server.bytes_per_s)
            connection.sendall(piece)

    def _wait(self, server: _Server, seconds: float) -> None:
        """Wait for the time of a transfer: all connections share absolute deadlines."""
        with server.turn:
            server.deadline_s = max(server.deadline_s, time.perf_counter()) + seconds
            left_s = server.deadline_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)


def _respond(tier: Tier, message: Message) -> Message:
    try:
        return _done(tier, message)
    except CorruptData as error:
        return Message(what=What.CORRUPT, facts={"reason": str(error)})
    except StorageError as error:
        return Message(what=What.REFUSED, facts={"reason": str(error)})


def _done(tier: Tier, message: Message) -> Message:
    if message.what == What.WRITE:
        tier.write(message.key, message.data, message.facts)
        return Message(what=What.DONE)
    if message.what == What.READ:
        data = memoryview(bytearray(message.requested_bytes))
        tier.read(message.key, data, message.first)
        return Message(what=What.DONE, data=data)
    if message.what == What.DROP:
        tier.drop(message.key)
        return Message(what=What.DONE)
    if message.what == What.STORED:
        found = {key: [s.num_bytes, dict(s.facts)] for key, s in tier.stored().items()}
        return Message(what=What.DONE, facts=found)
    if message.what == What.ROOM:
        return Message(what=What.DONE, facts={"total": tier.total_bytes, "used": tier.used_bytes})
    raise BadMessage("expected a request, got a response")
