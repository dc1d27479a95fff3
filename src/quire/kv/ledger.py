"""The ledger of the arena: every page is in exactly one extent and every byte has one owner.

    extent   pages of one sequence in one lane group with equal reference counts
    bytes    a page that n sequences reference counts 1/n of its bytes for each of them
             a page that only the prefix index references belongs to the prefix cache
    sum      extents of sequences + extents of the cache + free + waste at slab boundaries == total

The ledger is computed on request from page tables and reference counts. A second record of the same
facts could diverge from them and would cost time in every step. If no page is shared, the page
counts of the tables suffice. Otherwise NumPy reads the page numbers of all live rows once.
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
from quire.kv.pages import PagePool
from quire.kv.tables import NO_PAGE, LaneTable
from quire.layout.pages import PageClass

NO_ROW = -1
"""The row of extents that belong to the prefix cache."""

_Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True, order=True)
class LedgerExtent:
    """Pages of one owner in one lane group with equal reference counts."""

    row: int  # NO_ROW for the prefix cache
    group: str  # "" for the prefix cache, whose extents are per page class
    codec: str
    references: int  # to each page, by sequences and by the prefix index
    sequences: int  # that reference each page
    pages: int
    num_bytes: int  # the owner's share of the pages' bytes
    exact: bool  # whether every token of the sequence is stored without loss


def extents_of(memory: KVMemory) -> list[LedgerExtent]:
    """Return all extents of the arena, sorted; their bytes add up to the bytes of pages in use."""
    exact = exact_rows(memory)
    found: list[LedgerExtent] = []
    for page_class, pool in memory.pools.items():
        tables = [t for t in memory.tables.values() if t.group.page_class == page_class]
        counted = _Counted(pool, tables, memory.live_rows)
        found.extend(_split(page_class, counted, exact))
        found.extend(_cached(page_class, counted.idle))
    return sorted(found)


def exact_rows(memory: KVMemory) -> NDArray[np.bool_]:
    """Return a mask [max_rows] of rows without evicted tokens.

    Tokens outside a window do not count as evicted. A row that has lost a token stays inexact until
    it is released: KV that is computed later depends on it.
    """
    exact = np.ones(len(memory.lengths), dtype=bool)
    for table in memory.tables.values():
        if not table.group.bounded and not table.group.private:
            exact &= (table.num_slots == memory.lengths[:, None]).all(axis=1)
    return exact


class _Counted:
    """Page counts of one class by group, row, references and number of sequences."""

    def __init__(self, pool: PagePool, tables: list[LaneTable], rows: NDArray[np.int64]) -> None:
        self.groups = [table.group.name for table in tables]
        if pool.num_shared:
            self._count_shared(pool, tables, rows)
        else:
            held = np.stack([table.num_pages[rows].sum(axis=1) for table in tables])
            group, place = np.nonzero(held)
            once = np.ones_like(group)
            self.index = np.stack([group, rows[place], once, once], axis=1)
            self.pages = held[group, place].astype(np.int64)
            self.idle = np.array([0, pool.num_used - int(held.sum())])

    def _count_shared(
        self, pool: PagePool, tables: list[LaneTable], rows: NDArray[np.int64]
    ) -> None:
        named = [_entries(table, rows) for table in tables]
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


def _entries(table: LaneTable, rows: NDArray[np.int64]) -> tuple[_Counts, NDArray[np.int32]]:
    """Return every page of these rows: index into `rows`, and page."""
    widest = int(table.num_pages[rows].max(initial=0))
    block = table.pages[rows, :, :widest]
    place = np.repeat(np.arange(len(rows)), table.num_pages[rows].sum(axis=1))
    return place, block[block != NO_PAGE]


def _numbered(references: NDArray[np.int32], sequences: _Counts) -> tuple[_Counts, _Counts]:
    """Number the distinct pairs; return the pair number of each entry, and the pairs [kinds, 2]."""
    width = int(sequences.max(initial=0)) + 1
    pair = references * width + sequences
    (found,) = np.nonzero(np.bincount(pair))
    number = np.zeros(int(pair.max(initial=0)) + 1, dtype=np.int64)
    number[found] = np.arange(len(found))
    return number[pair], np.stack(np.divmod(found, width), axis=1)


def _split(
    page_class: PageClass, counted: _Counted, exact: NDArray[np.bool_]
) -> Iterator[LedgerExtent]:
    """Yield the extents of sequences; the shares of shared pages add up to all their bytes."""
    plain, codec = page_class.is_plain, page_class.codec_name
    found = zip(counted.index.tolist(), counted.pages.tolist(), strict=True)
    by_references = sorted(found, key=lambda item: item[0][2:])
    for (references, sequences), items in groupby(by_references, key=lambda item: item[0][2:]):
        taken_pages = 0
        for (group, row, _, _), pages in items:
            # the remainder of each division is carried over to the next: the shares add up exactly
            before = taken_pages * page_class.page_bytes // sequences
            taken_pages += pages
            yield LedgerExtent(
                row=row,
                group=counted.groups[group],
                codec=codec,
                references=references,
                sequences=sequences,
                pages=pages,
                num_bytes=taken_pages * page_class.page_bytes // sequences - before,
                exact=plain and bool(exact[row]),
            )


def _cached(page_class: PageClass, idle: _Counts) -> Iterator[LedgerExtent]:
    """Yield the extents that only the prefix cache holds; it publishes only exact KV."""
    for references, pages in enumerate(idle.tolist()):
        if references and pages:
            yield LedgerExtent(
                row=NO_ROW,
                group="",
                codec=page_class.codec_name,
                references=references,
                sequences=0,
                pages=pages,
                num_bytes=pages * page_class.page_bytes,
                exact=page_class.is_plain,
            )


# The check of the ledger: the same extents, counted page by page in plain Python.

_Key = tuple[int, str, int, int]  # row, group, references, sequences


def prove_extents(memory: KVMemory, extents: Iterable[LedgerExtent]) -> None:
    """Check extents against page tables and cached references, and that their bytes add up.

    Slow: visits every page in Python.
    """
    found = list(extents)
    expected = _count(memory)
    pages: Counter[_Key] = Counter()
    for extent in found:
        key = (extent.row, extent.group, extent.references, extent.sequences)
        pages[key] += extent.pages
    if pages != Counter({key: len(sizes) for key, sizes in expected.items()}):
        raise InvariantError("the ledger's extents differ from page tables and cached references")
    _prove_shares(found, expected)
    borders = sum(pool.tail_bytes for pool in memory.pools.values())
    total = sum(e.num_bytes for e in found) + memory.free_bytes + borders
    if total != memory.total_bytes:
        raise InvariantError(f"the ledger has {total:,} B, the arena {memory.total_bytes:,} B")


def _count(memory: KVMemory) -> dict[_Key, list[int]]:
    sizes: defaultdict[_Key, list[int]] = defaultdict(list)
    for page_class in memory.pools:
        holders = _holders(memory, page_class)
        referenced: Counter[int] = Counter()
        for cached_reference in memory.cached_references.values():
            for name, numbers in cached_reference.items():
                if memory.tables[name].group.page_class == page_class:
                    referenced.update(numbers.reshape(-1).tolist())
        for page in holders.keys() | referenced.keys():
            owners = holders.get(page, [])
            counts = (len(owners) + referenced[page], len(owners))
            for row, group in owners or [(NO_ROW, "")]:
                sizes[(row, group, *counts)].append(page_class.page_bytes)
    return sizes


def _holders(memory: KVMemory, page_class: PageClass) -> dict[int, list[tuple[int, str]]]:
    holders: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)
    for name, table in memory.tables.items():
        if table.group.page_class == page_class:
            for row in memory.live_rows.tolist():
                for page in table.row_pages(row).tolist():
                    holders[page].append((row, name))
    return dict(holders)


def _prove_shares(extents: Iterable[LedgerExtent], expected: dict[_Key, list[int]]) -> None:
    """Check that each owner's share of shared pages is right to less than one byte."""
    shares = {key: Fraction(sum(sizes), max(1, key[3])) for key, sizes in expected.items()}
    given: Counter[_Key] = Counter()
    for extent in extents:
        given[extent.row, extent.group, extent.references, extent.sequences] += extent.num_bytes
    for key, share in shares.items():
        if abs(given[key] - share) >= 1:
            raise InvariantError(f"{key} has {given[key]:,} B, its share is {float(share):,.1f} B")
