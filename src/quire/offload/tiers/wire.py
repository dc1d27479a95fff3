"""Messages between a network tier and its store: a fixed head, a key, facts, bytes and their sum.

magic | what | key length | facts length | first | asked for | data length | crc32 of the data
  4       1        4             4           8          8            8              4
"""

import json
import socket
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

MAGIC = b"QKV1"
_HEAD = struct.Struct("!4sBIIQQQI")
_MOST_TEXT_BYTES = 64 << 20  # the index of a large store
_PIECE_BYTES = 1 << 20


class What(IntEnum):
    """Of a message: what is asked for, or how it went."""

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
    """What came is no message, or was changed on the way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message.

    Attributes:
        what: it is.
        key: of an entry.
        facts: JSON values.
        first: byte from which on is read.
        requested_bytes: to read.
        data: bytes of an entry.
    """

    what: What
    key: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    first: int = 0
    requested_bytes: int = 0
    data: memoryview = field(default_factory=lambda: memoryview(b""))

    def head(self) -> bytes:
        """All but the data."""
        key, facts = self.key.encode(), json.dumps(dict(self.facts)).encode()
        sizes = (len(key), len(facts), self.first, self.requested_bytes, self.data.nbytes)
        return _HEAD.pack(MAGIC, self.what, *sizes, zlib.crc32(self.data)) + key + facts


def receive(connection: socket.socket, most_bytes: int) -> Message | None:
    """The next message; None where the other side has ended.

    Args:
        connection: to read from.
        most_bytes: of data; more is no message.

    Raises:
        BadMessage: what came is none.
        OSError: the connection broke, or nothing came in time.
    """
    head = _exactly(connection, _HEAD.size, may_end=True)
    if not head:
        return None
    magic, what, key_bytes, facts_bytes, first, requested, data_bytes, total = _HEAD.unpack(head)
    if magic != MAGIC or what not in _KNOWN or max(key_bytes, facts_bytes) > _MOST_TEXT_BYTES:
        raise BadMessage("what came is no message of a network tier")
    if max(data_bytes, requested) > most_bytes:
        raise BadMessage(
            f"{max(data_bytes, requested):,} B in a message, expected {most_bytes:,} at most"
        )
    key = _exactly(connection, key_bytes)
    facts = _exactly(connection, facts_bytes)
    data = _exactly(connection, data_bytes)
    if zlib.crc32(data) != total:
        raise BadMessage("bytes were changed on the way")
    try:
        name, said = key.decode(), json.loads(bytes(facts))
    except ValueError as error:
        raise BadMessage(f"the text of a message cannot be read: {error}") from error
    return Message(
        what=What(what),
        key=name,
        facts=said,
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
            raise BadMessage("the connection ended within a message")
        done += count
    return found
