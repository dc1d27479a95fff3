"""Staging: pages that the table entries of all layers of an offloaded prefix name in turns."""

from typing import Protocol, runtime_checkable

import numpy as np

from quire.kv.memory import KVMemory
from quire.kv.pages import PageNumbers
from quire.kv.tables import LaneTable
from quire.layout.layout import SLOTS


def staged_pages(table: LaneTable, columns: int) -> int:
    """Pages of a staging for so many pages of each lane."""
    return SLOTS * table.group.lanes_per_layer * columns


def stage(
    memory: KVMemory, table: LaneTable, row: int, first: int, columns: int, slots: int
) -> PageNumbers:
    """Allocate a staging, and let the entries of all layers name it in turns.

    Args:
        memory: of the table.
        table: whose entries are replaced, without a release.
        row: of the sequence.
        first: column of the first page.
        columns: pages of each lane.
        slots: layers whose pages the staging holds at a time.

    Returns:
        Its pages [slots, lanes of a layer, columns].

    Raises:
        OutOfPages: the arena does not hold it.
    """
    group, pool = table.group, memory.pools[table.group.page_class]
    pages = pool.allocate(slots * group.lanes_per_layer * columns)
    staging = pages.reshape(slots, group.lanes_per_layer, columns)
    num_layers = len(group.layers)
    for further in range(1, -(-num_layers // slots)):
        for again in staging[: num_layers - slots * further]:
            pool.retain(again.reshape(-1))
    slot = np.arange(num_layers) % slots
    name_pages(table, row, first, staging[slot].reshape(group.num_lanes, columns))
    return staging


def name_pages(table: LaneTable, row: int, first: int, pages: PageNumbers) -> None:
    """Let lanes name these pages [lanes, columns] from a column on."""
    lane, column = (index.reshape(-1) for index in np.indices(pages.shape))
    table.replace(np.full(pages.size, row), lane, column + first, pages.reshape(-1))


# ---- staging use ---------------------------------------------------------------------------------

# The step that uses staging pages now: whoever moves pages ends its copies first.


@runtime_checkable  # for the type checks in tests
class Pending(Protocol):
    """A step whose copies may still be under way."""

    def finalize(self) -> None:
        """Return when nothing is under way."""
        ...


class StagingUse:
    """Shared by the bookkeeping of offloaded pages and by the steps that read them."""

    def __init__(self) -> None:
        self._step: Pending | None = None

    def begin(self, step: Pending) -> None:
        """Note the step that uses the staging pages from now on."""
        self._step = step

    def finalize(self) -> None:
        """Return when the step has no copies under way; it stays the one that uses the pages."""
        if self._step is not None:
            self._step.finalize()

    def end(self) -> None:
        """Settle the step and forget it."""
        self.finalize()
        self._step = None
