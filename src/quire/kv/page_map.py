"""The page map: owner and state of every page of an arena, in the order of addresses.

    arena    | slab 0 (class A) | slab 1 (class B) | slab 2 (free) | ...
    pages    a a a . b          c c c c            . . . . .          . is a free page

`read_pages` copies the facts between two steps; it costs a few passes over the pages and their
tables. `PageFacts.in_order` sorts the copies and can run in another thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.kv.ledger import exact_rows
from quire.kv.memory import KVMemory
from quire.kv.pages import PageNumbers, PagePool
from quire.kv.tables import NO_PAGE, LaneTable, Rows
from quire.layout.pages import PageClass

FREE, CACHE = 0, 1
"""Owners of free pages, and of pages that no listed row references: cached or loading prefixes."""
FIRST_ROW = 2
"""Owner of the pages of the first listed row."""
MAX_ROWS = (1 << 16) - FIRST_ROW

EVICTED, SHARED, CACHED, STAGING, AUXILIARY = 1, 2, 4, 8, 32
"""Bits of a page's state.

EVICTED: tokens of its sequence were evicted. SHARED: several sequences reference it. CACHED: a
sequence and the prefix cache reference it. STAGING: it holds offloaded KV only while a layer runs.
AUXILIARY: statistics, or tokens in a finer format.
"""

_DENSE = 16
"""Page numbers per reference below which a count over all page numbers is faster."""

Owners = NDArray[np.uint16]
States = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class ClassFacts:
    """The pages of one page class in slabs of the class, or in free slabs."""

    page_class: PageClass
    codec: str
    pages: PageNumbers  # ascending
    owner: Owners  # [pages] FREE, CACHE, or FIRST_ROW plus the index of a row
    state: States  # [pages] bits


@dataclass(frozen=True, slots=True)
class PageFacts:
    """A copy of the owners and states of all pages."""

    classes: tuple[ClassFacts, ...]

    def in_order(self) -> tuple[Owners, States, NDArray[np.uint8]]:
        """Owner, state and index of the class of every page, by address."""
        owner = np.concatenate([one.owner for one in self.classes])
        state = np.concatenate([one.state for one in self.classes])
        lengths = [len(one.pages) for one in self.classes]
        kind = np.repeat(np.arange(len(lengths), dtype=np.uint8), lengths)
        if np.count_nonzero(lengths) <= 1:
            return owner, state, kind
        first = [c.pages.astype(np.int64) * c.page_class.page_bytes for c in self.classes]
        order = np.argsort(np.concatenate(first), kind="stable")
        return owner[order], state[order], kind[order]


def read_pages(memory: KVMemory, rows: Sequence[int], *, only_these: bool = False) -> PageFacts:
    """Copy all owners and states; a page of several rows belongs to the first of them."""
    held = np.array(rows[:MAX_ROWS], dtype=np.int64)
    evicted = ~exact_rows(memory)[held]
    classes = []
    for number, pool in enumerate(memory.pools.values()):
        slabs = pool.held_slabs
        if number == 0 and not only_these:  # free slabs are shown as free pages of one class
            slabs |= memory.arena.free_slabs
        pages = _pages_of_slabs(slabs, memory.arena.slab_bytes, pool.page_class.page_bytes)
        reader = _ClassReader(memory, pool, held, evicted)
        classes.append(reader.read(pages, only_these=only_these))
    return PageFacts(tuple(classes))


def _pages_of_slabs(slabs: frozenset[int], slab_bytes: int, page_bytes: int) -> PageNumbers:
    """Numbers of the pages that are wholly inside one of these slabs, ascending."""
    slab = np.array(sorted(slabs), dtype=np.int64)
    first, end = -(-slab * slab_bytes // page_bytes), (slab + 1) * slab_bytes // page_bytes
    lengths = np.maximum(end - first, 0)
    before = np.repeat(np.cumsum(lengths) - lengths, lengths)
    numbers = np.repeat(first, lengths) + np.arange(int(lengths.sum())) - before
    pages: PageNumbers = numbers.astype(np.int32)
    return pages


class _ClassReader:
    """Collects the owners and states of one class's pages.

    The arrays span all page numbers, but only entries of pages in use are touched: the system
    assigns no memory to the others.
    """

    def __init__(
        self, memory: KVMemory, pool: PagePool, rows: Rows, evicted: NDArray[np.bool_]
    ) -> None:
        self._memory, self._pool, self._rows, self._evicted = memory, pool, rows, evicted
        size = len(pool.ref_counts)
        self._owner = np.zeros(size, dtype=np.uint16)
        self._state = np.zeros(size, dtype=np.uint8)
        self._references = np.zeros(size, dtype=np.int32) if pool.num_shared else None

    def read(self, pages: PageNumbers, *, only_these: bool) -> ClassFacts:
        page_class = self._pool.page_class
        for table in self._memory.tables.values():
            if table.group.page_class == page_class and len(self._rows):
                self._claim(table)
        if only_these:
            pages = pages[self._owner[pages] > 0]
        owner, state, used = self._owner[pages], self._state[pages], self._pool.ref_counts[pages]
        owner[(owner == FREE) & (used > 0)] = CACHE
        if self._references is not None:
            references, own_pages = self._references[pages], state & STAGING == 0
            state[(references > 1) & own_pages] |= SHARED
            if not only_these:
                state[(references > 0) & (used > references) & own_pages] |= CACHED
        return ClassFacts(page_class, page_class.codec_name, pages, owner, state)

    def _claim(self, table: LaneTable) -> None:
        rows = self._rows
        width = max(1, int(table.num_pages[rows].max()))
        block = table.pages[rows, :, :width]
        (entry,) = np.nonzero(block.reshape(-1) != NO_PAGE)
        pages = block.reshape(-1)[entry]
        row = entry // (block.shape[1] * width)
        self._own(pages, row, AUXILIARY if table.group.private else 0)
        staged = table.staged[rows]
        if staged.any():
            self._state[pages[entry % width < staged[row]]] |= STAGING

    def _own(self, pages: PageNumbers, row: NDArray[np.int64], bits: int) -> None:
        self._owner[pages[::-1]] = (row + FIRST_ROW)[
            ::-1
        ]  # the last write is that of the first row
        if bits:
            self._state[pages] |= bits
        if self._evicted.any():
            self._state[pages[self._evicted[row]]] |= EVICTED
        if self._references is None:
            return
        if len(self._references) < _DENSE * len(pages):
            self._references += np.bincount(pages, minlength=len(self._references))
        else:
            np.add.at(self._references, pages, 1)
