"""Host memory tier: a pool of exact size with contiguous entries, pinned for a device."""

import contextlib
import threading
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor

from quire.errors import ConfigError, CorruptData, StorageError, TierFull
from quire.kv.extents import Extent, ExtentMap
from quire.kv.store import zero_bytes
from quire.layout.pages import PAGE_ALIGNMENT_BYTES
from quire.offload.swap.host_store import pin_memory
from quire.offload.tiers.base import Bytes, StoredEntry, check_range, flat
from quire.plan.machine import free_host_bytes


class HostTier:
    """`Tier` in CPU memory of exactly the requested size.

    Args:
        total_bytes: capacity, rounded down to a multiple of the page alignment.
        pinned: whether to pin the memory for a CUDA device.
        flag: option that sets the size, for errors.

    Raises:
        ConfigError: the size exceeds free memory, or the system cannot pin it.
    """

    def __init__(
        self, total_bytes: int, *, pinned: bool = False, flag: str = "--swap-space"
    ) -> None:
        self.total_bytes = total_bytes // PAGE_ALIGNMENT_BYTES * PAGE_ALIGNMENT_BYTES
        self._flag = flag
        free_bytes = free_host_bytes()
        if self.total_bytes > free_bytes:
            raise ConfigError(
                f"expected a host pool of at most {free_bytes:,} B (CPU memory that is free on "
                f"this machine or in its container), got {total_bytes:,} B; lower {flag}"
            )
        self._bytes = zero_bytes(self.total_bytes, torch.device("cpu"))
        self._view = self._bytes.numpy().data
        if pinned:
            pin_memory(self._bytes, self)
        self._map = ExtentMap(self.total_bytes)
        self._turn = threading.RLock()
        self._entries: dict[str, tuple[Extent, StoredEntry]] = {}

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

    def reserve(
        self, key: str, num_bytes: int, facts: Mapping[str, Any] | None = None
    ) -> UInt8[Tensor, " num_bytes"]:
        """Allocate an entry for a device to fill, replacing the key's previous entry.

        Raises:
            StorageError: no free run is large enough; nothing has changed.
        """
        lines = -(-num_bytes // PAGE_ALIGNMENT_BYTES)
        with self._turn:
            taken = self._map.allocate(1, lines * PAGE_ALIGNMENT_BYTES) if lines else ()
            if taken is None:
                raise TierFull(
                    f"{key!r} needs {num_bytes:,} contiguous B, and {self._map.free_bytes:,} of "
                    f"{self.total_bytes:,} B of the host pool are free; raise {self._flag}"
                )
            self.drop(key)
            extent = taken[0] if taken else Extent(0, 0)
            self._entries[key] = (extent, StoredEntry(num_bytes, dict(facts or {})))
            return self.tensor(key)

    def tensor(self, key: str) -> UInt8[Tensor, " num_bytes"]:
        """View of an entry, for copies to a device.

        Raises:
            StorageError: there is no such entry.
        """
        if key not in self._entries:
            raise StorageError(f"nothing is stored under {key!r}")
        extent, stored = self._entries[key]
        return self._bytes[extent.start : extent.start + stored.num_bytes]

    def write(self, key: str, data: Bytes, facts: Mapping[str, Any] | None = None) -> None:
        source = flat(data)
        with self._turn:
            self.reserve(key, source.nbytes, facts)
            start = self._entries[key][0].start
            self._view[start : start + source.nbytes] = source

    def read(self, key: str, into: memoryview, first: int = 0) -> None:
        with self._turn:
            extent, stored = self._entries.get(key, (None, None))
            check_range(key, stored, into, first)
            assert extent is not None, "a stored entry has an extent"
            start = extent.start + first
            flat(into)[:] = self._view[start : start + into.nbytes]

    def min_recent(self, num_bytes: int) -> list[str]:
        """See `Tier`. Reads are not recorded: see `LRUTier`."""
        return []

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
