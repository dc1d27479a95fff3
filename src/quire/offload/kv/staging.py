"""Staging: pages shared by the table entries of all layers of an offloaded prefix."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

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


def slot_places(
    table: LaneTable, rows: Mapping[int, range]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pages [slot of the staging, token, lane of a layer] and offsets [token, lane] of slots."""
    group = table.group
    lanes = np.arange(SLOTS * group.lanes_per_layer).reshape(SLOTS, 1, -1)
    pages, offsets = [], []
    for row, slots in rows.items():
        column, offset = np.divmod(np.array(slots, dtype=np.int64), group.page_class.tokens)
        pages.append(table.pages[row, lanes, column[None, :, None]].astype(np.int64))
        offsets.append(np.repeat(offset[:, None], group.lanes_per_layer, axis=1))
    if not pages:
        return (empty := np.empty((SLOTS, 0, group.lanes_per_layer), dtype=np.int64)), empty[0]
    return np.concatenate(pages, axis=1), np.concatenate(offsets)


# ---- staging use ---------------------------------------------------------------------------------

# The batches of the step that copies into the staging pages; their copies must end before pages
# are moved.


@runtime_checkable  # for the type checks in tests
class Pending(Protocol):
    """A batch whose copies may be in flight."""

    def finalize(self) -> None:
        """Wait until no copy is in flight."""
        ...


class StagingUse:
    """The step that copies into the staging pages; bookkeeping waits for its copies."""

    def __init__(self) -> None:
        self._batches: list[Pending] = []

    def begin(self, batch: Pending) -> None:
        """Add a batch of the step that uses the staging pages."""
        self._batches.append(batch)

    def finalize(self) -> None:
        """Wait for the copies of the current step, which continues to use the pages."""
        for batch in self._batches:
            batch.finalize()

    def end(self) -> None:
        """Wait for the copies of the current step and forget its batches."""
        self.finalize()
        self._batches.clear()
