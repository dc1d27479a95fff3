"""Prefixes in one tier: entries are runs of blocks of one chain, indexed by block keys.

    entry    [tokens, pages of block 0][tokens, pages of block 1] ...    a record for each block
    entry    [tokens of a block, statistics at its end]                  a snapshot, one record
    facts    nature, keys of the records                                 stored in an index

A key covers all that KV depends on except the machine: tokens, salt, model, codec and pages. The
nature repeats the model's part for the whole store, so that entries of other models or layouts are
never read. The tokens of a block are part of its record and are compared before use.

A store may have a store below it. Entries that a full tier evicts are written to the tier below,
and so are all entries of a tier that is not persistent when it is closed.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from quire.errors import CorruptData, OffloadError, TierUnreachable
from quire.kv.block_records import Records
from quire.kv.prefix_key import Block
from quire.offload.prefix_store.entries import SNAPSHOT, Entry, EntryIndex, Place
from quire.offload.prefix_store.tier_kinds import DISK, LevelStats, TierKind
from quire.offload.tiers.base import Stored, Tier
from quire.offload.tiers.lru import LRUTier

AWAY_S = 10.0
_ENTRY_BYTES = 4 << 20  # most bytes of an entry; a tier rounds entries up to 1 MiB
_LEAST_ENTRIES = 8

logger = logging.getLogger(__name__)


def _entry_bytes(tier: Tier, kind: TierKind) -> int:
    """Most bytes of an entry; a small CPU tier has smaller entries, so that it holds several."""
    return (
        _ENTRY_BYTES if kind.persistent else min(_ENTRY_BYTES, tier.total_bytes // _LEAST_ENTRIES)
    )


class PrefixStore:
    """Blocks of prefixes in one tier.

    Thread-safe; calls to the tier run outside of the index's lock.

    Args:
        tier: holds the bytes.
        nature: properties of all readable entries: model, precision, codec and layout.
        record_bytes: bytes of one block, including its tokens.
        kind: CPU, DISK or REMOTE.
        level: index of the tier in its hierarchy; 0 is the fastest.
        below: the next slower tier, which receives evicted entries; None discards them.
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
        kind: TierKind = DISK,
        level: int = 0,
        below: "PrefixStore | None" = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.record_bytes, self.is_shared = record_bytes, not kind.evicts_when_full
        self.run_blocks = max(1, -(-_entry_bytes(tier, kind) // record_bytes))
        self.num_stored = self.num_discarded = self.num_failed = self._spilled_bytes = 0
        self._clock, self._unreachable_until_s = clock, -math.inf
        self._bytes = tier
        self._tier: Tier = LRUTier(tier, self._evict) if kind.evicts_when_full else tier
        self._nature, self._kind, self._below = nature, kind, below
        self._index = EntryIndex(level)
        self.refresh()
        self.num_found = len(self._index)

    def __len__(self) -> int:
        """Number of blocks that can be found."""
        return len(self._index)

    @property
    def num_bytes(self) -> int:
        """Bytes of all records that can be found."""
        return self._index.num_bytes

    @property
    def stats(self) -> LevelStats:
        """Contents and counters."""
        return LevelStats(
            name=self._kind.name,
            stored_bytes=self.num_bytes,
            found_blocks=self.num_found,
            stored_blocks=self.num_stored,
            spilled_bytes=self._spilled_bytes,
            num_discarded=self.num_discarded,
            num_failed=self.num_failed,
        )

    def refresh(self) -> None:
        """Add entries that other processes have written to the tier.

        Raises:
            StorageError: the tier cannot be read.
        """
        for name, stored in self._tier.stored().items():
            if name not in self._index and self._is_ours(name, stored):
                keys = tuple(map(bytes.fromhex, stored.facts["keys"]))
                self._index.add(Entry(name, keys, stored.num_bytes // len(keys)))

    def _is_ours(self, name: str, stored: Stored) -> bool:
        if stored.facts.get("nature") != self._nature:
            return False
        num_keys = len(stored.facts["keys"])
        if name.startswith(SNAPSHOT):
            return num_keys == 1
        return stored.num_bytes == num_keys * self.record_bytes

    # ---- lookup --------------------------------------------------------------------------------

    def place_of(self, key: bytes) -> Place | None:
        """Location of a record; None if it is not stored, or if the tier is unreachable."""
        return None if self._is_unreachable else self._index.place_of(key)

    def find(self, blocks: Iterable[Block]) -> list[tuple[Block, Place]]:
        """The leading blocks that are stored, up to the first that is not."""
        found: list[tuple[Block, Place]] = []
        for block in blocks:
            place = self.place_of(block.key)
            if place is None:
                break
            found.append((block, place))
        return found

    def claim(self, keys: Sequence[bytes]) -> None:
        """Mark records as queued for writing."""
        self._index.claim(keys)

    def lacks(self, key: bytes) -> bool:
        """Whether a record is neither stored nor queued for writing."""
        return self._index.lacks(key)

    # ---- write ---------------------------------------------------------------------------------

    def put(self, keys: Sequence[bytes], records: Records) -> bool:
        """Write a run of blocks; return whether it is stored.

        Args:
            keys: keys of consecutive blocks of one chain.
            records: [blocks, record_bytes].
        """
        name = keys[0].hex() + keys[-1].hex()
        return self._put(Entry(name, tuple(keys), self.record_bytes), records)

    def put_snapshot(self, key: bytes, record: Records) -> bool:
        """Write the statistics at the end of a block; return whether they are stored.

        Args:
            key: key of the snapshot.
            record: [bytes] tokens of the block, then the statistics.
        """
        return self._put(Entry(f"{SNAPSHOT}-{key.hex()}", (key,), record.nbytes), record)

    def _put(self, entry: Entry, records: Records) -> bool:
        facts = {"nature": self._nature, "keys": [key.hex() for key in entry.keys]}
        try:
            if self._is_unreachable:
                raise TierUnreachable(f"the tier was unreachable less than {AWAY_S:g} s ago")
            self._tier.write(entry.name, records.reshape(-1).data, facts)
        except OffloadError as error:
            self._failed(error)
            return False
        finally:
            self._index.unclaim(entry.keys)
        self._index.add(entry)
        self.num_stored += 0 if entry.is_snapshot else len(entry.keys)
        return True

    def _failed(self, error: OffloadError) -> None:
        self.num_failed += 1
        if isinstance(error, TierUnreachable):
            self._mark_unreachable()
        if self.num_failed == 1:
            logger.warning(
                "a prefix could not be stored: %s; further failures are counted, not logged", error
            )

    def _evict(self, name: str) -> None:
        """Write an entry to the tier below before it is evicted."""
        self._spill(name)
        self._index.forget(name)

    def _spill(self, name: str) -> None:
        """Write an entry to the tier below, unless all of its records are stored there."""
        below, entry = self._below, self._index.get(name)
        if below is None or entry is None or not any(map(below.lacks, entry.keys)):
            return
        records = np.empty(entry.num_bytes, dtype=np.uint8)
        try:
            self._bytes.read(name, records.data)
        except OffloadError as error:
            self._discard(name, str(error))
            return
        if below._put(entry, records):
            self._spilled_bytes += records.nbytes

    # ---- read ----------------------------------------------------------------------------------

    def read(self, blocks: Sequence[Block], place: Place, into: Records) -> None:
        """Read the records of consecutive blocks of one entry, or the snapshot of one block.

        Args:
            blocks: expected blocks.
            place: location of the first of them.
            into: [blocks, bytes of a record].

        Raises:
            OffloadError: the records cannot be read; damaged or foreign entries are discarded.
        """
        try:
            self._tier.read(place.entry, into.reshape(-1).data, place.index * into.shape[1])
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

    def _discard(self, name: str, reason: str) -> None:
        logger.warning("a stored prefix is discarded and will be recomputed: %s", reason)
        self.num_discarded += 1
        self._index.forget(name)

    def close(self) -> None:
        """Close the tier. Its entries are retained, those of a CPU tier by the tier below."""
        if not self._kind.persistent:
            for entry in self._index.entries():
                self._spill(entry.name)
        self._tier.close()
