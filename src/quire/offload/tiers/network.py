"""Network tier: a store on another machine over plain TCP, with the interface of a disk tier.

Every host that can reach the store's port can read and write it: keep it in a trusted network.
"""

import contextlib
import json
import socket
import struct
import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from quire.errors import CorruptData, StorageError, TierUnreachable
from quire.offload.tiers.base import Bytes, Stored, check_range, flat

# ---- wire ----------------------------------------------------------------------------------------

# Messages between a network tier and its store: a fixed header, a key, facts, bytes and a checksum.
#
# magic | what | key length | facts length | first | requested | data length | crc32 of the data
#   4       1        4             4           8          8            8              4

MAGIC = b"QKV1"
_HEAD = struct.Struct("!4sBIIQQQI")
_MOST_TEXT_BYTES = 64 << 20  # enough for the index of a large store
_PIECE_BYTES = 1 << 20


class What(IntEnum):
    """Type of a request or result of a response."""

    WRITE = 1
    READ = 2
    DROP = 3
    STORED = 4
    ROOM = 5
    DONE = 16
    REFUSED = 17
    CORRUPT = 18


_KNOWN = frozenset(int(what) for what in What)


class BadMessage(OSError):
    """The received bytes are not a valid message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message.

    Attributes:
        what: type or result.
        key: key of an entry.
        facts: JSON values.
        first: first byte to read.
        requested_bytes: number of bytes to read.
        data: bytes of an entry.
    """

    what: What
    key: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    first: int = 0
    requested_bytes: int = 0
    data: memoryview = field(default_factory=lambda: memoryview(b""))

    def head(self) -> bytes:
        """The encoded message without its data."""
        key, facts = self.key.encode(), json.dumps(dict(self.facts)).encode()
        sizes = (len(key), len(facts), self.first, self.requested_bytes, self.data.nbytes)
        return _HEAD.pack(MAGIC, self.what, *sizes, zlib.crc32(self.data)) + key + facts


def receive(connection: socket.socket, most_bytes: int) -> Message | None:
    """Receive the next message; None if the other side has closed the connection.

    Args:
        connection: to read from.
        most_bytes: most bytes of data; more is an invalid message.

    Raises:
        BadMessage: the received bytes are not a valid message.
        OSError: the connection broke or timed out.
    """
    head = _exactly(connection, _HEAD.size, may_end=True)
    if not head:
        return None
    magic, what, key_bytes, facts_bytes, first, requested, data_bytes, total = _HEAD.unpack(head)
    if magic != MAGIC or what not in _KNOWN or max(key_bytes, facts_bytes) > _MOST_TEXT_BYTES:
        raise BadMessage("received bytes that are not a message of a network tier")
    if max(data_bytes, requested) > most_bytes:
        raise BadMessage(
            f"expected a message of at most {most_bytes:,} B, got {max(data_bytes, requested):,} B"
        )
    key = _exactly(connection, key_bytes)
    facts = _exactly(connection, facts_bytes)
    data = _exactly(connection, data_bytes)
    if zlib.crc32(data) != total:
        raise BadMessage("the checksum of a message is wrong")
    try:
        name, parsed = key.decode(), json.loads(bytes(facts))
    except ValueError as error:
        raise BadMessage(f"the text of a message is invalid: {error}") from error
    return Message(
        what=What(what),
        key=name,
        facts=parsed,
        first=first,
        requested_bytes=requested,
        data=memoryview(data),
    )


def _exactly(connection: socket.socket, num_bytes: int, *, may_end: bool = False) -> bytearray:
    found = bytearray(num_bytes)
    view, done = memoryview(found), 0
    while done < num_bytes:
        count = connection.recv_into(view[done : done + _PIECE_BYTES])
        if not count:
            if may_end and not done:
                return bytearray()
            raise BadMessage("the connection was closed within a message")
        done += count
    return found


# ---- network -------------------------------------------------------------------------------------

_MOST_BYTES = 1 << 40


class NetworkTier:
    """`Tier` in a store that a `StoreServer` serves.

    Args:
        host: name or address.
        port: port of the store.
        timeout_s: time without a byte after which a connection counts as broken.
        tries: most attempts of a request, each on a new connection except the first.

    Attributes:
        num_retries: number of requests sent again.
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
        return int(self._request(Message(what=What.ROOM)).facts["total"])

    @property
    def used_bytes(self) -> int:
        """See `Tier`."""
        return int(self._request(Message(what=What.ROOM)).facts["used"])

    def stored(self) -> dict[str, Stored]:
        """See `Tier`."""
        entries = self._request(Message(what=What.STORED)).facts
        return {key: Stored(num_bytes, facts) for key, (num_bytes, facts) in entries.items()}

    def write(self, key: str, data: Bytes, facts: Mapping[str, Any] | None = None) -> None:
        """See `Tier`."""
        self._request(Message(what=What.WRITE, key=key, facts=facts or {}, data=flat(data)))

    def read(self, key: str, into: memoryview, first: int = 0) -> None:
        """See `Tier`."""
        requested = Message(what=What.READ, key=key, first=first, requested_bytes=into.nbytes)
        data = self._request(requested).data
        check_range(key, Stored(first + data.nbytes), into, first)
        flat(into)[:] = data

    def drop(self, key: str) -> None:
        """See `Tier`."""
        self._request(Message(what=What.DROP, key=key))

    def close(self) -> None:
        """Close the connection; stored entries are retained."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.close()
            self._connection = None

    def _request(self, message: Message) -> Message:
        """Send a request and wait for the response; retry on a new connection if one breaks.

        All requests are idempotent, so a retry changes nothing.
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
                            f"the store at {place} did not respond to {self._tries} attempts: "
                            f"{error}; its contents are recomputed"
                        ) from error
                    self.num_retries += 1
        raise AssertionError("every attempt returns or raises")

    def _exchange(self, message: Message) -> Message:
        if self._connection is None:
            self._connection = socket.create_connection(self._place, self._timeout_s)
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection.sendall(message.head())
        self._connection.sendall(message.data)
        response = receive(self._connection, _MOST_BYTES)
        if response is None:
            raise BadMessage("the store closed the connection")
        return response


def _checked(response: Message) -> Message:
    if response.what == What.CORRUPT:
        raise CorruptData(str(response.facts["reason"]))
    if response.what == What.REFUSED:
        raise StorageError(str(response.facts["reason"]))
    return response
