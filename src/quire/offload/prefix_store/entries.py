"""Index of the entries of one tier: where each block and each snapshot of statistics is stored."""

import threading
from collections.abc import Iterable
from dataclasses import dataclass

SNAPSHOT = "snapshot"
"""Start of the names of entries that hold a snapshot of statistics."""


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
