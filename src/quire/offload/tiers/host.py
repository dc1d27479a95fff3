"""Host memory tier: a pool of exact size with contiguous entries, the least recently used first."""

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from quire.errors import ConfigError, CorruptData, TierFull
from quire.kv.extents import Extent, ExtentMap
from quire.kv.store import zero_bytes
from quire.layout.pages import PAGE_ALIGNMENT_BYTES
from quire.offload.tiers.base import Bytes, StoredEntry, check_range, flat
from quire.plan.machine import free_host_bytes

_FLAG = "--cpu-kv-memory"


class HostTier:
    """`Tier` in CPU memory of exactly the requested size.

    Args:
        total_bytes: capacity, rounded down to a multiple of the page alignment.

    Raises:
        ConfigError: the size exceeds free memory.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes // PAGE_ALIGNMENT_BYTES * PAGE_ALIGNMENT_BYTES
        free_bytes = free_host_bytes()
        if self.total_bytes > free_bytes:
            raise ConfigError(
                f"expected a host pool of at most {free_bytes:,} B (CPU memory that is free on "
                f"this machine or in its container), got {total_bytes:,} B; lower {_FLAG}"
            )
        self._view = zero_bytes(self.total_bytes, torch.device("cpu")).numpy().data
        self._map = ExtentMap(self.total_bytes)
        self._turn = threading.RLock()
        # by the time of their last use
        self._entries = OrderedDict[str, tuple[Extent, StoredEntry]]()

    @property
    def used_bytes(self) -> int:
        return self.total_bytes - self._map.free_bytes

    def stored(self) -> dict[str, StoredEntry]:
        with self._turn:
            return {key: stored for key, (_, stored) in self._entries.items()}

    def names(self) -> set[str]:
        with self._turn:
            return set(self._entries)

    def added(self) -> dict[str, StoredEntry | CorruptData]:
        """See `Tier`. Only this object writes to CPU memory."""
        return {}

    def write(self, key: str, data: Bytes, facts: Mapping[str, Any] | None = None) -> None:
        source = flat(data)
        lines = -(-source.nbytes // PAGE_ALIGNMENT_BYTES)
        with self._turn:
            taken = self._map.allocate(1, lines * PAGE_ALIGNMENT_BYTES) if lines else ()
            if taken is None:
                raise TierFull(
                    f"{key!r} needs {source.nbytes:,} contiguous B, and {self._map.free_bytes:,} "
                    f"of {self.total_bytes:,} B of the host pool are free; raise {_FLAG}"
                )
            self.drop(key)
            extent = taken[0] if taken else Extent(0, 0)
            self._entries[key] = (extent, StoredEntry(source.nbytes, dict(facts or {})))
            self._view[extent.start : extent.start + source.nbytes] = source

    def read(self, key: str, into: memoryview, first: int = 0) -> None:
        with self._turn:
            extent, stored = self._entries.get(key, (None, None))
            check_range(key, stored, into, first)
            assert extent is not None, "a stored entry has an extent"
            start = extent.start + first
            flat(into)[:] = self._view[start : start + into.nbytes]
            self._entries.move_to_end(key)

    def min_recent(self, num_bytes: int) -> list[str]:
        """See `Tier`. Returns one entry, because free bytes may not be contiguous."""
        with self._turn:
            fits = num_bytes <= self.total_bytes
            return [next(iter(self._entries))] if fits and self._entries else []

    def drop(self, key: str) -> None:
        with self._turn:
            extent, _ = self._entries.pop(key, (None, None))
            if extent is not None and extent.num_bytes:
                self._map.release((extent,))

    def secret(self) -> None:
        """See `Tier`."""

    def close(self) -> None:
        """Drop all entries: host memory is not persistent."""
        for key in tuple(self._entries):
            self.drop(key)
        with contextlib.suppress(BufferError):  # a view is still exported
            self._view.release()

    def check(self) -> None:
        """Check that every byte is free or part of exactly one entry.

        Raises:
            InvariantError: a byte is lost or has two owners.
        """
        self._map.check(tuple(e for e, _ in self._entries.values() if e.num_bytes))
