"""Invariant checks across tables, pools and the arena.

All reference counts are correct, and every slab belongs to one pool. Invariants of a single
component are checked by its own `check` method.
"""

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from quire.errors import InvariantError
from quire.kv.arena import Arena
from quire.kv.pages import NO_PAGES, PageNumbers, PagePool
from quire.kv.tables import LaneTable


def prove_references(
    pool: PagePool,
    tables: Mapping[str, LaneTable],
    cached_references: Iterable[Mapping[str, PageNumbers]],
) -> None:
    """Check reference counts against page tables and cached references."""
    expected = np.zeros_like(pool.ref_counts)
    own = {n: table for n, table in tables.items() if table.group.page_class == pool.page_class}
    for table in own.values():
        np.add.at(expected, table.pages[table.pages >= 0], 1)
    for cached_reference in cached_references:
        for name in own:
            np.add.at(expected, cached_reference.get(name, NO_PAGES).reshape(-1), 1)
    if (expected != pool.ref_counts).any():
        wrong = np.flatnonzero(expected != pool.ref_counts)[:5]
        raise InvariantError(
            f"reference counts of pages {wrong} differ from the references in tables and caches"
        )


def prove_lanes(
    tables: Mapping[str, LaneTable], lengths: NDArray[np.int64], live: NDArray[np.bool_]
) -> None:
    """Check the slot counts of all lanes."""
    for table in tables.values():
        group, slots = table.group, table.num_slots
        used = live & table.active
        if slots[~live].any():
            raise InvariantError(f"group {group.name!r}: a closed row still has slots")
        if slots[~used].any():
            raise InvariantError(f"group {group.name!r}: slots of a row that does not use it")
        if group.follows is not None:
            if (slots != tables[group.follows].num_slots)[used].any():
                raise InvariantError(
                    f"group {group.name!r}: slot counts differ from group {group.follows!r}"
                )
        elif group.records is not None:
            records = np.where(used & (lengths > 0), group.records, 0)
            if (slots != records[:, None]).any():
                raise InvariantError(
                    f"group {group.name!r}: expected {group.records} records in every lane"
                )
        elif (slots > lengths[:, None]).any():
            raise InvariantError(f"group {group.name!r}: more slots than tokens")


def prove_slabs(arena: Arena, pools: Iterable[PagePool]) -> None:
    """Check that every slab is either free or held by one page pool."""
    slabs = [slab for pool in pools for slab in pool.held_slabs]
    if len(slabs) != len(set(slabs)) or arena.free_slabs & set(slabs):
        raise InvariantError("a slab serves two page classes, or is held and free at once")
