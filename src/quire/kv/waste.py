"""Where the bytes of a KV memory are, by what they are good for: measured alike for every store.

    total     live | hidden | empty | reserved | cached | borders | free
              ^ slots a query can still see            ^ slabs no page covers

    hidden    slots behind their lane's window that are still held
    empty     internal fragmentation: slots without a token, and padding, in pages that tables name
    reserved  pages kept aside for a lane: the rest of a run, or of a ring
    cached    pages that only the prefix index refers to

A shared page counts once. External fragmentation is a property of what is free: 1 - the largest
piece a lane could take / all that is free.

Source: the kinds of waste follow papers/001 and PagedAttention (Kwon et al. 2023, figures 2 and 3).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.kv.memory import KVMemory
from quire.kv.stores.base import Demand
from quire.kv.tables import NO_PAGE, LaneTable, Rows
from quire.layout.pages import PageClass

ENTRY_BYTES = 4  # of a page number, a first position or a count, as tables keep them
Slots = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Waste:
    """Bytes at one moment. The seven kinds add up to `total_bytes`.

    Attributes:
        total_bytes: the arena.
        live_bytes, hidden_bytes, empty_bytes, reserved_bytes, cached_bytes, border_bytes,
            free_bytes: see the module.
        largest_free_bytes: the largest piece of what is free that one lane could take.
        num_copies, copied_bytes: lanes copied because they grew, since the start.
        table_bytes: table entries of running sequences, outside the arena: number and first
            position of each page, two counts of each lane.
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
        """Bytes nobody else can have: all but the free ones and the cache, which gives way."""
        return self.total_bytes - self.free_bytes - self.cached_bytes

    @property
    def waste_fraction(self) -> float:
        """Part of the allocated bytes that no query can see; 0 where nothing is allocated."""
        return _share(self.allocated_bytes - self.live_bytes, self.allocated_bytes)

    @property
    def internal_fragmentation(self) -> float:
        """Part of the allocated bytes that are empty slots or padding."""
        return _share(self.empty_bytes, self.allocated_bytes)

    @property
    def external_fragmentation(self) -> float:
        """Part of the free bytes outside of the largest piece; 0 where nothing is free."""
        return _share(self.free_bytes - self.largest_free_bytes, self.free_bytes)

    @property
    def table_fraction(self) -> float:
        """Bytes of tables by bytes allocated."""
        return _share(self.table_bytes, self.allocated_bytes)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def measure_waste(memory: KVMemory) -> Waste:
    """Look at every table entry of the sequences that run; cost O(pages)."""
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
    """Bytes of pages of a class: live, hidden, empty, reserved, cached."""
    used = memory.pools[page_class].num_used
    low = np.full(len(memory.pools[page_class].ref_counts), page_class.tokens)
    high = np.full(len(low), NO_PAGE)
    reserved = 0
    for table in memory.tables.values():
        if table.group.page_class == page_class:
            rows = memory.live_rows
            _mark_slots(table, rows, memory.lengths[rows], (low, high))
            reserved += int(memory.placement.reserved_pages(table, rows).sum())
    named = high > NO_PAGE
    hidden = int(np.minimum(low, high)[named].sum()) * page_class.slot_bytes
    held = int(high[named].sum()) * page_class.slot_bytes
    named_bytes = int(named.sum()) * page_class.page_bytes
    reserved_bytes = reserved * page_class.page_bytes
    cached_bytes = used * page_class.page_bytes - named_bytes - reserved_bytes
    return np.array([held - hidden, hidden, named_bytes - held, reserved_bytes, cached_bytes])


def _mark_slots(table: LaneTable, rows: Rows, lengths: Slots, ends: tuple[Slots, Slots]) -> None:
    """Note for each page the first slot that some row can see, and the end of those it holds."""
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
    """How many more sequences could begin with `tokens` tokens now, beside all that run.

    At most as many as there are rows free. The difference to `free_bytes` by bytes of a sequence is
    what external fragmentation costs.
    """
    free_rows = np.setdiff1d(np.arange(len(memory.lengths)), memory.live_rows)
    low, high = 0, len(free_rows) + 1
    while high - low > 1:
        middle = (low + high) // 2
        fits = memory.placement.can_give(_beginnings(memory, free_rows[:middle], tokens))
        low, high = (middle, high) if fits else (low, middle)
    return low


def _beginnings(memory: KVMemory, rows: Rows, tokens: int) -> list[Demand]:
    demands = []
    for table in memory.tables.values():
        shape = (len(rows), table.group.num_lanes)
        slots = table.group.slots_of(tokens)
        pages = np.full(shape, table.group.page_class.pages_for(slots), dtype=np.int32)
        demands.append(Demand(table, rows, pages, np.zeros(shape, dtype=bool)))
    return demands
