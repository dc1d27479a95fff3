"""Prefixes in a tier: entries are runs of blocks of one chain, indexed by block keys.

    entry    [tokens, pages of block 0][tokens, pages of block 1] ...    a record for each block
    facts    nature, keys of the blocks                                  stored in an index

A key covers all that KV depends on except the machine: tokens, salt, model, codec and pages. The
nature repeats the model's part for the whole store, so that entries of other models or layouts are
never read. The tokens of a block are part of its record and are compared before use.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.errors import CorruptData, OffloadError, TierUnreachable
from quire.kv.prefix_key import Block
from quire.offload.tiers.base import Stored, Tier
from quire.offload.tiers.lru import LRUTier

Records = NDArray[np.uint8]
AWAY_S = 10.0
_ENTRY_BYTES = 4 << 20  # most bytes of an entry; a tier rounds entries up to 1 MiB

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """Location of a block.

    Attributes:
        entry: key of the entry in the tier.
        index: index of the block's record in the entry.
    """

    entry: str
    index: int


class PrefixStore:
    """Blocks of prefixes in a tier.

    Thread-safe; calls to the tier run outside of the lock.

    Args:
        tier: holds the bytes.
        nature: properties of all readable entries: model, precision, codec and layout.
        record_bytes: bytes of one block, including its tokens.
        evicts_when_full: whether to evict the least recently used entry if the tier is full;
            otherwise the store server evicts entries.
        clock: seconds.

    Attributes:
        record_bytes: see above.
        is_shared: whether other processes write to the tier too.
        run_blocks: most blocks of one entry.
        num_found: blocks in the tier when it was opened.
        num_stored: blocks written so far.
        num_discarded: entries that were damaged, missing, or not those of their key when read.
        num_failed: entries that could not be written.
    """

    def __init__(
        self,
        tier: Tier,
        nature: str,
        record_bytes: int,
        *,
        evicts_when_full: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.record_bytes, self.is_shared = record_bytes, not evicts_when_full
        self.run_blocks = max(1, -(-_ENTRY_BYTES // record_bytes))
        self.num_stored = self.num_discarded = self.num_failed = 0
        self._clock, self._unreachable_until_s = clock, -math.inf
        self._tier: Tier = LRUTier(tier, self._forget) if evicts_when_full else tier
        self._nature = nature
        self._lock = threading.Lock()
        self._places: dict[bytes, Place] = {}
        self._entries: dict[str, tuple[bytes, ...]] = {}
        self._queued: set[bytes] = set()
        self.refresh()
        self.num_found = len(self._places)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def num_bytes(self) -> int:
        """Bytes of all records that can be found."""
        return len(self._places) * self.record_bytes

    def refresh(self) -> None:
        """Add entries that other processes have written to the tier.

        Raises:
            StorageError: the tier cannot be read.
        """
        found = self._tier.stored()
        with self._lock:
            for entry, stored in found.items():
                if entry not in self._entries and self._is_ours(stored):
                    self._note(entry, tuple(map(bytes.fromhex, stored.facts["keys"])))

    def _is_ours(self, stored: Stored) -> bool:
        facts = stored.facts
        if facts.get("nature") != self._nature:
            return False
        return stored.num_bytes == len(facts["keys"]) * self.record_bytes

    def _note(self, entry: str, keys: tuple[bytes, ...]) -> None:
        self._entries[entry] = keys
        for index, key in enumerate(keys):
            self._places[key] = Place(entry, index)

    # ---- lookup --------------------------------------------------------------------------------

    def find(self, blocks: Iterable[Block]) -> list[tuple[Block, Place]]:
        """The leading blocks that are stored, up to the first that is not."""
        found: list[tuple[Block, Place]] = []
        if self._is_unreachable:
            return found
        with self._lock:
            for block in blocks:
                place = self._places.get(block.key)
                if place is None:
                    break
                found.append((block, place))
        return found

    def claim(self, keys: Sequence[bytes]) -> None:
        """Mark blocks as queued for writing."""
        with self._lock:
            self._queued.update(keys)

    def lacks(self, key: bytes) -> bool:
        """Whether a block is neither stored nor queued for writing."""
        with self._lock:
            return key not in self._places and key not in self._queued

    # ---- bytes ---------------------------------------------------------------------------------

    def put(self, keys: Sequence[bytes], records: Records) -> bool:
        """Write a run of blocks; return whether it is stored.

        Args:
            keys: keys of consecutive blocks of one chain.
            records: [blocks, record_bytes].
        """
        entry = keys[0].hex() + keys[-1].hex()
        facts = {"nature": self._nature, "keys": [key.hex() for key in keys]}
        try:
            if self._is_unreachable:
                raise TierUnreachable(f"the tier was unreachable less than {AWAY_S:g} s ago")
            self._tier.write(entry, records.reshape(-1).data, facts)
        except OffloadError as error:
            self._failed(error)
            return False
        finally:
            with self._lock:
                self._queued.difference_update(keys)
        with self._lock:
            self._note(entry, tuple(keys))
            self.num_stored += len(keys)
        return True

    def _failed(self, error: OffloadError) -> None:
        self.num_failed += 1
        if isinstance(error, TierUnreachable):
            self._mark_unreachable()
        if self.num_failed == 1:
            logger.warning(
                "a prefix could not be stored: %s; further failures are counted, not logged", error
            )

    def read(self, blocks: Sequence[Block], place: Place, into: Records) -> None:
        """Read the records of consecutive blocks of one entry.

        Args:
            blocks: expected blocks.
            place: location of the first of them.
            into: [blocks, record_bytes].

        Raises:
            OffloadError: the records cannot be read; damaged or foreign entries are discarded.
        """
        try:
            first = place.index * self.record_bytes
            self._tier.read(place.entry, into.reshape(-1).data, first)
        except TierUnreachable:
            self._mark_unreachable()
            raise
        except OffloadError as error:
            self._discard(place.entry, str(error))
            raise
        for block, record in zip(blocks, into, strict=True):
            if record[: len(block.tokens)].tobytes() != block.tokens:
                self._tier.drop(place.entry)
                self._discard(place.entry, "its tokens differ from those of its key")
                raise CorruptData(f"the tokens of {place.entry!r} differ from those of its key")

    @property
    def _is_unreachable(self) -> bool:
        """Whether the tier was unreachable less than `AWAY_S` seconds ago."""
        return self._clock() < self._unreachable_until_s

    def _mark_unreachable(self) -> None:
        if not self._is_unreachable:
            logger.warning("the prefix store is unreachable; it is not used for %g s", AWAY_S)
            self._unreachable_until_s = self._clock() + AWAY_S

    def _discard(self, entry: str, reason: str) -> None:
        logger.warning("a stored prefix is discarded and will be recomputed: %s", reason)
        self.num_discarded += 1
        self._forget(entry)

    def _forget(self, entry: str) -> None:
        with self._lock:
            for key in self._entries.pop(entry, ()):
                place = self._places.get(key)
                if place is not None and place.entry == entry:
                    del self._places[key]

    def close(self) -> None:
        """Close the tier; stored blocks are retained."""
        self._tier.close()
