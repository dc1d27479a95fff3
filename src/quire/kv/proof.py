"""Proofs that span tables, pools and the arena: every reference has a holder, every slab one pool.

What a part can prove alone it proves in its own `check`.
"""

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from quire.errors import InvariantError
from quire.kv.arena import Arena
from quire.kv.pages import CountedPages, PageNumbers
from quire.kv.stores.base import NO_PAGES, Placement
from quire.kv.tables import LaneTable


def prove_references(
    pool: CountedPages,
    tables: Mapping[str, LaneTable],
    cached_references: Iterable[Mapping[str, PageNumbers]],
    placement: Placement,
) -> None:
    """Prove that pages are referenced as often as tables, loans and what is kept aside name them.

    Raises:
        InvariantError: some are not.
    """
    expected = np.zeros_like(pool.ref_counts)
    own = {n: table for n, table in tables.items() if table.group.page_class == pool.page_class}
    for table in own.values():
        np.add.at(expected, table.pages[table.pages >= 0], 1)
        np.add.at(expected, placement.set_aside_pages(table, np.arange(len(table.pages))), 1)
    for cached_reference in cached_references:
        for name in own:
            np.add.at(expected, cached_reference.get(name, NO_PAGES).reshape(-1), 1)
    if (expected != pool.ref_counts).any():
        wrong = np.flatnonzero(expected != pool.ref_counts)[:5]
        raise InvariantError(f"pages {wrong} are referenced otherwise than counted")


def prove_lanes(
    tables: Mapping[str, LaneTable], lengths: NDArray[np.int64], live: NDArray[np.bool_]
) -> None:
    """Prove that lanes have as many slots as their kind says.

    Args:
        tables: of all groups, by name.
        lengths: [rows] tokens that each has had.
        live: [rows] which are in use.

    Raises:
        InvariantError: a closed row has slots, or one that does not use the group; a mirror has
            others than what it mirrors; fixed records are not all there from the first token on;
            or there are more slots than tokens.
    """
    for table in tables.values():
        group, slots = table.group, table.num_slots
        used = live & table.active
        if slots[~live].any():
            raise InvariantError(f"group {group.name!r}: a closed row still has slots")
        if slots[~used].any():
            raise InvariantError(f"group {group.name!r}: slots of a row that does not use it")
        if group.mirrors is not None:
            if (slots != tables[group.mirrors].num_slots)[used].any():
                raise InvariantError(f"group {group.name!r}: other slots than {group.mirrors!r}")
        elif group.fixed_slots is not None:
            records = np.where(used & (lengths > 0), group.fixed_slots, 0)
            if (slots != records[:, None]).any():
                raise InvariantError(f"group {group.name!r}: not {group.fixed_slots} records")
        elif (slots > lengths[:, None]).any():
            raise InvariantError(f"group {group.name!r}: more slots than tokens")


def prove_slabs(arena: Arena, pools: Iterable[CountedPages]) -> None:
    """Prove that a slab is free or serves one page class.

    Raises:
        InvariantError: one is neither, or both.
    """
    slabs = [slab for pool in pools for slab in pool.held_slabs]
    if len(slabs) != len(set(slabs)) or arena.free_slabs & set(slabs):
        raise InvariantError("a slab serves two page classes, or is held and free at once")
