"""Swapping a whole sequence out of the arena and back, byte for byte."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.errors import OutOfPages
from quire.kv.memory import KVMemory
from quire.spec.pages import PageClass


@dataclass(frozen=True, slots=True)
class SwappedLanes:
    """One group of a sequence outside the arena.

    Attributes:
        num_pages, num_slots: [lanes].
        page_positions: [lanes, pages] of ordered lanes.
        payload: what `PageBytes.read_pages` gave, pages lane by lane.
    """

    num_pages: NDArray[np.int32]
    num_slots: NDArray[np.int32]
    page_positions: NDArray[np.int32]
    payload: object


@dataclass(frozen=True, slots=True)
class SwappedSequence:
    """A sequence outside the arena: all that `swap_in` needs."""

    length: int
    peak_bytes: int
    lanes: Mapping[str, SwappedLanes]


def swap_out(memory: KVMemory, row: int) -> SwappedSequence:
    """Read a sequence's pages out and release the row."""
    lanes = {}
    for name, table in memory.tables.items():
        widest = int(table.num_pages[row].max(initial=0))
        lanes[name] = SwappedLanes(
            table.num_pages[row].copy(),
            table.num_slots[row].copy(),
            table.page_positions[row, :, :widest].copy(),
            memory.store.read_pages(table.group.page_class, table.row_pages(row)),
        )
    swapped = SwappedSequence(int(memory.lengths[row]), int(memory.peak_bytes[row]), lanes)
    memory.release([row])
    return swapped


def swap_in(memory: KVMemory, swapped: SwappedSequence) -> int:
    """Bring a sequence back into fresh pages; return its row.

    Raises:
        OutOfPages: no row or no pages; nothing was changed.
    """
    needed: dict[PageClass, int] = {}
    for name, lanes in swapped.lanes.items():
        page_class = memory.tables[name].group.page_class
        needed[page_class] = needed.get(page_class, 0) + int(lanes.num_pages.sum())
    if not memory.fits(needed):
        raise OutOfPages(f"{sum(needed.values())} pages needed to swap a sequence in")
    row = memory.start()
    for name, lanes in swapped.lanes.items():
        table = memory.tables[name]
        page_class = table.group.page_class
        pages = memory.pools[page_class].allocate(int(lanes.num_pages.sum()))
        table.append(np.array([row]), lanes.num_pages[None], pages)
        table.num_slots[row] = lanes.num_slots
        table.page_positions[row, :, : lanes.page_positions.shape[1]] = lanes.page_positions
        memory.store.write_pages(page_class, pages, lanes.payload)
    memory.lengths[row] = swapped.length
    memory.peak_bytes[row] = swapped.peak_bytes
    memory.note_peaks(np.array([row]))
    return row
