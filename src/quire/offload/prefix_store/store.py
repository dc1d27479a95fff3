"""Prefixes in one tier: entries are runs of blocks of one chain, indexed by block keys.

    entry    [tokens, pages of block 0][tokens, pages of block 1] ...    a record for each block
    entry    [tokens of a block, statistics at its end]                  a snapshot, one record
    facts    nature, keys of the records                                 stored in an index

A key covers all that KV depends on except the machine: tokens, salt, model, codec and pages. The
nature repeats the model's part for the whole store, so that entries of other models or layouts are
never read. The tokens of a block are part of its record and are compared before use.

A store may have a store below it. Entries that a full tier evicts are written to the tier below,
and so are all entries of a tier that is not persistent when it is closed.

Stops the calls to a tier that fails, for a time that doubles with every failed trial.

    closed --failure--> open for 1 s --trial fails--> open for 2 s ... 60 s
       ^------------------trial succeeds------------------'

An outage is logged once when it begins and once when it ends.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from quire.errors import CorruptData, OffloadError, TierFull, TierUnreachable
from quire.kv.block_records import Records
from quire.kv.prefix import Block
from quire.offload.tiers.base import Bytes, StoredEntry, Tier

SNAPSHOT = "snapshot"
"""Start of the names of entries that hold a snapshot of statistics."""
FIRST_S, MAX_S = 1.0, 60.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """Location of a record.

    Attributes:
        entry: key of the entry in the tier.
        index: index of the record in the entry.
        level: index of the tier; 0 is the fastest.
    """

    entry: str
    index: int
    level: int = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a tier.

    Attributes:
        name: key of the entry in the tier.
        keys: keys of its records: consecutive blocks of one chain, or one snapshot.
        record_bytes: bytes of each record.
    """

    name: str
    keys: tuple[bytes, ...]
    record_bytes: int

    @property
    def is_snapshot(self) -> bool:
        """Whether the entry holds statistics instead of blocks."""
        return self.name.startswith(SNAPSHOT)

    @property
    def num_bytes(self) -> int:
        """Bytes of all records."""
        return len(self.keys) * self.record_bytes


class EntryIndex:
    """Entries of one tier, by name and by the keys of their records. Thread-safe.

    Args:
        level: index of the tier.
    """

    def __init__(self, level: int) -> None:
        self._level = level
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        self._places: dict[bytes, Place] = {}
        self._queued: set[bytes] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __len__(self) -> int:
        """Number of blocks that can be found."""
        with self._lock:
            snapshots = sum(entry.is_snapshot for entry in self._entries.values())
            return len(self._places) - snapshots

    @property
    def num_bytes(self) -> int:
        """Bytes of all records that can be found."""
        with self._lock:
            places = self._places.values()
            return sum(self._entries[place.entry].record_bytes for place in places)

    def entries(self) -> list[Entry]:
        """All entries, in the order in which they were added."""
        with self._lock:
            return list(self._entries.values())

    def get(self, name: str) -> Entry | None:
        """Return an entry; None if there is none of this name."""
        with self._lock:
            return self._entries.get(name)

    def place_of(self, key: bytes) -> Place | None:
        """Location of a record; None if it is not stored."""
        with self._lock:
            return self._places.get(key)

    def lacks(self, key: bytes) -> bool:
        """Whether a record is neither stored nor queued for writing."""
        with self._lock:
            return key not in self._places and key not in self._queued

    def claim(self, keys: Iterable[bytes]) -> None:
        """Mark records as queued for writing."""
        with self._lock:
            self._queued.update(keys)

    def unclaim(self, keys: Iterable[bytes]) -> None:
        """Records are no longer queued for writing."""
        with self._lock:
            self._queued.difference_update(keys)

    def add(self, entry: Entry) -> None:
        """Add an entry that has been written."""
        with self._lock:
            self._entries[entry.name] = entry
            for index, key in enumerate(entry.keys):
                self._places[key] = Place(entry.name, index, self._level)

    def forget(self, name: str) -> None:
        """Remove an entry; no effect if there is none of this name."""
        with self._lock:
            entry = self._entries.pop(name, None)
            for key in () if entry is None else entry.keys:
                place = self._places.get(key)
                if place is not None and place.entry == name:
                    del self._places[key]


