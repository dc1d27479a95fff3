"""How many rows of equal lengths a KV memory lets in at once, to the row.

The answer of reserved admission to requests that come together, by the same arithmetic and without
a scheduler: a row enters where its peak, and what those before it will still take, fit into the
free pages of held slabs and the free slabs. Rows that have entered hold their first chunk. Where
slab borders cut pages a slab is only sure to hold one page less, until it is taken: so what comes
out can depend on the order, and slabs are counted one by one as the pools take them.
"""

from collections.abc import Mapping

from quire.kv.memory import KVMemory
from quire.layout.pages import PageClass
from quire.scheduler.admission.need import Need
from quire.scheduler.admission.peaks import Peaks

Pages = Mapping[PageClass, int]


def rows_at_once(memory: KVMemory, need: Need, *, first_tokens: int, chunk_tokens: int) -> int:
    """Rows that run to their end side by side.

    Args:
        memory: an empty one, of any number of rows; nothing is taken from it.
        need: of each row at its end.
        first_tokens: of its prompt that a row reads in its first step.
        chunk_tokens: most tokens a prompt that evicts nothing reads in a step.
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
    """Slabs of an empty arena as its pools would take them, counted and not taken.

    Args:
        memory: whose.
    """

    def __init__(self, memory: KVMemory) -> None:
        self._slab_bytes, self._num_slabs = memory.arena.slab_bytes, memory.arena.num_slabs
        self._sure = {c: pool.pages_per_slab for c, pool in memory.pools.items()}
        self._free_pages = dict.fromkeys(memory.pools, 0)
        self._next_slab = 0

    def fit(self, pages: Pages) -> bool:
        """Whether so many more pages of each class can be promised."""
        missing = ((n - self._free_pages[c], self._sure[c]) for c, n in pages.items())
        slabs = sum(max(0, -(-n // sure)) for n, sure in missing)
        return slabs <= self._num_slabs - self._next_slab

    def take(self, page_class: PageClass, pages: int) -> None:
        """Take pages that fit."""
        while self._free_pages[page_class] < pages:
            self._free_pages[page_class] += self._pages_in(page_class, self._next_slab)
            self._next_slab += 1
        self._free_pages[page_class] -= pages

    def _pages_in(self, page_class: PageClass, slab: int) -> int:
        page_bytes = page_class.page_bytes
        first = -(-slab * self._slab_bytes // page_bytes)
        return (slab + 1) * self._slab_bytes // page_bytes - first
