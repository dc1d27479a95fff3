"""A byte counter with current use, peak use and a limit."""

from collections.abc import Iterator
from contextlib import contextmanager

from quire.errors import HostMemoryFull


class ByteMeter:
    """Byte counter of one memory (device or CPU)."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = self.peak_bytes = 0

    def can_reserve(self, num_bytes: int) -> bool:
        return self.limit_bytes is None or self.used_bytes + num_bytes <= self.limit_bytes

    def reserve(self, num_bytes: int) -> None:
        """Nothing changes on `HostMemoryFull`."""
        if not self.can_reserve(num_bytes):
            raise HostMemoryFull(
                f"expected {num_bytes:,} B more within {self.limit_bytes:,} B of CPU memory, "
                f"{self.used_bytes:,} B are in use: raise swap_space"
            )
        self.used_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    @contextmanager
    def reserving(self, num_bytes: int) -> Iterator[None]:
        """Count `num_bytes` as in use; undo this if the body of the `with` block raises."""
        self.reserve(num_bytes)
        try:
            yield
        except BaseException:
            self.release(num_bytes)
            raise

    def release(self, num_bytes: int) -> None:
        self.used_bytes -= num_bytes
