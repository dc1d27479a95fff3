"""Who holds the arena: every page in exactly one extent, every byte of it with exactly one owner.

    extent   pages of one sequence in one lane group that are referenced alike
    bytes    a page that n sequences name belongs to each of them with 1/n of its bytes
             a page that no sequence names, only the prefix index: the prefix cache's
    sum      extents of sequences + extents of the cache + free + slab borders == total

Nothing is kept beside the page tables and reference counts: a second record of the same facts could
drift from them, and every step would pay for it. An extent is counted when somebody asks. Where no
page is shared that takes the tables' page counts alone; else one pass over the page numbers of the
sequences that are in, in NumPy.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from quire.errors import InvariantError
from quire.kv.memory import KVMemory
from quire.kv.pages import CountedPages
from quire.kv.stores.base import Placement
from quire.kv.tables import NO_PAGE, LaneTable
from quire.layout.pages import PageClass

NO_ROW = -1
"""The row of extents that belong to the prefix cache."""

_Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """Pages of one owner in one lane group that are referenced alike.

    Attributes:
        row: the sequence; NO_ROW for the prefix cache.
        group: name of the lane group; "" in the prefix cache, which holds pages of a class.
        codec: how its numbers are stored.
        references: of each page, by sequences and by the prefix index.
        sequences: that name each page.
        pages: how many.
        num_bytes: its part of their bytes: all, where it alone names them.
        exact: whether every token up to the sequence's length is there as it was computed.
    """

    row: int
    group: str
    codec: str
    references: int
    sequences: int
    pages: int
    num_bytes: int
    exact: bool


def extents_of(memory: KVMemory) -> list[Extent]:
    """Every extent of the arena, in order; their bytes add up to the bytes of pages in use."""
    exact = exact_rows(memory)
    found: list[Extent] = []
    for page_class, pool in memory.pools.items():
        tables = [t for t in memory.tables.values() if t.group.page_class == page_class]
        counted = _Counted(pool, tables, memory.live_rows, memory.placement)
        found.extend(_split(page_class, counted, exact))
        found.extend(_cached(page_class, counted.idle))
    return sorted(found)


def exact_rows(memory: KVMemory) -> NDArray[np.bool_]:
    """Rows [max_rows] that have lost no token: to a rule, that is; windows may have passed.

    Holds for as long as a row lives, for what was computed after a loss is not exact either.
    """
    exact = np.ones(len(memory.lengths), dtype=bool)
    for table in memory.tables.values():
        if table.group.window is None and not table.group.private:
            exact &= (table.num_slots == memory.lengths[:, None]).all(axis=1)
    return exact


def is_plain(page_class: PageClass) -> bool:
    """Whether numbers are stored as they were computed, in a type that models compute in."""
    return page_class.is_plain


def codec_name(page_class: PageClass) -> str:
    """The codec of keys, and that of values where it is another."""
    key, value = page_class.key.name, page_class.value
    return key if value is None or value.name == key else f"{key}/{value.name}"


class _Counted:
    """The pages of one class by group, row, references and number of sequences.

    Attributes:
        groups: names, in the order of the tables.
        index: [extents, 4] group, row, references, sequences.
        pages: [extents].
        idle: [references] pages that no sequence names, by how often the cache refers to them.
    """

    def __init__(
        self,
        pool: CountedPages,
        tables: list[LaneTable],
        rows: NDArray[np.int64],
        placement: Placement,
    ) -> None:
        self.groups = [table.group.name for table in tables]
        self._placement = placement
        if pool.num_shared:
            self._count_shared(pool, tables, rows)
        else:
            self._count_private(pool, tables, rows)

    def _count_private(
        self, pool: CountedPages, tables: list[LaneTable], rows: NDArray[np.int64]
    ) -> None:
        aside = self._placement.reserved_pages
        held = np.stack([(t.num_pages[rows] + aside(t, rows)).sum(axis=1) for t in tables])
        group, place = np.nonzero(held)
        once = np.ones_like(group)
        self.index = np.stack([group, rows[place], once, once], axis=1)
        self.pages = held[group, place].astype(np.int64)
        self.idle = np.array([0, pool.num_used - int(held.sum())])

    def _count_shared(
        self, pool: CountedPages, tables: list[LaneTable], rows: NDArray[np.int64]
    ) -> None:
        named = [_entries(table, rows, self._placement) for table in tables]
        pages = np.concatenate([numbers for _, numbers in named])
        owner = np.concatenate([i * len(rows) + place for i, (place, _) in enumerate(named)])
        sequences = np.bincount(pages, minlength=len(pool.ref_counts))
        kind, kinds = _numbered(pool.ref_counts[pages], sequences[pages])
        counts = np.bincount(owner * len(kinds) + kind)
        (found,) = np.nonzero(counts)
        found_owner, found_kind = np.divmod(found, max(1, len(kinds)))
        group, place = np.divmod(found_owner, max(1, len(rows)))
        self.index = np.column_stack([group, rows[place], kinds[found_kind]])
        self.pages = counts[found]
        self.idle = np.bincount(pool.ref_counts)
        entries = np.bincount(kind, minlength=len(kinds))
        np.subtract.at(self.idle, kinds[:, 0], entries // kinds[:, 1])


def _entries(
    table: LaneTable, rows: NDArray[np.int64], placement: Placement
) -> tuple[_Counts, NDArray[np.int32]]:
    """Every page of these rows, those kept aside too: the row's place in `rows`, and the page."""
    widest = int(table.num_pages[rows].max(initial=0))
    block = table.pages[rows, :, :widest]
    place = np.repeat(np.arange(len(rows)), table.num_pages[rows].sum(axis=1))
    aside = placement.reserved_pages(table, rows).sum(axis=1)
    place = np.concatenate([place, np.repeat(np.arange(len(rows)), aside)])
    return place, np.concatenate([block[block != NO_PAGE], placement.set_aside_pages(table, rows)])


