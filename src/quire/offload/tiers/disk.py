"""Disk tier: blocks of 1 MiB with a checksum each, and an index that survives a crash.

    write    blocks -> flush -> line of the index -> flush           crash before the end: no entry
    read     blocks of the range -> checksums compared -> bytes      wrong checksum: entry dropped

An entry takes whole blocks, contiguous if a free run is large enough. After a restart the next
engine finds every complete entry. Torn entries are detected and never returned.
"""

import contextlib
import fcntl
import os
import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, CorruptData, StorageError, TierFull
from quire.kv.extents import Extent, ExtentMap
from quire.offload.tiers.base import Bytes, Stored, check_range, flat
from quire.offload.tiers.disk_files import BLOCK_BYTES, FORMAT, BlockFile, Journal

MOST_STALE_LINES = 1024
"""Index lines without a current entry above which `drop` rewrites the index."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """Blocks of an entry and their checksums."""

    stored: Stored
    extents: tuple[Extent, ...]  # of blocks
    totals: tuple[int, ...]

    @property
    def blocks(self) -> list[int]:
        return [n for extent in self.extents for n in range(extent.start, extent.end)]


class DiskTier:
    """`Tier` in a folder of its own.

    Args:
        folder: created if missing; entries of an earlier engine are found again.
        total_bytes: capacity, rounded down to whole blocks.
        direct: whether to bypass the page cache where the file system allows it.

    Attributes:
        num_discarded: entries of the index that were invalid when the tier was opened.

    Raises:
        ConfigError: the folder cannot be written or is in use, or the disk is too small.
    """

    def __init__(self, folder: Path, total_bytes: int, *, direct: bool = True) -> None:
        self._num_blocks = total_bytes // BLOCK_BYTES
        if not self._num_blocks:
            raise ConfigError(
                f"expected a disk tier of {BLOCK_BYTES:,} B or more, got {total_bytes:,} B; "
                "raise --disk-kv-memory"
            )
        self._turn = threading.RLock()
        with contextlib.ExitStack() as undo:
            self._lock = _lock(folder)
            undo.callback(os.close, self._lock)
            self._file = BlockFile(folder / "blocks", self._num_blocks, direct=direct)
            undo.callback(self._file.close)
            self._journal = Journal(folder / "index")
            undo.callback(self._journal.close)
            self._map = ExtentMap(self._num_blocks)
            self._entries: dict[str, _Entry] = {}
            self.num_discarded = 0
            self._recover()
            undo.pop_all()

    @property
    def total_bytes(self) -> int:
        """See `Tier`."""
        return self._num_blocks * BLOCK_BYTES

    @property
    def used_bytes(self) -> int:
        """See `Tier`."""
        return self.total_bytes - self._map.free_bytes * BLOCK_BYTES

    @property
    def direct(self) -> bool:
        """Whether reads and writes bypass the page cache."""
        return self._file.direct

    def stored(self) -> dict[str, Stored]:
        """See `Tier`."""
        with self._turn:
            return {key: entry.stored for key, entry in self._entries.items()}

    def write(self, key: str, data: Bytes, facts: Mapping[str, Any] | None = None) -> None:
        """See `Tier`. The entry survives a power loss once this returns."""
        source = flat(data)
        with self._turn:
            extents = self._allocate(key, source.nbytes)
            try:
                totals = self._write_blocks(extents, source)
                entry = _Entry(Stored(source.nbytes, dict(facts or {})), extents, totals)
                self._journal.add(_line(key, entry))
            except BaseException:
                self._map.release(extents)
                raise
            self._forget(key)
            self._entries[key] = entry

    def read(self, key: str, into: memoryview, first: int = 0) -> None:
        """See `Tier`."""
        target, end = flat(into), first + into.nbytes
        with self._turn:
            entry = self._entries.get(key)
            stored = check_range(key, entry.stored if entry else None, into, first)
            assert entry is not None, "a stored entry has blocks"
            blocks = entry.blocks
            for place in range(first // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
                start = place * BLOCK_BYTES
                length = min(BLOCK_BYTES, stored.num_bytes - start)
                found = self._file.read(blocks[place])[:length]
                if len(found) != length or zlib.crc32(found) != entry.totals[place]:
                    self.drop(key)
                    raise CorruptData(
                        f"block {place} of {key!r} differs from what was written; the entry is "
                        "dropped"
                    )
                low, high = max(first, start), min(end, start + length)
                target[low - first : high - first] = found[low - start : high - start]

    def drop(self, key: str) -> None:
        """See `Tier`. If the disk fails, the index may still name the entry after a restart."""
        with self._turn, contextlib.suppress(StorageError, ConfigError):
            if self._forget(key):
                self._journal.add({"drop": key})
                if self._journal.num_lines > 2 * len(self._entries) + MOST_STALE_LINES:
                    self._rewrite()

    def close(self) -> None:
        """See `Tier`."""
        with self._turn:
            self._journal.close()
            self._file.close()
            os.close(self._lock)

    def check(self) -> None:
        """Check that every block is free or part of exactly one entry.

        Raises:
            InvariantError: a block is lost or has two owners.
        """
        self._map.check(tuple(e for entry in self._entries.values() for e in entry.extents))

    # ---- blocks --------------------------------------------------------------------------------

    def _allocate(self, key: str, num_bytes: int) -> tuple[Extent, ...]:
        blocks = -(-num_bytes // BLOCK_BYTES)
        extents = self._map.allocate(blocks, 1)
        if extents is None:
            raise TierFull(
                f"{key!r} needs {blocks} MiB, and {self._map.free_bytes} of {self._num_blocks} "
                "MiB of the disk tier are free; raise --disk-kv-memory"
            )
        return extents

    def _write_blocks(self, extents: tuple[Extent, ...], source: memoryview) -> tuple[int, ...]:
        totals = []
        blocks = (n for extent in extents for n in range(extent.start, extent.end))
        for place, block in enumerate(blocks):
            block_bytes = source[place * BLOCK_BYTES : (place + 1) * BLOCK_BYTES]
            self._file.write(block, block_bytes)
            totals.append(zlib.crc32(block_bytes))
        self._file.flush()
        return tuple(totals)

    # ---- index ---------------------------------------------------------------------------------

    def _forget(self, key: str) -> bool:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._map.release(entry.extents)
        return entry is not None

    def _recover(self) -> None:
        """Load the entries of the index that fit in this tier, and start a new index with them."""
        lines = self._journal.lines()
        head = next(lines, None)
        if head is not None and head.get("format") != FORMAT:
            raise ConfigError(f"expected an index of format {FORMAT}, got {head}; empty the folder")
        found: dict[str, _Entry] = {}
        for line in lines:
            found.pop(line.get("drop") or line["key"], None)
            if "key" in line:
                found[line["key"]] = _entry(line)
        taken: list[Extent] = []
        for key, entry in reversed(found.items()):  # the newest entry owns a block
            if self._can_take(entry, taken):
                self._entries[key] = entry
                taken += entry.extents
            else:
                self.num_discarded += 1
        self._entries = dict(reversed(self._entries.items()))  # oldest first
        self._map = _map_without(self._num_blocks, taken)
        self._rewrite()

    def _can_take(self, entry: _Entry, taken: list[Extent]) -> bool:
        """Whether the blocks of an entry are in this file and free."""
        return all(
            extent.end <= self._num_blocks
            and all(extent.end <= other.start or other.end <= extent.start for other in taken)
            for extent in entry.extents
        )

    def _rewrite(self) -> None:
        kept = [_line(key, entry) for key, entry in self._entries.items()]
        self._journal.rewrite([{"format": FORMAT}, *kept])


def _map_without(total: int, taken: list[Extent]) -> ExtentMap:
    """Create a map with these extents allocated: allocate all, then free the others."""
    found = ExtentMap(total)
    found.allocate(total, 1)
    position = 0
    for extent in (*sorted(taken), Extent(total, 0)):
        if extent.start > position:
            found.release((Extent(position, extent.start - position),))
        position = extent.end
    return found


def _line(key: str, entry: _Entry) -> dict[str, Any]:
    return {
        "key": key,
        "bytes": entry.stored.num_bytes,
        "facts": dict(entry.stored.facts),
        "extents": [[extent.start, extent.num_bytes] for extent in entry.extents],
        "totals": list(entry.totals),
    }


def _entry(line: dict[str, Any]) -> _Entry:
    extents = tuple(Extent(start, blocks) for start, blocks in line["extents"])
    return _Entry(Stored(line["bytes"], line["facts"]), extents, tuple(line["totals"]))


def _lock(folder: Path) -> int:
    """Lock the folder for this process.

    Raises:
        ConfigError: the folder cannot be created or written, or another process has locked it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(
            f"cannot write {folder}: {error.strerror}; name another folder"
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise ConfigError(f"{folder} is in use by another engine; name another folder") from error
    return handle
