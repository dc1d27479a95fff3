"""Counts bytes that are held now and were held at most; refuses more than a limit."""

from collections.abc import Iterator
from contextlib import contextmanager

from quire.errors import HostPoolFull


class ByteMeter:
    """Bytes of one memory.

    Attributes:
        limit_bytes: most that may be held; None: any.
        used_bytes: held now.
        peak_bytes: most that were held at once.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = self.peak_bytes = 0

    def can_take(self, num_bytes: int) -> bool:
        """Whether so many more are within the limit."""
        return self.limit_bytes is None or self.used_bytes + num_bytes <= self.limit_bytes

    def take(self, num_bytes: int) -> None:
        """Hold so many more.

        Raises:
            HostPoolFull: they would pass the limit; nothing was changed.
        """
        if not self.can_take(num_bytes):
            raise HostPoolFull(
                f"expected {num_bytes:,} B more within {self.limit_bytes:,} B of host memory, "
                f"{self.used_bytes:,} B are taken: raise swap_space"
            )
        self.used_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    @contextmanager
    def taking(self, num_bytes: int) -> Iterator[None]:
        """Hold so many more, unless making them fails.

        Raises:
            HostPoolFull: see `take`.
        """
        self.take(num_bytes)
        try:
            yield
        except BaseException:
            self.give(num_bytes)
            raise

    def give(self, num_bytes: int) -> None:
        """Hold so many fewer."""
        self.used_bytes -= num_bytes
