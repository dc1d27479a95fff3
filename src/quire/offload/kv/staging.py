"""Staging: pages shared by the table entries of all layers of an offloaded prefix."""

from typing import Protocol, runtime_checkable

import numpy as np

from quire.kv.memory import KVMemory
from quire.kv.pages import PageNumbers
from quire.kv.tables import LaneTable
from quire.layout.layout import SLOTS


def staged_pages(table: LaneTable, columns: int) -> int:
    """Staging pages needed for this number of pages of each lane."""
    return SLOTS * table.group.lanes_per_layer * columns


def stage(
    memory: KVMemory, table: LaneTable, row: int, first: int, columns: int, slots: int
) -> PageNumbers:
    """Allocate staging pages, and set the table entries of layer n to staging slot n % slots.

    Args:
        memory: KV memory of the table.
        table: page table whose entries are replaced; their old pages are not released.
        row: row of the sequence.
        first: column of the first page.
        columns: pages of each lane.
        slots: number of layers that are staged at the same time.

    Returns:
        Staging pages [slots, lanes of a layer, columns].

    Raises:
        OutOfPages: too few free pages in the arena.
    """
    group, pool = table.group, memory.pools[table.group.page_class]
    pages = pool.allocate(slots * group.lanes_per_layer * columns)
    staging = pages.reshape(slots, group.lanes_per_layer, columns)
    num_layers = len(group.layers)
    for further in range(1, -(-num_layers // slots)):
        for again in staging[: num_layers - slots * further]:
            pool.retain(again.reshape(-1))
    slot = np.arange(num_layers) % slots
    set_pages(table, row, first, staging[slot].reshape(group.num_lanes, columns))
    return staging


def set_pages(table: LaneTable, row: int, first: int, pages: PageNumbers) -> None:
    """Replace the table entries of a row from a column on by pages [lanes, columns]."""
    lane, column = (index.reshape(-1) for index in np.indices(pages.shape))
    table.replace(np.full(pages.size, row), lane, column + first, pages.reshape(-1))


# ---- staging use ---------------------------------------------------------------------------------

# The step that copies into the staging pages; its copies must end before pages are moved.


@runtime_checkable  # for the type checks in tests
class Pending(Protocol):
    """A step whose copies may be in flight."""

    def finalize(self) -> None:
        """Wait until no copy is in flight."""
        ...


class StagingUse:
    """The step that copies into the staging pages; bookkeeping waits for its copies."""

    def __init__(self) -> None:
        self._step: Pending | None = None

    def begin(self, step: Pending) -> None:
        """Set the step that uses the staging pages from now on."""
        self._step = step

    def finalize(self) -> None:
        """Wait for the copies of the current step, which continues to use the pages."""
        if self._step is not None:
            self._step.finalize()

    def end(self) -> None:
        """Wait for the copies of the current step and unset it."""
        self.finalize()
        self._step = None
