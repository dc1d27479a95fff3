"""A tier with LRU eviction on top of another tier."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from quire.errors import CorruptData, TierFull
from quire.offload.tiers.base import Bytes, Stored, Tier


class LRUTier:
    """`Tier` over another one that evicts the least recently written or read entries.

    Args:
        tier: stores the bytes; its existing entries are ordered as it lists them.
        evicting: called with the key of each entry before it is evicted.
    """

    def __init__(self, tier: Tier, evicting: Callable[[str], None] = lambda key: None) -> None:
        self.tier = tier
        self._evicting = evicting
        self._used: OrderedDict[str, None] = OrderedDict.fromkeys(tier.stored())
        self._turn = threading.RLock()

    @property
    def total_bytes(self) -> int:
        """See `Tier`."""
        return self.tier.total_bytes

    @property
    def used_bytes(self) -> int:
        """See `Tier`."""
        return self.tier.used_bytes

    def stored(self) -> dict[str, Stored]:
        """See `Tier`."""
        return self.tier.stored()

    def write(self, key: str, data: Bytes, facts: Mapping[str, Any] | None = None) -> None:
        """See `Tier`. Evicts other entries until the new one fits.

        Raises:
            TierFull: the entry exceeds the tier's capacity.
        """
        with self._turn:
            while True:
                try:
                    self.tier.write(key, data, facts)
                    break
                except TierFull:
                    if memoryview(data).nbytes > self.total_bytes or not self._used:
                        raise
                    self._drop_oldest()
            self._use(key)

    def read(self, key: str, into: memoryview, first: int = 0) -> None:
        """See `Tier`."""
        with self._turn:
            try:
                self.tier.read(key, into, first)
            except CorruptData:
                self._used.pop(key, None)
                raise
            self._use(key)

    def drop(self, key: str) -> None:
        """See `Tier`."""
        with self._turn:
            self._used.pop(key, None)
            self.tier.drop(key)

    def close(self) -> None:
        """See `Tier`."""
        self.tier.close()

    def _use(self, key: str) -> None:
        self._used[key] = None
        self._used.move_to_end(key)

    def _drop_oldest(self) -> None:
        key, _ = self._used.popitem(last=False)
        self._evicting(key)
        self.tier.drop(key)
