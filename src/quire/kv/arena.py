"""The arena: all KV bytes of a device, divided into slabs that page pools allocate and free.

The arena tracks bytes and slab numbers, no pages and no tensors. A slab serves one page class at a
time, so page classes of different sizes share the arena without a static split.
"""

from collections.abc import Sequence

from quire.errors import ConfigError, InvariantError
from quire.kv.fences import CopyFences
from quire.layout.sizes import rounded_size
from quire.layout.slabs import choose_slab_bytes, slabs_for


class Arena:
    """A fixed number of bytes in slabs of equal size.

    Attributes:
        size_option: the command-line option that sets `total_bytes`.
        fences: copies in flight that read pages.
    """

    size_option = "--kv-memory"

    def __init__(self, total_bytes: int, page_bytes: Sequence[int]) -> None:
        self._page_bytes = tuple(page_bytes)
        self.fences = CopyFences()
        self.slab_bytes = choose_slab_bytes(total_bytes, page_bytes)
        self.num_slabs = total_bytes // self.slab_bytes
        if self.num_slabs < 1:
            raise ConfigError(
                f"expected a KV memory of {self.slab_bytes:,} B or more, got {total_bytes:,} B "
                f"(largest page {max(page_bytes):,} B); raise --kv-memory or lower --block-size"
            )
        self._free = list(range(self.num_slabs - 1, -1, -1))

    def slab_bytes_of(self, total_bytes: int) -> int:
        return choose_slab_bytes(total_bytes, self._page_bytes)

    def fitting_bytes(self, pages: Sequence[tuple[int, int]]) -> int:
        """The smallest size of an arena for (page bytes, number of pages), rounded up.

        An arena of another size may have slabs of another size, so the size is searched for.
        """
        total_bytes, needed_bytes = 0, rounded_size(sum(size * count for size, count in pages))
        while needed_bytes > total_bytes:
            total_bytes = needed_bytes
            slab_bytes = self.slab_bytes_of(total_bytes)
            needed_bytes = rounded_size(slab_bytes * slabs_for(slab_bytes, pages))
        return total_bytes

    @property
    def total_bytes(self) -> int:
        return self.num_slabs * self.slab_bytes

    @property
    def span_bytes(self) -> int:
        return self.total_bytes

    @property
    def num_free_slabs(self) -> int:
        return len(self._free)

    @property
    def free_slabs(self) -> frozenset[int]:
        return frozenset(self._free)

    def allocate_slab(self) -> int:
        """Allocate a slab; the caller must have checked `num_free_slabs`."""
        return self._free.pop()

    def free_slab(self, slab: int) -> None:
        self._free.append(slab)

    def check(self) -> None:
        if len(set(self._free)) != len(self._free):
            raise InvariantError("a slab is twice in the free list of the arena")
