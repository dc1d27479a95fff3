"""Entries of a Redis store: a head with size, facts and checksums, and chunks of 256 KiB."""

import itertools
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import CorruptData
from quire.offload.tiers.base import Stored

CHUNK_BYTES = 256 << 10
"""Bytes that share a checksum."""


@dataclass(frozen=True, slots=True)
class Head:
    """The head of an entry.

    Attributes:
        stored: size and facts.
        sums: checksum of each chunk.
    """

    stored: Stored
    sums: tuple[int, ...]


def packed_head(name: str, num_bytes: int, facts: Mapping[str, Any], sums: Iterable[int]) -> bytes:
    """Encode the head of the entry with this name: its checksum, then JSON."""
    rest = json.dumps({"bytes": num_bytes, "facts": dict(facts), "sums": list(sums)}).encode()
    return _head_sum(name, rest) + rest


def read_head(name: str, packed: object) -> Head:
    """Parse the head of the entry with this name.

    Raises:
        CorruptData: it is not a head of this format, or that of another entry.
    """
    try:
        if not isinstance(packed, bytes) or packed[:8] != _head_sum(name, packed[8:]):
            raise ValueError("wrong checksum")
        values = json.loads(packed[8:])
        num_bytes, facts, sums = values["bytes"], values["facts"], tuple(values["sums"])
        if type(num_bytes) is not int or len(sums) != -(-num_bytes // CHUNK_BYTES):
            raise ValueError("wrong size")
        if not isinstance(facts, dict) or not all(type(one) is int for one in sums):
            raise TypeError("wrong facts")
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise CorruptData(f"the head of {name!r} is damaged: {error}") from error
    return Head(Stored(num_bytes, facts), sums)


def _head_sum(name: str, rest: bytes) -> bytes:
    return b"%08x" % zlib.crc32(rest, zlib.crc32(name.encode(errors="surrogateescape")))


def join(
    key: str,
    numbers: range,
    chunks: list[Any],
    num_bytes: int,
    sums: tuple[int, ...],
    target: memoryview,
    first: int,
) -> None:
    """Copy a range out of its chunks.

    Raises:
        CorruptData: a chunk is missing, or its bytes differ from those that were written.
    """
    end = first + target.nbytes
    for number, chunk in itertools.zip_longest(numbers, chunks):
        start = number * CHUNK_BYTES
        length = min(CHUNK_BYTES, num_bytes - start)
        is_whole = isinstance(chunk, bytes) and len(chunk) == length
        if not is_whole or zlib.crc32(chunk) != sums[number]:
            raise CorruptData(
                f"chunk {number} of {key!r} differs from what was written; the entry is dropped"
            )
        low, high = max(first, start), min(end, start + length)
        target[low - first : high - first] = chunk[low - start : high - start]
