"""The tiers for cached prefixes as one hierarchy, fastest first: CPU memory, disk, shared store.

    KV memory  --evicted-->  CPU memory  --evicted-->  disk  --evicted-->  shared store
               <--loaded--   CPU memory  <--promoted-- disk, shared store

Lookups go down the tiers. New entries are written to the first tier. A full tier writes the entries
that it evicts to the next one. Records read from a lower tier are written to the first tier too.
"""

import contextlib
from collections.abc import Iterable, Sequence

from quire.errors import ConfigError, OffloadError, StorageError
from quire.kv.block_records import Records
from quire.kv.prefix import Block
from quire.offload.prefix_store.store import LevelStats, Place, PrefixStore
from quire.plan.fitting import RateEstimator


class PrefixLevels:
    """Prefixes in one or more tiers.

    Args:
        stores: the tiers, fastest first; `level` of each is its index, and `below` the next one.
        rates: estimator of the load time of each tier, by call and byte.

    Attributes:
        stores, rates: see above.
        run_blocks: most blocks of one entry.

    Raises:
        ConfigError: there is no tier.
    """

    def __init__(self, stores: Sequence[PrefixStore], rates: Sequence[RateEstimator]) -> None:
        if not stores:
            raise ConfigError("expected one tier or more for cached prefixes, got none")
        self.stores, self.rates = tuple(stores), list(rates)
        self.run_blocks = stores[0].run_blocks

    @property
    def is_shared(self) -> bool:
        """Whether other processes write to one of the tiers."""
        return any(store.kind.is_shared for store in self.stores)

    @property
    def can_look_up(self) -> bool:
        """Whether a store of other engines responds, as far as is known."""
        return any(store.kind.looks_up and not store.breaker.is_open for store in self.stores)

    @property
    def stats(self) -> tuple[LevelStats, ...]:
        """Contents and counters of each tier."""
        return tuple(store.stats for store in self.stores)

    # ---- lookup --------------------------------------------------------------------------------

    def place_of(self, key: bytes) -> Place | None:
        """Location of a block or snapshot in the fastest tier that holds it."""
        places = (store.place_of(key) for store in self.stores)
        return next((place for place in places if place is not None), None)

    def find(self, blocks: Iterable[Block]) -> list[tuple[Block, Place]]:
        """The leading blocks that are stored in any tier, up to the first that is not."""
        found: list[tuple[Block, Place]] = []
        for block in blocks:
            place = self.place_of(block.key)
            if place is None:
                break
            found.append((block, place))
        return found

    def lacks(self, key: bytes) -> bool:
        """Whether a record is neither stored in any tier nor queued for writing."""
        return all(store.lacks(key) for store in self.stores)

    def first_lacks(self, key: bytes) -> bool:
        """Whether a record is neither stored in the first tier nor queued for writing."""
        return self.stores[0].lacks(key)

    def claim(self, keys: Sequence[bytes]) -> None:
        """Mark records as queued for writing."""
        self.stores[0].claim(keys)

    # ---- bytes ---------------------------------------------------------------------------------

    def put(self, keys: Sequence[bytes], records: Records) -> bool:
        """Write a run of blocks to the first tier that accepts it; see `PrefixStore.put`."""
        return any(store.put(keys, records) for store in self.stores)

    def put_snapshot(self, key: bytes, record: Records) -> bool:
        """Write statistics to the first tier that accepts them; see `PrefixStore.put_snapshot`."""
        return any(store.put_snapshot(key, record) for store in self.stores)

    def read(
        self, keys: Sequence[bytes], blocks: Sequence[Block], place: Place, into: Records
    ) -> None:
        """Read records; a record that a tier cannot return is read from a lower one.

        Args:
            keys: keys of consecutive records of one entry.
            blocks: the block of each record.
            place: location of the first record; it may have been moved to a lower tier since then.
            into: [records, bytes of a record].

        Raises:
            OffloadError: no tier can return one of the records.
        """
        first_level = 0
        if self.stores[place.level].place_of(keys[0]) == place:
            with contextlib.suppress(OffloadError):
                self.stores[place.level].read(blocks, place, into)
                return
            first_level = place.level + 1
        for index, (key, block) in enumerate(zip(keys, blocks, strict=True)):
            self._read_one(key, block, into[index : index + 1], first_level)

    def _read_one(self, key: bytes, block: Block, into: Records, first_level: int) -> None:
        """Read a record from the fastest tier, from this level on, that can return it."""
        for store in self.stores[first_level:]:
            place = store.place_of(key)
            if place is None:
                continue
            with contextlib.suppress(OffloadError):
                store.read([block], place, into)
                return
        raise StorageError(f"no tier can return the tokens up to {block.end}")

    def refresh(self) -> None:
        """Add entries that other processes have written to the shared tiers."""
        for store in self.stores:
            if store.kind.is_shared:
                store.refresh()

    def look_up(self) -> None:
        """Add entries that other engines have written to the stores that requests look up."""
        for store in self.stores:
            if store.kind.looks_up:
                store.refresh()

    def close(self) -> None:
        """Close all tiers, fastest first: entries of CPU memory are written to the next one."""
        for store in self.stores:
            store.close()
