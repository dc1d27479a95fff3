"""The page map: owner and state of every page of an arena, in the order of addresses.

    arena    | slab 0 (class A) | slab 1 (class B) | slab 2 (free) | ...
    pages    a a a . b          c c c c            . . . . .          . is a free page

`read_pages` copies the facts between two steps; it costs a few passes over the page tables.
`PageFacts.in_order` sorts the copies and can run in another thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.kv.ledger import codec_name, exact_rows
from quire.kv.memory import KVMemory
from quire.kv.pages import CountedPages
from quire.kv.tables import NO_PAGE, LaneTable, Rows
from quire.layout.pages import PageClass

FREE, CACHE = 0, 1
"""Owners of free pages, and of pages that no listed row references: cached or loading prefixes."""
FIRST_ROW = 2
"""Owner of the pages of the first listed row."""
MOST_ROWS = (1 << 16) - FIRST_ROW

EVICTED, SHARED, CACHED, STAGING, RESERVED, AUXILIARY = (1 << bit for bit in range(6))
"""Bits of a page's state.

EVICTED: tokens of its sequence were evicted. SHARED: several sequences reference it. CACHED: a
sequence and the prefix cache reference it. STAGING: it holds offloaded KV only while a layer runs.
RESERVED: allocated before it is needed. AUXILIARY: statistics, or tokens in a finer format.
"""

Owners = NDArray[np.uint16]
States = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class ClassFacts:
    """The pages of one page class.

    Attributes:
        page_class: the class.
        codec: its codec.
        owner: [pages] FREE, CACHE, or FIRST_ROW plus the index of a row.
        state: [pages] bits of the state.
        shown: [pages] whether the page exists: the class, or none, holds its slab.
    """

    page_class: PageClass
    codec: str
    owner: Owners
    state: States
    shown: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class PageFacts:
    """A copy of the owners and states of all pages.

    Attributes:
        classes: facts by page class, in the order of the layout.
    """

    classes: tuple[ClassFacts, ...]

    def in_order(self) -> tuple[Owners, States, NDArray[np.uint8]]:
        """Owner, state and index of the class of every page that exists, by address."""
        index = [np.flatnonzero(one.shown) for one in self.classes]
        owner = np.concatenate([c.owner[i] for c, i in zip(self.classes, index, strict=True)])
        state = np.concatenate([c.state[i] for c, i in zip(self.classes, index, strict=True)])
        kind = np.repeat(np.arange(len(index), dtype=np.uint8), [len(i) for i in index])
        if len(index) == 1:
            return owner, state, kind
        sizes = (one.page_class.page_bytes for one in self.classes)
        address = np.concatenate([i * size for i, size in zip(index, sizes, strict=True)])
        order = np.argsort(address, kind="stable")
        return owner[order], state[order], kind[order]


def read_pages(memory: KVMemory, rows: Sequence[int], *, only_these: bool = False) -> PageFacts:
    """Copy the owner and state of every page.

    Args:
        memory: the KV memory.
        rows: at most MOST_ROWS rows in use. A page of several rows belongs to the first of them.
        only_these: leave out all pages of no listed row, free ones too, and count only references
            of listed rows.
    """
    held = np.array(rows[:MOST_ROWS], dtype=np.int64)
    evicted = ~exact_rows(memory)[held]
    classes = tuple(
        _ClassReader(memory, pool, held, evicted).read(
            takes_free_slabs=number == 0, only_these=only_these
        )
        for number, pool in enumerate(memory.pools.values())
    )
    return PageFacts(classes)


class _ClassReader:
    """Collects the owners and states of one class's pages."""

    def __init__(
        self, memory: KVMemory, pool: CountedPages, rows: Rows, evicted: NDArray[np.bool_]
    ) -> None:
        self._memory, self._pool, self._rows, self._evicted = memory, pool, rows, evicted
        size = len(pool.ref_counts)
        self._owner = np.zeros(size, dtype=np.uint16)
        self._state = np.zeros(size, dtype=np.uint8)
        self._references = np.zeros(size, dtype=np.int32) if pool.num_shared else None

    def read(self, *, takes_free_slabs: bool, only_these: bool) -> ClassFacts:
        pool = self._pool
        if not only_these:
            self._owner[pool.ref_counts > 0] = CACHE
        for table in self._memory.tables.values():
            if table.group.page_class == pool.page_class and len(self._rows):
                self._claim(table)
        self._mark_shared(only_these=only_these)
        shown = self._owner > CACHE if only_these else self._existing(takes_free_slabs)
        page_class = pool.page_class
        return ClassFacts(page_class, codec_name(page_class), self._owner, self._state, shown)

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
        if self._memory.placement.reserves:
            self._claim_reserved(table)

    def _claim_reserved(self, table: LaneTable) -> None:
        for index, row in enumerate(self._rows):
            pages = self._memory.placement.reserved_pages(table, np.array([row]))
            self._own(pages, np.full(len(pages), index), RESERVED)

    def _own(self, pages: NDArray[np.int32], row: NDArray[np.int64], bits: int) -> None:
        self._owner[pages[::-1]] = (row + FIRST_ROW)[
            ::-1
        ]  # the last write is that of the first row
        if bits:
            self._state[pages] |= bits
        if self._evicted.any():
            self._state[pages[self._evicted[row]]] |= EVICTED
        if self._references is not None:
            self._references += np.bincount(pages, minlength=len(self._references))

    def _mark_shared(self, *, only_these: bool) -> None:
        if self._references is None:  # no page has more than one reference
            return
        staging = self._state & STAGING > 0  # layers share staging pages
        self._state[(self._references > 1) & ~staging] |= SHARED
        if not only_these:
            cached = (self._references > 0) & (self._pool.ref_counts > self._references)
            self._state[cached & ~staging] |= CACHED

    def _existing(self, takes_free_slabs: bool) -> NDArray[np.bool_]:  # noqa: FBT001 - private
        """Mask of the pages that are wholly in slabs of this class, or in free slabs."""
        arena, size = self._memory.arena, self._pool.page_class.page_bytes
        own = np.zeros(self._memory.arena.span_bytes // arena.slab_bytes + 1, dtype=bool)
        slabs = self._pool.held_slabs
        own[list(slabs | arena.free_slabs if takes_free_slabs else slabs)] = True
        first = np.arange(len(self._owner), dtype=np.int64) * size
        slab, last = first // arena.slab_bytes, (first + size - 1) // arena.slab_bytes
        existing: NDArray[np.bool_] = own[slab] & (slab == last)
        return existing