def _numbered(references: NDArray[np.int32], sequences: _Counts) -> tuple[_Counts, _Counts]:
    """Distinct pairs, numbered: the number of each entry's pair, and the pairs [kinds, 2]."""
    width = int(sequences.max(initial=0)) + 1
    pair = references * width + sequences
    (found,) = np.nonzero(np.bincount(pair))
    number = np.zeros(int(pair.max(initial=0)) + 1, dtype=np.int64)
    number[found] = np.arange(len(found))
    return number[pair], np.stack(np.divmod(found, width), axis=1)


def _split(page_class: PageClass, counted: _Counted, exact: NDArray[np.bool_]) -> Iterator[Extent]:
    """Extents of sequences. Bytes of pages that are referenced alike are split without a rest."""
    plain, codec = is_plain(page_class), codec_name(page_class)
    found = zip(counted.index.tolist(), counted.pages.tolist(), strict=True)
    alike = sorted(found, key=lambda item: item[0][2:])
    for (references, sequences), items in groupby(alike, key=lambda item: item[0][2:]):
        taken_pages = 0
        for (group, row, _, _), pages in items:
            # the rest of one division is the next one's beginning: what is split adds up
            before = taken_pages * page_class.page_bytes // sequences
            taken_pages += pages
            yield Extent(
                row=row,
                group=counted.groups[group],
                codec=codec,
                references=references,
                sequences=sequences,
                pages=pages,
                num_bytes=taken_pages * page_class.page_bytes // sequences - before,
                exact=plain and bool(exact[row]),
            )


def _cached(page_class: PageClass, idle: _Counts) -> Iterator[Extent]:
    """What the prefix cache alone holds of a class. It publishes nothing that is not exact."""
    for references, pages in enumerate(idle.tolist()):
        if references and pages:
            yield Extent(
                row=NO_ROW,
                group="",
                codec=codec_name(page_class),
                references=references,
                sequences=0,
                pages=pages,
                num_bytes=pages * page_class.page_bytes,
                exact=is_plain(page_class),
            )


# ---- ledger proof --------------------------------------------------------------------------------

# The proof of the ledger: the same extents, counted page by page in plain Python.

_Key = tuple[int, str, int, int]  # row, group, references, sequences


def prove_extents(memory: KVMemory, extents: Iterable[Extent]) -> None:
    """Prove that extents are what tables and loans say, and that their bytes add up.

    Slow: it looks at every page by itself.

    Raises:
        InvariantError: pages are missing, counted twice or counted for others, an owner has not
            its part to the byte, or extents, free bytes and slab borders are not the arena.
    """
    found = list(extents)
    expected = _count(memory)
    pages: Counter[_Key] = Counter()
    for extent in found:
        key = (extent.row, extent.group, extent.references, extent.sequences)
        pages[key] += extent.pages
    if pages != Counter({key: len(sizes) for key, sizes in expected.items()}):
        raise InvariantError("the ledger's extents are not what tables and loans name")
    _prove_parts(found, expected)
    borders = sum(pool.tail_bytes for pool in memory.pools.values())
    total = sum(e.num_bytes for e in found) + memory.free_bytes + borders
    if total != memory.total_bytes:
        raise InvariantError(f"the ledger has {total:,} B, the arena {memory.total_bytes:,} B")


def _count(memory: KVMemory) -> dict[_Key, list[int]]:
    """Sizes of the pages of every extent."""
    sizes: defaultdict[_Key, list[int]] = defaultdict(list)
    for page_class in memory.pools:
        holders = _holders(memory, page_class)
        referenced = _referenced(memory, page_class)
        for page in holders.keys() | referenced.keys():
            owners = holders.get(page, [])
            alike = (len(owners) + referenced[page], len(owners))
            for row, group in owners or [(NO_ROW, "")]:
                sizes[(row, group, *alike)].append(page_class.page_bytes)
    return sizes


def _holders(memory: KVMemory, page_class: PageClass) -> dict[int, list[tuple[int, str]]]:
    """Rows and groups that name each page."""
    holders: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)
    for name, table in memory.tables.items():
        if table.group.page_class == page_class:
            for row in memory.live_rows.tolist():
                aside = memory.placement.set_aside_pages(table, np.array([row]))
                for page in [*table.row_pages(row).tolist(), *aside.tolist()]:
                    holders[page].append((row, name))
    return dict(holders)


def _referenced(memory: KVMemory, page_class: PageClass) -> Counter[int]:
    """How many loans name each page."""
    referenced: Counter[int] = Counter()
    for cached_reference in memory.cached_references.values():
        for name, numbers in cached_reference.items():
            if memory.tables[name].group.page_class == page_class:
                referenced.update(numbers.reshape(-1).tolist())
    return referenced


def _prove_parts(extents: Iterable[Extent], expected: dict[_Key, list[int]]) -> None:
    """Prove that each owner has its part of what it shares, to less than a byte."""
    parts = {key: Fraction(sum(sizes), max(1, key[3])) for key, sizes in expected.items()}
    given: Counter[_Key] = Counter()
    for extent in extents:
        given[extent.row, extent.group, extent.references, extent.sequences] += extent.num_bytes
    for key, part in parts.items():
        if abs(given[key] - part) >= 1:
            raise InvariantError(f"{key} has {given[key]:,} B, its part is {float(part):,.1f} B")
