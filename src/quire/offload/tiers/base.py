"""The interface of tiers: entries of bytes by key, written as a whole and read in ranges."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from quire.errors import ConfigError, StorageError

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Stored:
    """An entry of a tier.

    Attributes:
        num_bytes: size.
        facts: metadata that readers need, such as tokens, codec and shape; JSON values.
    """

    num_bytes: int
    facts: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Tier(Protocol):
    """Stores entries of bytes, each contiguous where possible.

    Every method may raise `StorageError`: the operation is impossible now, nothing has changed.
    """

    @property
    def total_bytes(self) -> int:
        """Capacity; 0: no limit is known."""

    @property
    def used_bytes(self) -> int:
        """Bytes in use, rounding included."""

    def stored(self) -> dict[str, Stored]:
        """All readable entries, by key."""

    def names(self) -> set[str]:
        """Keys of all readable entries."""

    def added(self) -> dict[str, Stored]:
        """Entries written since the last call, by any process; all entries at the first call.

        An entry that was dropped since then may be missing. Entries of this object may be left out.
        """

    def write(self, key: str, data: Bytes, facts: Mapping[str, Any] | None = None) -> None:
        """Store bytes under a key, replacing its entry; they last as long as the tier does.

        Raises:
            TierFull: too little free space; the previous entry is still there.
        """

    def read(self, key: str, into: memoryview, first: int = 0) -> None:
        """Fill `into` with the entry's bytes from `first` on.

        Raises:
            StorageError: there is no such entry, or it is too short.
            CorruptData: the bytes differ from those written; the entry is dropped.
        """

    def least_recent(self, num_bytes: int) -> list[str]:
        """Least recently used entries to drop so that a new one of this size may fit.

        Empty if the tier cannot tell, or evicts entries by itself.
        """

    def drop(self, key: str) -> None:
        """Remove an entry if it exists."""

    def close(self) -> None:
        """Release system resources; entries of a persistent tier are retained."""


def check_range(key: str, stored: Stored | None, into: memoryview, first: int) -> Stored:
    """Check that an entry exists and has the requested range; return it.

    Raises:
        StorageError: the entry is missing or too short.
    """
    if stored is None:
        raise StorageError(f"nothing is stored under {key!r}")
    if not 0 <= first <= first + into.nbytes <= stored.num_bytes:
        raise StorageError(
            f"{key!r} has {stored.num_bytes:,} B, expected bytes {first:,} to "
            f"{first + into.nbytes:,}"
        )
    return stored


def flat(data: Bytes) -> memoryview:
    """View of contiguous bytes as one dimension of bytes.

    Raises:
        ConfigError: the bytes are not contiguous.
    """
    view = memoryview(data)
    if not view.contiguous:
        raise ConfigError("expected contiguous bytes, got a strided buffer")
    return view if view.ndim == 1 and view.format == "B" else view.cast("B")
