"""The proof of the ledger: the same extents, counted page by page in plain Python."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from fractions import Fraction

import numpy as np

from quire.errors import InvariantError
from quire.kv.ledger import NO_ROW, Extent
from quire.kv.memory import KVMemory
from quire.layout.pages import PageClass

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
