"""A tier that knows which entries of another one were least recently used."""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from quire.errors import CorruptData
from quire.offload.tiers.base import Bytes, StoredEntry, Tier


class LRUTier:
    """`Tier` over a tier of one process.

    Args:
        tier: stores the bytes; its existing entries are ordered as it lists them.
    """

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self._used: OrderedDict[str, None] = OrderedDict.fromkeys(tier.stored())
        self._turn = threading.RLock()

    @property
    def total_bytes(self) -> int:
        return self.tier.total_bytes

    @property
    def used_bytes(self) -> int:
        return self.tier.used_bytes

    def stored(self) -> dict[str, StoredEntry]:
        return self.tier.stored()

    def names(self) -> set[str]:
        return self.tier.names()

    def added(self) -> dict[str, StoredEntry | CorruptData]:
        return self.tier.added()

    def min_recent(self, num_bytes: int) -> list[str]:
        """See `Tier`. Returns one entry, because free bytes may not be contiguous."""
        with self._turn:
            fits = num_bytes <= self.total_bytes
            return [next(iter(self._used))] if fits and self._used else []

    def write(self, key: str, data: Bytes, facts: Mapping[str, Any] | None = None) -> None:
        with self._turn:
            self.tier.write(key, data, facts)
            self._used[key] = None
            self._used.move_to_end(key)

    def read(self, key: str, into: memoryview, first: int = 0) -> None:
        with self._turn:
            try:
                self.tier.read(key, into, first)
            except CorruptData:
                self._used.pop(key, None)
                raise
            if key in self._used:
                self._used.move_to_end(key)

    def drop(self, key: str) -> None:
        with self._turn:
            self._used.pop(key, None)
            self.tier.drop(key)

    def secret(self) -> bytes | None:
        return self.tier.secret()

    def close(self) -> None:
        self.tier.close()