class CircuitBreaker:
    """Whether a tier may be called now.

    Args:
        name: name of the tier, for the log.
        clock: seconds.

    Attributes:
        num_outages: how often the tier began to fail.
        reason: why the last call failed.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_outages, self.reason = 0, ""
        self._name, self._clock = name, clock
        self._wait_s, self._until_s = 0.0, 0.0

    @property
    def is_open(self) -> bool:
        """Whether the tier is not to be called yet."""
        return self._wait_s > 0 and self._clock() < self._until_s

    def failed(self, reason: object) -> None:
        """Open, or stay open for longer after a failed trial; no effect while it is open."""
        if self.is_open:
            return
        self.reason = str(reason)
        if not self._wait_s:
            self.num_outages += 1
            logger.warning(
                "the %s tier of cached prefixes is not used for now: %s; its prefixes are "
                "recomputed, and it is tried again after %g s, later after up to %g s",
                self._name,
                reason,
                FIRST_S,
                MAX_S,
            )
        self._wait_s = min(2 * self._wait_s, MAX_S) if self._wait_s else FIRST_S
        self._until_s = self._clock() + self._wait_s

    def succeeded(self) -> None:
        """Close after a successful call."""
        if self._wait_s:
            self._wait_s = 0.0
            logger.warning("the %s tier of cached prefixes is used again", self._name)


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelStats:
    """Contents and counters of one tier for prefixes.

    Attributes:
        name: cpu, disk or remote.
        stored_bytes: bytes of the blocks and statistics that can be found in it.
        found_blocks: blocks that it held when the engine started.
        stored_blocks: blocks written since then.
        spilled_bytes: bytes of evicted entries that were written to the tier below.
        num_discarded: entries that were damaged or missing when they were listed or read.
        num_damaged: damaged entries, and other damaged parts of the tier that were rebuilt.
        num_failed: entries that could not be written.
        num_outages: how often it stopped responding.
    """

    name: str
    stored_bytes: int
    found_blocks: int
    stored_blocks: int
    spilled_bytes: int
    num_discarded: int
    num_damaged: int
    num_failed: int
    num_outages: int


@dataclass(frozen=True, slots=True)
class TierKind:
    """Kind of a tier for prefixes.

    Attributes:
        name: for reports.
        persistent: whether entries outlive the tier; if not, they are written to the tier below
            when it is closed.
        is_shared: whether other processes may write to the tier too.
        looks_up: whether new requests look up what others have just written.
    """

    name: str
    persistent: bool = True
    is_shared: bool = True
    looks_up: bool = False


CPU = TierKind("cpu", persistent=False, is_shared=False)
DISK = TierKind("disk")
REMOTE = TierKind("remote", looks_up=True)

RECONCILE_S = 300.0
"""Time after which entries that other processes have evicted are forgotten."""
MAX_DAMAGED = 3
"""Damaged entries in a row after which a tier counts as failed."""
_ENTRY_BYTES = 4 << 20  # most bytes of an entry
_MIN_ENTRIES = 8


def _entry_bytes(tier: Tier) -> int:
    """Most bytes of an entry; a small tier has smaller entries, so that it holds several."""
    total_bytes = tier.total_bytes  # 0: no limit
    return min(_ENTRY_BYTES, total_bytes // _MIN_ENTRIES) if total_bytes else _ENTRY_BYTES


def _run_name(keys: Sequence[bytes]) -> str:
    return keys[0].hex() + keys[-1].hex()


def _snapshot_name(key: bytes) -> str:
    return f"{SNAPSHOT}-{key.hex()}"


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
        record_bytes, kind: see above.
        breaker: stops calls to a tier that fails.
        run_blocks: most blocks of one entry.
        num_found: blocks in the tier when it was opened.
        num_stored: blocks written so far.
        num_discarded: entries that were damaged, missing, or not those of their key when listed or
            read.
        num_damaged: those of them that were damaged, and other damaged parts of the tier.
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
        self.record_bytes, self.kind = record_bytes, kind
        self.num_stored = self.num_discarded = self.num_failed = self.num_damaged = 0
        self._spilled_bytes = 0
        self.breaker = CircuitBreaker(kind.name, clock)
        self._clock, self._reconciled_s = clock, clock()
        self._damaged_in_row = 0
        self._tier, self._nature, self._below = tier, nature, below
        self._index = EntryIndex(level)
        self.run_blocks = max(1, -(-_entry_bytes(tier) // record_bytes))
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
            name=self.kind.name,
            stored_bytes=self.num_bytes,
            found_blocks=self.num_found,
            stored_blocks=self.num_stored,
            spilled_bytes=self._spilled_bytes,
            num_discarded=self.num_discarded,
            num_damaged=self.num_damaged,
            num_failed=self.num_failed,
            num_outages=self.breaker.num_outages,
        )

    def refresh(self) -> None:
        """Add entries that other processes have written to the tier; no effect while it fails."""
        if self.breaker.is_open:
            return
        try:
            self._add_found()
            if self._clock() - self._reconciled_s >= RECONCILE_S:
                self._reconciled_s = self._clock()
                # forget entries that are no longer in the tier
                before = {entry.name for entry in self._index.entries()}
                for name in before - self._tier.names():
                    self._index.forget(name)
        except OffloadError as error:
            self.breaker.failed(error)
        else:
            self._responded()

    def _responded(self) -> None:
        """The tier has responded; it is used again unless its data are damaged."""
        if self._damaged_in_row < MAX_DAMAGED:
            self.breaker.succeeded()

    def _add_found(self) -> None:
        for name, stored in self._tier.added().items():
            try:
                entry = None if name in self._index else self._entry_of(name, stored)
            except CorruptData as error:
                self._discard(name, error, is_outage=False)
                self._tier.drop(name)
            else:
                if entry is not None:
                    self._index.add(entry)

    def _entry_of(self, name: str, stored: StoredEntry | CorruptData) -> Entry | None:
        """An entry of the tier; None if it is that of another model or layout.

        Raises:
            CorruptData: it is damaged.
        """
        if isinstance(stored, CorruptData):
            raise stored
        if stored.facts.get("nature") != self._nature:
            return None
        try:
            keys = tuple(map(bytes.fromhex, stored.facts["keys"]))
            entry = Entry(name, keys, stored.num_bytes // len(keys))
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise CorruptData(f"the facts of {name!r} are damaged: {error}") from error
        is_snapshot = entry.is_snapshot and len(keys) == 1
        if name != (_snapshot_name(keys[0]) if entry.is_snapshot else _run_name(keys)) or (
            not is_snapshot and stored.num_bytes != len(keys) * self.record_bytes
        ):
            raise CorruptData(f"the facts of {name!r} are not those of its name and size")
        return entry

    # ---- lookup --------------------------------------------------------------------------------

    def place_of(self, key: bytes) -> Place | None:
        """Location of a record; None if it is not stored, or if the tier fails."""
        return None if self.breaker.is_open else self._index.place_of(key)

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
        return self._put(Entry(_run_name(keys), tuple(keys), self.record_bytes), records)

    def put_snapshot(self, key: bytes, record: Records) -> bool:
        """Write the statistics at the end of a block; return whether they are stored.

        Args:
            key: key of the snapshot.
            record: [bytes] tokens of the block, then the statistics.
        """
        return self._put(Entry(_snapshot_name(key), (key,), record.nbytes), record)

    def _put(self, entry: Entry, records: Records) -> bool:
        facts = {"nature": self._nature, "keys": [key.hex() for key in entry.keys]}
        try:
            if self.breaker.is_open:
                raise TierUnreachable(f"the {self.kind.name} tier has failed and is not used yet")
            self._write(entry.name, records.reshape(-1).data, facts)
        except OffloadError as error:
            self._failed(error)
            return False
        finally:
            self._index.unclaim(entry.keys)
        self._responded()
        self._index.add(entry)
        self.num_stored += 0 if entry.is_snapshot else len(entry.keys)
        return True

    def _write(self, name: str, data: Bytes, facts: Mapping[str, object]) -> None:
        """Write an entry; evict others until it fits.

        Raises:
            TierFull: the entry exceeds the tier's capacity.
        """
        while True:
            try:
                self._tier.write(name, data, facts)
            except TierFull:
                evicted = self._tier.min_recent(memoryview(data).nbytes)
                if not evicted:
                    raise
                for old in evicted:
                    self._evict(old)
            else:
                return

    def _failed(self, error: OffloadError) -> None:
        self.num_failed += 1
        if isinstance(error, TierUnreachable):
            self.breaker.failed(error)
        elif self.num_failed == 1:
            logger.warning(
                "a prefix could not be stored: %s; further failures are counted, not logged", error
            )

    def _evict(self, name: str) -> None:
        """Write an entry to the tier below, then remove it."""
        self._spill(name)
        self._index.forget(name)
        self._tier.drop(name)

    def _spill(self, name: str) -> None:
        """Write an entry to the tier below, unless all of its records are stored there."""
        below, entry = self._below, self._index.get(name)
        if below is None or entry is None or not any(map(below.lacks, entry.keys)):
            return
        records = np.empty(entry.num_bytes, dtype=np.uint8)
        try:
            self._tier.read(name, records.data)
        except OffloadError as error:
            self._discard(name, error)
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
        except TierUnreachable as error:
            self.breaker.failed(error)
            raise
        except OffloadError as error:
            self._discard(place.entry, error)
            raise
        for block, record in zip(blocks, into, strict=True):
            if record[: len(block.tokens)].tobytes() != block.tokens:
                self._tier.drop(place.entry)
                text = f"the tokens of {place.entry!r} differ from those of its key"
                self._discard(place.entry, CorruptData(text))
                raise CorruptData(text)
        self._damaged_in_row = 0
        self._responded()

    def _discard(self, name: str, error: OffloadError, *, is_outage: bool = True) -> None:
        """Forget an entry that cannot be used.

        Args:
            name: key of the entry.
            error: reason.
            is_outage: whether many damaged entries in a row are an outage.
        """
        self._index.forget(name)
        self.num_discarded += 1
        if not isinstance(error, CorruptData):
            logger.debug("a stored prefix is missing and will be recomputed: %s", error)
            return
        self._damaged_in_row += is_outage
        if self._damaged_in_row >= MAX_DAMAGED:
            self.breaker.failed(error)
        elif self.num_damaged == 0:
            logger.warning(
                "the %s tier of cached prefixes has damaged data: %s; lost prefixes are "
                "recomputed, and further damage is counted, not logged",
                self.kind.name,
                error,
            )
        self.num_damaged += 1

    def close(self) -> None:
        """Close the tier. Its entries are retained, those of a CPU tier by the tier below."""
        if not self.kind.persistent:
            for entry in self._index.entries():
                self._spill(entry.name)
        self._tier.close()
