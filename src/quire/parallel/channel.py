"""Messages between rank 0 and one other rank: pickled objects over a socket pair.

Only the two processes hold the ends of the socket, so messages are as trusted as the program.
"""

import socket
from multiprocessing.connection import Connection
from typing import Protocol, runtime_checkable

from quire.errors import RankFailed


@runtime_checkable  # for the type checks in tests
class Messages(Protocol):
    """One end of a connection to another rank."""

    def send(self, message: object) -> None:
        """Send a message.

        Raises:
            RankFailed: the other end is closed.
        """
        ...

    def receive(self, timeout_s: float | None = None) -> object:
        """Wait for a message.

        Args:
            timeout_s: maximum time in seconds; None: no limit.

        Raises:
            RankFailed: the other end is closed, or the time is over.
        """
        ...

    def close(self) -> None:
        """Close this end."""
        ...


class Channel:
    """One end of a socket pair; see `Messages`.

    Args:
        connection: the connection.
        peer: name of the process at the other end, for messages.
    """

    def __init__(self, connection: Connection, peer: str) -> None:
        self._connection, self._peer = connection, peer

    def send(self, message: object) -> None:
        """See `Messages.send`."""
        try:
            self._connection.send(message)
        except OSError as error:
            raise RankFailed(f"{self._peer} has closed its connection") from error

    def receive(self, timeout_s: float | None = None) -> object:
        """See `Messages.receive`."""
        try:
            if not self._connection.poll(timeout_s):
                raise RankFailed(f"{self._peer} did not respond within {timeout_s:g} s")
            message: object = self._connection.recv()
        except (OSError, EOFError) as error:
            raise RankFailed(f"{self._peer} has closed its connection") from error
        return message

    def close(self) -> None:
        """See `Messages.close`."""
        self._connection.close()


def channel_of(end: socket.socket, peer: str) -> Channel:
    """Return the channel of one end of a socket pair; the socket object is used up.

    Args:
        end: a connected socket.
        peer: name of the process at the other end.
    """
    return Channel(Connection(end.detach()), peer)
