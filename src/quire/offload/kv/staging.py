"""Staging: pages shared by the table entries of all layers of an offloaded prefix."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from quire.kv.memory import KVMemory
from quire.kv.pages import PageNumbers
from quire.kv.tables import LaneTable
from quire.layout.layout import SLOTS
from quire.offload.kv.ahead import LoadedAhead


def staged_pages(table: LaneTable, columns: int) -> int:
    """Staging pages needed for this number of pages of each lane."""
    return SLOTS * table.group.lanes_per_layer * columns


def stage(
    memory: KVMemory, table: LaneTable, rows: Sequence[int], first: int, columns: int, slots: int
) -> PageNumbers:
    """Allocate staging pages, and set the table entries of layer n to staging slot n % slots.

    Args:
        memory: KV memory of the table.
        table: page table whose entries are replaced; their old pages are not released.
        rows: rows of the sequences that share the offloaded pages.
        first: column of the first page.
        columns: pages of each lane.
        slots: number of layers that are staged at the same time.

    Returns:
        Staging pages [slots, lanes of a layer, columns].

    Raises:
        OutOfPages: too few free pages in the arena.
    """
    staging = allocate_staging(memory, table, len(rows), columns, slots)
    for row in rows:
        set_pages(table, row, first, entries_of(table, staging))
    return staging


def allocate_staging(
    memory: KVMemory, table: LaneTable, num_rows: int, columns: int, slots: int
) -> PageNumbers:
    """Allocate staging pages with the references of a number of rows; arguments as for `stage`.

    Returns:
        Staging pages [slots, lanes of a layer, columns].

    Raises:
        OutOfPages: too few free pages in the arena.
    """
    group, pool = table.group, memory.pools[table.group.page_class]
    pages = pool.allocate(slots * group.lanes_per_layer * columns)
    staging = pages.reshape(slots, group.lanes_per_layer, columns)
    by_layer = staging[np.arange(len(group.layers)) % slots]
    for number in range(num_rows):
        for layer in range(0 if number else slots, len(group.layers)):
            pool.retain(by_layer[layer].reshape(-1))
    return staging


def entries_of(table: LaneTable, staging: PageNumbers) -> PageNumbers:
    """Table entries [lanes, columns] of all layers for staging pages."""
    slot = np.arange(len(table.group.layers)) % len(staging)
    entries: PageNumbers = staging[slot].reshape(table.group.num_lanes, -1)
    return entries


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


# The batches of the step that copies into the staging pages; their copies must end before pages
# are moved.


@runtime_checkable  # for the type checks in tests
class Pending(Protocol):
    """A batch whose copies may be in flight."""

    def finalize(self) -> None:
        """Wait until no copy is in flight."""
        ...


class StagingUse:
    """The step that copies into the staging pages; bookkeeping waits for its copies.

    Attributes:
        ahead: copies for the first layers of the next step.
    """

    def __init__(self) -> None:
        self._batches: list[Pending] = []
        self.ahead = LoadedAhead()

    def begin(self, batch: Pending) -> None:
        """Add a batch of the step that uses the staging pages."""
        self._batches.append(batch)

    def finalize(self) -> None:
        """Wait for the copies of the current step and for the next one; both stay valid."""
        for batch in self._batches:
            batch.finalize()
        self.ahead.finalize()

    def end(self) -> None:
        """Wait for the copies of the current step and forget its batches."""
        for batch in self._batches:
            batch.finalize()
        self._batches.clear()
