"""Network: a store on another machine, over plain TCP, behind the same seam as a disk.

Whoever reaches the store's port can read and write it: keep it inside a network that you trust.
"""

import contextlib
import socket
import threading
from collections.abc import Mapping
from typing import Any

from quire.errors import CorruptData, StorageError, TierUnreachable
from quire.offload.tiers.base import Bytes, Stored, check_range, flat
from quire.offload.tiers.wire import BadMessage, Message, What, receive

_MOST_BYTES = 1 << 40


class NetworkTier:
    """`Tier` in a store that `StoreServer` serves.

    Args:
        host: name or address.
        port: of the store.
        timeout_s: without a byte, after which a connection counts as broken.
        tries: of each request, each on a new connection but the first.

    Attributes:
        num_retries: requests that were sent again.
    """

    def __init__(
        self, host: str, port: int, *, timeout_s: int | float = 10.0, tries: int = 3
    ) -> None:
        self._place, self._timeout_s, self._tries = (host, port), timeout_s, tries
        self._connection: socket.socket | None = None
        self._turn = threading.Lock()
        self.num_retries = 0

    @property
    def total_bytes(self) -> int:
        """See `Tier`."""
        return int(self._ask(Message(what=What.ROOM)).facts["total"])

    @property
    def used_bytes(self) -> int:
        """See `Tier`."""
        return int(self._ask(Message(what=What.ROOM)).facts["used"])

    def stored(self) -> dict[str, Stored]:
        """See `Tier`."""
        entries = self._ask(Message(what=What.STORED)).facts
        return {key: Stored(num_bytes, facts) for key, (num_bytes, facts) in entries.items()}

    def write(self, key: str, data: Bytes, facts: Mapping[str, Any] | None = None) -> None:
        """See `Tier`."""
        self._ask(Message(what=What.WRITE, key=key, facts=facts or {}, data=flat(data)))

    def read(self, key: str, into: memoryview, first: int = 0) -> None:
        """See `Tier`."""
        requested = Message(what=What.READ, key=key, first=first, requested_bytes=into.nbytes)
        data = self._ask(requested).data
        check_range(key, Stored(first + data.nbytes), into, first)
        flat(into)[:] = data

    def drop(self, key: str) -> None:
        """See `Tier`."""
        self._ask(Message(what=What.DROP, key=key))

    def close(self) -> None:
        """End the connection; what is stored stays."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.close()
            self._connection = None

    def _ask(self, message: Message) -> Message:
        """Send a request and wait for its answer; again on a new connection where one breaks.

        Every request may be sent twice: writing the same again changes nothing.
        """
        with self._turn:
            for attempt in range(self._tries):
                try:
                    return _checked(self._exchange(message))
                except OSError as error:
                    self.close()
                    if attempt + 1 == self._tries:
                        place = f"{self._place[0]}:{self._place[1]}"
                        raise TierUnreachable(
                            f"the store at {place} did not answer {self._tries} times: {error}; "
                            "what it holds is computed again"
                        ) from error
                    self.num_retries += 1
        raise AssertionError("every attempt returns or raises")

    def _exchange(self, message: Message) -> Message:
        if self._connection is None:
            self._connection = socket.create_connection(self._place, self._timeout_s)
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection.sendall(message.head())
        self._connection.sendall(message.data)
        answer = receive(self._connection, _MOST_BYTES)
        if answer is None:
            raise BadMessage("the store ended the connection")
        return answer


def _checked(answer: Message) -> Message:
    if answer.what == What.CORRUPT:
        raise CorruptData(str(answer.facts["reason"]))
    if answer.what == What.REFUSED:
        raise StorageError(str(answer.facts["reason"]))
    return answer
