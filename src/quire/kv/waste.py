"""KV memory waste: the bytes of a KV memory by use, defined equally for every store.

    total     live | hidden | empty | reserved | cached | borders | free
              ^ slots a query can attend to            ^ bytes at slab boundaries without a page

    hidden    slots outside their lane's window that are still allocated
    empty     internal fragmentation: slots without a token, and padding, in pages of page tables
    reserved  pages reserved for a lane: the rest of a run, or of a ring
    cached    pages that only the prefix index references

A shared page counts once. External fragmentation is 1 - the largest free contiguous allocation of
one lane / all free bytes.

Source: the kinds of waste follow papers/001 and PagedAttention (Kwon et al. 2023, figures 2 and 3).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.kv.memory import KVMemory
from quire.kv.stores.base import Demand
from quire.kv.tables import NO_PAGE, LaneTable, Rows
from quire.layout.pages import PageClass

ENTRY_BYTES = 4  # bytes of a page number, a first position or a count in a table
Slots = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Waste:
    """Bytes of a KV memory by use at one time. The seven kinds add up to `total_bytes`.

    Attributes:
        total_bytes: size of the arena.
        live_bytes, hidden_bytes, empty_bytes, reserved_bytes, cached_bytes, border_bytes,
            free_bytes: see the module.
        largest_free_bytes: largest contiguous bytes that one lane can allocate.
        num_copies: number of lanes copied because they grew, since the start.
        copied_bytes: bytes of these copies.
        table_bytes: table entries of live sequences, outside the arena: number and first position
            of each page, two counts of each lane.
    """

    total_bytes: int
    live_bytes: int
    hidden_bytes: int
    empty_bytes: int
    reserved_bytes: int
    cached_bytes: int
    border_bytes: int
    free_bytes: int
    largest_free_bytes: int
    num_copies: int
    copied_bytes: int
    table_bytes: int

    @property
    def allocated_bytes(self) -> int:
        """Bytes that new sequences cannot use: all except free bytes and the evictable cache."""
        return self.total_bytes - self.free_bytes - self.cached_bytes

    @property
    def waste_fraction(self) -> float:
        """Fraction of the allocated bytes that no query can attend to; 0 if none are allocated."""
        return _share(self.allocated_bytes - self.live_bytes, self.allocated_bytes)

    @property
    def internal_fragmentation(self) -> float:
        """Fraction of the allocated bytes that are empty slots or padding."""
        return _share(self.empty_bytes, self.allocated_bytes)

    @property
    def external_fragmentation(self) -> float:
        """Fraction of the free bytes outside the largest free allocation; 0 if none are free."""
        return _share(self.free_bytes - self.largest_free_bytes, self.free_bytes)

    @property
    def table_fraction(self) -> float:
        """Bytes of tables divided by allocated bytes."""
        return _share(self.table_bytes, self.allocated_bytes)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def measure_waste(memory: KVMemory) -> Waste:
    """Measure waste from all table entries of live sequences; cost O(pages)."""
    kinds = np.zeros(5, dtype=np.int64)
    for page_class in memory.pools:
        kinds += _by_class(memory, page_class)
    live, hidden, empty, reserved, cached = kinds.tolist()
    pools = memory.pools.values()
    return Waste(
        total_bytes=memory.total_bytes,
        live_bytes=live,
        hidden_bytes=hidden,
        empty_bytes=empty,
        reserved_bytes=reserved,
        cached_bytes=cached,
        border_bytes=sum(pool.tail_bytes for pool in pools),
        free_bytes=memory.free_bytes,
        largest_free_bytes=max(p.most_together * p.page_class.page_bytes for p in pools),
        num_copies=memory.placement.num_copies,
        copied_bytes=memory.placement.copied_bytes,
        table_bytes=_table_bytes(memory),
    )


def _by_class(memory: KVMemory, page_class: PageClass) -> Slots:
    """Return the bytes of pages of a class: live, hidden, empty, reserved, cached."""
    used = memory.pools[page_class].num_used
    low = np.full(len(memory.pools[page_class].ref_counts), page_class.tokens)
    high = np.full(len(low), NO_PAGE)
    reserved = 0
    for table in memory.tables.values():
        if table.group.page_class == page_class:
            rows = memory.live_rows
            _mark_slots(table, rows, memory.lengths[rows], (low, high))
            reserved += int(memory.placement.num_reserved_pages(table, rows).sum())
    named = high > NO_PAGE
    hidden = int(np.minimum(low, high)[named].sum()) * page_class.slot_bytes
    held = int(high[named].sum()) * page_class.slot_bytes
    named_bytes = int(named.sum()) * page_class.page_bytes
    reserved_bytes = reserved * page_class.page_bytes
    cached_bytes = used * page_class.page_bytes - named_bytes - reserved_bytes
    return np.array([held - hidden, hidden, named_bytes - held, reserved_bytes, cached_bytes])


def _mark_slots(table: LaneTable, rows: Rows, lengths: Slots, ends: tuple[Slots, Slots]) -> None:
    """Update, per page, the first slot that a row can attend to and the end of its live slots."""
    per_page, window = table.group.page_class.tokens, table.group.window
    block = table.pages[rows]
    index, lane, column = np.nonzero(block != NO_PAGE)
    pages = block[index, lane, column]
    held = np.minimum(table.num_slots[rows[index], lane] - column * per_page, per_page)
    first_seen = np.zeros_like(held)
    if window is not None:
        positions = table.page_positions[rows[index], lane, column]
        first_seen = np.clip(lengths[index] + 1 - window - positions, 0, per_page)
    np.minimum.at(ends[0], pages, first_seen)
    np.maximum.at(ends[1], pages, held)


def _table_bytes(memory: KVMemory) -> int:
    rows = memory.live_rows
    entries = 0
    for table in memory.tables.values():
        numbers = 2 if table.group.ordered else 1  # lanes without order keep positions in pages
        entries += numbers * int(table.num_pages[rows].sum())
        entries += 2 * len(rows) * table.group.num_lanes
    return entries * ENTRY_BYTES


def sequences_that_fit(memory: KVMemory, tokens: int) -> int:
    """Return how many more sequences of `tokens` tokens could start now.

    Bounded by the number of free rows. External fragmentation costs the difference between this and
    `free_bytes` divided by the bytes of a sequence.
    """
    free_rows = np.setdiff1d(np.arange(len(memory.lengths)), memory.live_rows)
    low, high = 0, len(free_rows) + 1
    while high - low > 1:
        middle = (low + high) // 2
        fits = memory.placement.can_allocate(_start_demands(memory, free_rows[:middle], tokens))
        low, high = (middle, high) if fits else (low, middle)
    return low


def _start_demands(memory: KVMemory, rows: Rows, tokens: int) -> list[Demand]:
    demands = []
    for table in memory.tables.values():
        shape = (len(rows), table.group.num_lanes)
        slots = table.group.slots_of(tokens)
        pages = np.full(shape, table.group.page_class.pages_for(slots), dtype=np.int32)
        demands.append(Demand(table, rows, pages, np.zeros(shape, dtype=bool)))
    return demands
