"""The interface of tiers, and tiers over another one.

Entries are bytes by key, written as a whole and read in ranges.
"""

import contextlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from quire.errors import ConfigError, CorruptData, OffloadError, StorageError, TierUnreachable

Bytes = bytes | bytearray | memoryview
SECRET_BYTES = 32
"""Size of the secret that salts of tenants derive from."""


@dataclass(frozen=True, slots=True)
class StoredEntry:
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
        """Bytes in use, rounding included; 0 if they are unknown."""

    def stored(self) -> dict[str, StoredEntry]:
        """All readable entries, by key."""

    def names(self) -> set[str]:
        """Keys of all readable entries."""

    def added(self) -> dict[str, StoredEntry | CorruptData]:
        """Entries written since the last call, by any process; all entries at the first call.

        An entry that was dropped since then may be missing. Entries of this object may be left out.
        The error of a damaged entry, or of another damaged part of the tier, replaces the entry:
        the tier has dropped the entry or rebuilt the part.
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

    def min_recent(self, num_bytes: int) -> list[str]:
        """Least recently used entries to drop so that a new one of this size may fit.

        Empty if the tier cannot tell, or evicts entries by itself.
        """

    def drop(self, key: str) -> None:
        """Remove an entry if it exists."""

    def secret(self) -> bytes | None:
        """The secret that salts of tenants derive from; the first engine creates it.

        None if the tier is not persistent.
        """

    def close(self) -> None:
        """Release system resources; entries of a persistent tier are retained."""


class LateTier:
    """`Tier` that may be opened later: calls try again until it opens.

    Args:
        open_tier: opens the tier.
        total_bytes: its capacity.

    Raises:
        ConfigError: an invalid option. A tier that cannot be opened for another reason does not
            raise: calls raise `TierUnreachable`.
    """

    def __init__(self, open_tier: Callable[[], Tier], total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._open_tier, self._turn = open_tier, threading.Lock()
        self._opened: Tier | None = None
        with contextlib.suppress(OffloadError):  # the first call that needs the tier reports it
            self._opened = open_tier()

    def _tier(self) -> Tier:
        with self._turn:
            if self._opened is None:
                try:
                    self._opened = self._open_tier()
                except (OffloadError, ConfigError) as error:
                    raise TierUnreachable(str(error)) from error
            return self._opened

    @property
    def used_bytes(self) -> int:
        return 0 if self._opened is None else self._opened.used_bytes

    def stored(self) -> dict[str, StoredEntry]:
        return self._tier().stored()

    def names(self) -> set[str]:
        return self._tier().names()

    def added(self) -> dict[str, StoredEntry | CorruptData]:
        return self._tier().added()

    def write(self, key: str, data: Bytes, facts: Mapping[str, Any] | None = None) -> None:
        self._tier().write(key, data, facts)

    def read(self, key: str, into: memoryview, first: int = 0) -> None:
        self._tier().read(key, into, first)

    def min_recent(self, num_bytes: int) -> list[str]:
        return self._tier().min_recent(num_bytes)

    def drop(self, key: str) -> None:
        if self._opened is not None:
            self._opened.drop(key)

    def secret(self) -> bytes | None:
        return self._tier().secret()

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()


def check_range(key: str, stored: StoredEntry | None, into: memoryview, first: int) -> StoredEntry:
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
