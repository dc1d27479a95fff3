"""The seam of tiers: bytes under a key, whole when written, in ranges when read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from quire.errors import ConfigError, StorageError

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Stored:
    """What lies under a key.

    Attributes:
        num_bytes: of it.
        facts: that whoever wrote it needs to read it: tokens, codec, shape. JSON values.
    """

    num_bytes: int
    facts: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Tier(Protocol):
    """Keeps bytes. What one layer of one sequence or prefix has lies in one piece where it can.

    Every method may raise `StorageError`: the tier cannot do it now, nothing has changed.
    """

    @property
    def total_bytes(self) -> int:
        """That it holds at most."""

    @property
    def used_bytes(self) -> int:
        """That are taken, rounding included."""

    def stored(self) -> dict[str, Stored]:
        """Everything that can be read, by key."""

    def write(self, key: str, data: Bytes, facts: Mapping[str, Any] | None = None) -> None:
        """Keep bytes under a key, in place of what was there; they last as long as the tier does.

        Raises:
            StorageError: there is no room; what was there before is still there.
        """

    def read(self, key: str, into: memoryview, first: int = 0) -> None:
        """Fill `into` with the bytes from `first` on.

        Raises:
            StorageError: nothing lies there, or not as much.
            CorruptData: what lies there is not what was written; it is dropped.
        """

    def drop(self, key: str) -> None:
        """Let bytes go; nothing happens where there are none."""

    def close(self) -> None:
        """Give back what the tier holds of the system; what lasts stays."""


def check_range(key: str, stored: Stored | None, into: memoryview, first: int) -> Stored:
    """What lies under a key, if it has the range that is asked for.

    Raises:
        StorageError: it has not.
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
    """Bytes as a row of bytes.

    Raises:
        ConfigError: they do not lie in one piece.
    """
    view = memoryview(data)
    if not view.contiguous:
        raise ConfigError("expected bytes in one piece")
    return view if view.ndim == 1 and view.format == "B" else view.cast("B")
