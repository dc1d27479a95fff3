"""Swap sequences out of the arena and back in, byte for byte, all or none.

    swap_out: allocate swap space -> copy -> release the rows      if a copy fails: free swap space
    swap_in:  allocate pages -> copy -> enter pages in tables      if a copy fails: free the pages

Outside the arena, a sequence is the page counts of its lanes and the numbers of its stored pages:

    row 0  lanes -> 0 1 2 3 | row 1  lanes -> 0 1 4    numbers of stored pages of one class
    stored pages of the class: 0 1 2 3 4               a shared page is stored once

Copies may be in flight when a call returns. Freed pages that a copy reads are used again only after
the copy (`quire.kv.pages`); computation on pages that other sequences still use waits at once.

Sequences that share pages (forks) are swapped together; each page is stored once and is shared
again after swap-in. Offloaded pages stay where they are; only their staging is allocated again. The
tail of a sequence that has evicted no tokens can be swapped alone: the head is recomputed, and the
tail is appended to it. Private pages (statistics, tokens in full precision) are stored as a whole,
because they describe all tokens; they replace those of the head.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError, OutOfPages
from quire.kv.memory import KVMemory, OffloadedPages
from quire.kv.pages import NO_PAGES, PageNumbers
from quire.kv.tables import LaneTable, Rows, cut_slots
from quire.layout.pages import PageClass

PagesByClass = Mapping[PageClass, PageNumbers]


@dataclass(frozen=True, slots=True)
class SwappedLanes:
    """A lane group of a sequence outside the arena, pages lane by lane, not offloaded ones."""

    num_pages: NDArray[np.int32]  # [lanes]
    num_slots: NDArray[np.int32]  # [lanes]
    page_positions: NDArray[np.int32]  # [pages] position of the first slot, valid for ordered lanes
    stored: NDArray[np.int32]  # [pages] index among the stored pages of the class


@dataclass(frozen=True, slots=True)
class SwappedSequence:
    """The bookkeeping of one sequence outside the arena."""

    length: int  # logical, including a head that was not stored
    peak_bytes: int
    lanes: Mapping[str, SwappedLanes]  # by name of the group
    statistics: frozenset[str]  # private groups that the sequence uses


@dataclass(frozen=True, slots=True)
class TimedCopy:
    """A copy between the arena and swap space that has ended."""

    back: bool  # whether pages were copied into the arena
    num_bytes: int
    seconds: float


@runtime_checkable
class StoredPages(Protocol):
    """Bytes of pages outside the arena."""

    def save(self, memory: KVMemory, pages: PagesByClass) -> None:
        """Copy pages out of the arena, or start to: fences of the arena then order their reuse."""

    def load(self, memory: KVMemory, pages: PagesByClass) -> None:
        """Copy the stored pages into pages of the arena; later computation has them."""

    def free(self) -> None:
        """Free the stored bytes."""


@runtime_checkable
class SwapSpace(Protocol):
    """Fixed bytes outside the arena, such as `quire.offload.swap.host_pool.HostPool`."""

    @property
    def free_bytes(self) -> int:
        """Free bytes."""

    def store(self, pages: Mapping[PageClass, int]) -> StoredPages:
        """Space for pages of each class, all or none."""
        ...

    def timed_copies(self) -> Sequence[TimedCopy] | None:
        """Copies that ended since the last call; None if copies have ended when a call returns."""
        ...


class Payloads:
    """Stored pages in separately allocated memory, as returned by `PageBytes.read_pages`."""

    def __init__(self) -> None:
        self._payloads: dict[PageClass, object] = {}

    def save(self, memory: KVMemory, pages: PagesByClass) -> None:
        for page_class, numbers in pages.items():
            self._payloads[page_class] = memory.store.read_pages(page_class, numbers)

    def load(self, memory: KVMemory, pages: PagesByClass) -> None:
        for page_class, numbers in pages.items():
            memory.store.write_pages(page_class, numbers, self._payloads[page_class])

    def free(self) -> None:
        self._payloads.clear()


@dataclass(frozen=True, slots=True)
class Swapped:
    """Sequences that were swapped out together; shared pages are stored once."""

    sequences: tuple[SwappedSequence, ...]  # in the order of the `swap_out` call
    pages: Mapping[PageClass, int]  # stored pages of each class
    stored: StoredPages  # bytes of the stored pages
    keep_from: int = 0  # tokens of a head to recompute; 0 if all tokens are stored
    offloaded: OffloadedPages | None = None  # first pages of the sequences

    @property
    def needed_pages(self) -> dict[PageClass, int]:
        needed = dict(self.pages)
        for page_class, pages in ({} if self.offloaded is None else self.offloaded.staging).items():
            needed[page_class] = needed.get(page_class, 0) + pages
        return needed

    @property
    def num_bytes(self) -> int:
        return sum(c.page_bytes * n for c, n in self.pages.items())

    def discard(self) -> None:
        """Free the stored bytes of a request that will not resume (a cancelled request)."""
        self.stored.free()
        if self.offloaded is not None:
            self.offloaded.discard()


def swap_out(
    memory: KVMemory,
    rows: Rows | Sequence[int],
    pool: SwapSpace | None = None,
    *,
    keep_from: int = 0,
) -> Swapped:
    """Copy sequences out of the arena and release their rows; shared pages are stored once."""
    if keep_from and (len(rows) != 1 or not can_split(memory, int(rows[0]), keep_from)):
        raise ConfigError(
            f"rows {list(rows)} cannot be split at token {keep_from}: expected one row whose lanes "
            "hold every token in order, and a page boundary inside the row"
        )
    sequences, pages = _gather(memory, rows, keep_from)
    counts = {page_class: len(numbers) for page_class, numbers in pages.items()}
    stored: StoredPages = Payloads() if pool is None else pool.store(counts)
    try:
        stored.save(memory, pages)
        offloaded = memory.offloaded
        detached = None if offloaded is None else offloaded.detach([int(row) for row in rows])
        memory.release(rows)
    except BaseException:
        stored.free()
        raise
    _order_still_used(memory, pages)
    return Swapped(sequences, counts, stored, keep_from, detached)


def _order_still_used(memory: KVMemory, pages: PagesByClass) -> None:
    """Order later computation after the copies of pages that other rows may write.

    Pages that only the prefix cache references are written after they are allocated, or after a
    row shares them; both are ordered.
    """
    if not memory.arena.fences:
        return
    for page_class, numbers in pages.items():
        references = memory.pools[page_class].ref_counts
        cached = [
            found.reshape(-1)
            for by_group in memory.cached_references.values()
            for name, found in by_group.items()
            if memory.tables[name].group.page_class == page_class
        ]
        by_cache = np.bincount(np.concatenate([NO_PAGES, *cached]), minlength=len(references))
        used = numbers[references[numbers] > by_cache[numbers]]
        memory.arena.fences.before_use(used, page_class.page_bytes)


def can_swap_in(memory: KVMemory, swapped: Swapped) -> bool:
    """Return whether enough rows and pages are free."""
    if memory.num_free_rows < len(swapped.sequences):
        return False
    return memory.fits(swapped.needed_pages)


def swap_in(memory: KVMemory, swapped: Swapped) -> list[int]:
    """Copy sequences into new pages of the arena; return their rows, in order."""
    if swapped.keep_from:
        raise ConfigError(f"the first {swapped.keep_from} tokens were not stored: use append_tail")
    if memory.num_free_rows < len(swapped.sequences):
        raise OutOfPages(f"{memory.num_free_rows} rows are free, {len(swapped.sequences)} needed")
    pages = _copy_in(memory, swapped)
    rows = [memory.start(sequence.statistics) for sequence in swapped.sequences]
    if swapped.offloaded is not None:
        swapped.offloaded.attach(rows)
    for row, sequence in zip(rows, swapped.sequences, strict=True):
        _attach(memory, row, sequence, pages)
    # add a reference to each page for every sequence after the first that shares it
    for page_class, numbers in pages.items():
        named = [
            lanes.stored
            for sequence in swapped.sequences
            for name, lanes in sequence.lanes.items()
            if memory.tables[name].group.page_class == page_class
        ]
        times = np.bincount(np.concatenate(named), minlength=len(numbers))
        for further in range(1, int(times.max(initial=1))):
            memory.pools[page_class].retain(numbers[times > further])
    memory.note_peaks(np.array(rows))
    swapped.stored.free()
    return rows


def can_split(memory: KVMemory, row: int, keep_from: int) -> bool:
    """Return whether the tail from token `keep_from` on can be stored without the head.

    Every lane must hold all tokens, so that their slots are in order, and `keep_from` must be a
    page boundary in every group.
    """
    if not 0 < keep_from < memory.lengths[row]:
        return False
    return all(
        not table.staged[row]
        and keep_from % table.group.page_class.tokens == 0
        and bool((table.num_slots[row] == memory.lengths[row]).all())
        for table in _kv_tables(memory)
    )


def _kv_tables(memory: KVMemory) -> list[LaneTable]:
    return [table for table in memory.tables.values() if not table.group.private]


def split_border(memory: KVMemory, row: int) -> int:
    """Return the distance in tokens between possible split positions of a row; 0 if none."""
    tokens = math.lcm(*(t.group.page_class.tokens for t in _kv_tables(memory)))
    return tokens if can_split(memory, row, tokens) else 0


def append_tail(memory: KVMemory, row: int, swapped: Swapped) -> None:
    """Append a stored tail to the recomputed head of a row."""
    held = [int(memory.lengths[row]), *(t.num_slots[row] for t in _kv_tables(memory))]
    if memory.statistics_of(row) != swapped.sequences[0].statistics:
        raise ConfigError(f"row {row} would have no statistics of the stored tail")
    if any(np.any(count != swapped.keep_from) for count in held):
        raise ConfigError(
            f"expected {swapped.keep_from} tokens in every lane of row {row} before the stored "
            f"tail, got a row of {held[0]} tokens or lanes with other counts"
        )
    pages = _copy_in(memory, swapped)
    for name in memory.statistics_of(row):  # those of the whole sequence were stored
        table = memory.tables[name]
        none = np.zeros(table.group.num_lanes, dtype=np.int32)
        memory.pools[table.group.page_class].release(cut_slots(table, np.array([row]), none[None]))
    _attach(memory, row, swapped.sequences[0], pages)
    memory.note_peaks(np.array([row]))
    swapped.stored.free()


def _gather(
    memory: KVMemory, rows: Rows | Sequence[int], keep_from: int
) -> tuple[tuple[SwappedSequence, ...], dict[PageClass, PageNumbers]]:
    seen = {c: _FirstSeen(len(pool.ref_counts)) for c, pool in memory.pools.items()}
    sequences = []
    for row in rows:
        lanes = {}
        for name, table in memory.tables.items():
            lanes[name] = _take_lanes(table, int(row), keep_from, seen[table.group.page_class])
        length, peak_bytes = int(memory.lengths[row]), int(memory.peak_bytes[row])
        statistics = memory.statistics_of(int(row))
        sequences.append(SwappedSequence(length, peak_bytes, lanes, statistics))
    return tuple(sequences), {page_class: found.pages for page_class, found in seen.items()}


class _FirstSeen:
    """Numbers pages in the order of their first appearance."""

    def __init__(self, num_pages: int) -> None:
        self._index = np.full(num_pages, -1, dtype=np.int32)
        self._parts: list[PageNumbers] = []
        self._count = 0

    def index(self, pages: PageNumbers) -> NDArray[np.int32]:
        """Return the numbers of distinct pages; number pages that are new."""
        new = pages[self._index[pages] < 0]
        self._index[new] = np.arange(self._count, self._count + len(new))
        self._count += len(new)
        self._parts.append(new)
        return self._index[pages]

    @property
    def pages(self) -> PageNumbers:
        return np.concatenate(self._parts)


def _take_lanes(table: LaneTable, row: int, keep_from: int, seen: _FirstSeen) -> SwappedLanes:
    if table.group.private or not table.active[row]:
        keep_from = 0  # stored as a whole, or the lanes have no slots
    head = keep_from // table.group.page_class.tokens + int(table.staged[row])
    column = np.arange(table.capacity)
    kept = (column >= head) & (column < table.num_pages[row][:, None])
    return SwappedLanes(
        num_pages=table.num_pages[row] - head,
        num_slots=table.num_slots[row] - head * table.group.page_class.tokens,
        page_positions=table.page_positions[row][kept],
        stored=seen.index(table.pages[row][kept]),
    )


def _copy_in(memory: KVMemory, swapped: Swapped) -> dict[PageClass, PageNumbers]:
    """Allocate pages with one reference each and load the stored bytes; free them on failure."""
    if not memory.fits(swapped.needed_pages):
        raise OutOfPages(f"{sum(swapped.pages.values())} pages needed to swap in")
    pages = {c: memory.pools[c].allocate(count) for c, count in swapped.pages.items()}
    try:
        swapped.stored.load(memory, pages)
    except BaseException:
        for page_class, numbers in pages.items():
            memory.pools[page_class].release(numbers)
        raise
    return pages


def _attach(
    memory: KVMemory, row: int, sequence: SwappedSequence, pages: dict[PageClass, PageNumbers]
) -> None:
    for name, lanes in sequence.lanes.items():
        table = memory.tables[name]
        numbers = pages[table.group.page_class][lanes.stored]
        place = table.append(np.array([row]), lanes.num_pages[None], numbers)
        table.page_positions[place] = lanes.page_positions
        table.num_slots[row] += lanes.num_slots
    memory.lengths[row] = sequence.length
    memory.peak_bytes[row] = max(sequence.peak_bytes, int(memory.peak_bytes[row]))
