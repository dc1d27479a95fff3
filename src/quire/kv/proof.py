"""Proofs that span tables, pools and the arena: every reference has a holder, every slab one pool.

What a part can prove alone it proves in its own `check`.
"""

from collections.abc import Iterable, Mapping

import numpy as np

from quire.errors import InvariantError
from quire.kv.arena import Arena
from quire.kv.pages import CountedPages, PageNumbers
from quire.kv.stores.base import NO_PAGES, Placement
from quire.kv.tables import LaneTable


def prove_references(
    pool: CountedPages,
    tables: Mapping[str, LaneTable],
    loans: Iterable[Mapping[str, PageNumbers]],
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
        np.add.at(expected, placement.kept_aside(table, np.arange(len(table.pages))), 1)
    for loan in loans:
        for name in own:
            np.add.at(expected, loan.get(name, NO_PAGES).reshape(-1), 1)
    if (expected != pool.ref_counts).any():
        wrong = np.flatnonzero(expected != pool.ref_counts)[:5]
        raise InvariantError(f"pages {wrong} are referenced otherwise than counted")


def prove_slabs(arena: Arena, pools: Iterable[CountedPages]) -> None:
    """Prove that a slab is free or serves one page class.

    Raises:
        InvariantError: one is neither, or both.
    """
    slabs = [slab for pool in pools for slab in pool.held_slabs]
    if len(slabs) != len(set(slabs)) or arena.free_slabs & set(slabs):
        raise InvariantError("a slab serves two page classes, or is held and free at once")
