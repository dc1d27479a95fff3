"""Staging: pages shared by the table entries of all layers of an offloaded prefix.

    step 1    ... | attend L-2 | attend L-1 | sampling | step 2  | attend 0 | attend 1
    transfer               | layer 0  | layer 1                           | layer 2 | layer 3

After the attention of the last layers, their staging slots are free. The first layers are loaded
into them at the end of a step. The next step loads only what differs: pages of other columns, if
its split has moved, and other sequences.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from quire.kv.memory import KVMemory
from quire.kv.pages import PageNumbers, PagePool
from quire.kv.tables import LaneTable
from quire.layout.layout import SLOTS
from quire.offload.swap.transfer import Transfer

Run = tuple[int, int]
"""First page, counted in its layer, and number of pages."""


@runtime_checkable  # for the type checks in tests
class Pending(Protocol):
    """A batch whose copies may be in flight."""

    def finalize(self) -> None:
        """Wait until no copy is in flight."""
        ...


@runtime_checkable  # for the type checks in tests
class StagingCache(Protocol):
    """What the second staging slot holds for rows with sparse attention."""

    @property
    def page_groups(self) -> Sequence[object]:
        """The page groups whose staging it is."""
        ...


class StagingUse:
    """The step that copies into the staging pages, and copies for the next step.

    Bookkeeping that moves or frees staging pages waits for both.

    Attributes:
        caches: by identity of their first page group; see `hot_pages`.
    """

    def __init__(self) -> None:
        self.caches: dict[int, StagingCache] = {}
        self._batches: list[Pending] = []
        self._pages: dict[tuple[int, int], tuple[object, dict[Run, Transfer]]] = {}
        self._activations: dict[
            tuple[str, int, int], tuple[Mapping[int, range], Sequence[Transfer]]
        ] = {}

    def add(self, page_group: object, layer: int, run: Run, transfer: Transfer) -> None:
        """Add pages in transfer to their staging slot.

        Args:
            page_group: their page group; compared by identity.
            layer: index of the layer in its lane group.
            run: first page, counted in the layer, and number of pages.
            transfer: their copy.
        """
        key = id(page_group), layer
        self._pages.setdefault(key, (page_group, {}))[1][run] = transfer

    def take(self, page_group: object, layer: int) -> Mapping[Run, Transfer]:
        """Return the copies of a layer of a page group, by run; its staging is used from now on."""
        found = self._pages.pop((id(page_group), layer), None)
        return {} if found is None else found[1]

    def add_activations(
        self,
        group: str,
        batch: int,
        layer: int,
        rows: Mapping[int, range],
        copies: Sequence[Transfer],
    ) -> None:
        """Add activations in transfer to the staging of a batch.

        Args:
            group: name of the lane group.
            batch: index of the batch in the step.
            layer: index of the layer in the group.
            rows: slots of each sequence, in the order of the staging.
            copies: copies of the chunks, in order.
        """
        self._activations[group, batch, layer] = dict(rows), copies

    def take_activations(
        self, group: str, batch: int, layer: int, rows: Mapping[int, range]
    ) -> Sequence[Transfer] | None:
        """Return the copies of these slots; None if others are in the staging."""
        found = self._activations.pop((group, batch, layer), None)
        if found is None or list(found[0].items()) != list(rows.items()):
            return None
        return found[1]

    def forget_activations(self) -> None:
        """Drop the activations, because slots were moved or freed; their copies have ended."""
        self._wait_for_activations()
        self._activations.clear()

    def begin(self, batch: Pending) -> None:
        """Add a batch of the step that uses the staging pages."""
        self._batches.append(batch)

    def end(self) -> None:
        """Wait for the copies of the current step and forget its batches."""
        for batch in self._batches:
            batch.finalize()
        self._batches.clear()

    def finalize(self) -> None:
        """Wait for the copies of the current step and for the next one; both stay valid."""
        for batch in self._batches:
            batch.finalize()
        for _, copies in self._pages.values():
            for transfer in copies.values():
                transfer.exception()
        self._wait_for_activations()

    def clear(self) -> None:
        """Wait for all copies and drop those for the next step: other data goes to their slots."""
        self.finalize()
        self._pages.clear()
        self._activations.clear()
        self.caches.clear()

    def drop_caches(self, page_groups: Sequence[object]) -> None:
        """Drop the caches of page groups, into whose staging whole layers are loaded."""
        dropped = set(map(id, page_groups))
        self.caches = {
            key: cache
            for key, cache in self.caches.items()
            if dropped.isdisjoint(map(id, cache.page_groups))
        }

    def _wait_for_activations(self) -> None:
        copies = (transfers for _, transfers in self._activations.values())
        for transfer in itertools.chain.from_iterable(copies):
            transfer.exception()

    def retain(self, page_groups: Sequence[object]) -> None:
        """Drop the pages of page groups that no sequence holds."""
        held = {id(page_group) for page_group in page_groups}
        self._pages = {key: kept for key, kept in self._pages.items() if id(kept[0]) in held}
        caches = self.caches.items()
        self.caches = {
            k: cache for k, cache in caches if held.issuperset(map(id, cache.page_groups))
        }


def staged_pages(table: LaneTable, columns: int) -> int:
    """Staging pages needed for this number of pages of each lane."""
    return SLOTS * table.group.lanes_per_layer * columns


def stage(
    memory: KVMemory, table: LaneTable, rows: Sequence[int], first: int, columns: int, slots: int
) -> PageNumbers:
    """Allocate staging pages, and set the table entries of each layer to its staging slot.

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
    for _ in range(num_rows):
        retain_layers(pool, table, staging)
    pool.release(pages)
    return staging


def retain_layers(pool: PagePool, table: LaneTable, staging: PageNumbers) -> None:
    """Add the references of a row's table entries to its staging pages, one for each layer."""
    for layer in range(len(table.group.layers) if staging.size else 0):
        pool.retain(staging[table.group.staging_slot(layer, len(staging))].reshape(-1))


def entries_of(table: LaneTable, staging: PageNumbers) -> PageNumbers:
    """Table entries [lanes, columns] of all layers for staging pages."""
    group = table.group
    slot = [group.staging_slot(layer, len(staging)) for layer in range(len(group.layers))]
    entries: PageNumbers = staging[slot].reshape(group.num_lanes, -1)
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
    first = np.array(group.first_staged(SLOTS))[:, None, None]
    lanes = first * group.lanes_per_layer + np.arange(group.lanes_per_layer)
    pages, offsets = [], []
    for row, slots in rows.items():
        column, offset = np.divmod(np.array(slots, dtype=np.int64), group.page_class.tokens)
        pages.append(table.pages[row, lanes, column[None, :, None]].astype(np.int64))
        offsets.append(np.repeat(offset[:, None], group.lanes_per_layer, axis=1))
    if not pages:
        return (empty := np.empty((SLOTS, 0, group.lanes_per_layer), dtype=np.int64)), empty[0]
    return np.concatenate(pages, axis=1), np.concatenate(offsets)
