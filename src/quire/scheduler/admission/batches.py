"""Exact number of equal requests that reserved admission runs at once, without a scheduler.

The arithmetic is that of reserved admission for requests submitted together. A request is admitted
if its peak, plus the pages that earlier requests will still allocate, fits. Free pages of held
slabs and free slabs are counted. Admitted requests have the pages of their first chunk. If pages
cross slab boundaries, a free slab may provide one page less than an allocated slab. The result can
therefore depend on the order of allocations, so slabs are counted one by one in that order.
"""

from collections.abc import Mapping

from quire.kv.memory import KVMemory
from quire.layout.pages import PageClass
from quire.scheduler.admission.need import Need
from quire.scheduler.admission.peaks import Peaks

Pages = Mapping[PageClass, int]


def rows_at_once(memory: KVMemory, need: Need, *, first_tokens: int, chunk_tokens: int) -> int:
    """Return the number of equal requests that run to completion at the same time.

    Args:
        memory: an empty KV memory with any number of rows; it is not changed.
        need: need of each request at its end.
        first_tokens: prompt tokens that a request computes in its first step.
        chunk_tokens: maximum prefill chunk of a request that evicts no tokens.
    """
    peaks = Peaks(memory, chunk_tokens)
    if not peaks.fits_alone(need):
        return 0
    peak = peaks.peak_pages(need)
    first = peaks.peak_pages(Need(first_tokens, first_tokens, need.eviction))
    slabs = _Slabs(memory)
    rows = 0
    while not rows or slabs.fit({c: peak[c] + rows * max(0, peak[c] - first[c]) for c in peak}):
        for page_class in memory.layout.page_classes:
            slabs.take(page_class, first[page_class])
        rows += 1
    return rows


class _Slabs:
    """Simulated slabs of an empty arena, in the order in which its pools would take them.

    Args:
        memory: the KV memory with the arena.
    """

    def __init__(self, memory: KVMemory) -> None:
        self._slab_bytes, self._num_slabs = memory.arena.slab_bytes, memory.arena.num_slabs
        self._guaranteed = {c: pool.pages_per_slab for c, pool in memory.pools.items()}
        self._free_pages = dict.fromkeys(memory.pools, 0)
        self._next_slab = 0

    def fit(self, pages: Pages) -> bool:
        """Whether this many more pages of each class are sure to fit."""
        missing = ((n - self._free_pages[c], self._guaranteed[c]) for c, n in pages.items())
        slabs = sum(max(0, -(-n // per_slab)) for n, per_slab in missing)
        return slabs <= self._num_slabs - self._next_slab

    def take(self, page_class: PageClass, pages: int) -> None:
        """Take pages; they must fit."""
        while self._free_pages[page_class] < pages:
            self._free_pages[page_class] += self._pages_in(page_class, self._next_slab)
            self._next_slab += 1
        self._free_pages[page_class] -= pages

    def _pages_in(self, page_class: PageClass, slab: int) -> int:
        page_bytes = page_class.page_bytes
        first = -(-slab * self._slab_bytes // page_bytes)
        return (slab + 1) * self._slab_bytes // page_bytes - first
