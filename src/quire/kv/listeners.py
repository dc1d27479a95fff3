"""What a KV memory tells, and asks, those who depend on its pages."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from quire.kv.pages import PageNumbers
from quire.kv.slot_moves import SlotMoves
from quire.kv.tables import Rows
from quire.layout.pages import PageClass


class MemoryListener:
    """Depends on pages of a KV memory. Every method does nothing unless a subclass overrides it."""

    @property
    def idle_bytes(self) -> int:
        """Bytes of pages that only this listener holds and that no running request uses."""
        return 0

    def released(self, rows: Rows) -> None:
        """Note that sequences are being released; their tables still name their pages."""

    def compacted(self, row: int, group: str, moves: SlotMoves | None, slots: int) -> None:
        """Note that a sequence has lost slots.

        Args:
            row: the sequence.
            group: its lanes.
            moves: of slots; None where whole pages left.
            slots: each lane has now, at least.
        """

    def unpublish(self, page_class: PageClass, pages: PageNumbers) -> NDArray[np.bool_]:
        """Release pages that are about to be written; say of which pages that was done."""
        del page_class
        return np.zeros(len(pages), dtype=bool)


class MemoryListeners:
    """The listeners of one KV memory, told in the order in which they subscribed."""

    def __init__(self) -> None:
        self._listeners: list[MemoryListener] = []

    def __iter__(self) -> Iterator[MemoryListener]:
        return iter(self._listeners)

    def subscribe(self, listener: MemoryListener) -> None:
        """Tell a listener from now on."""
        self._listeners.append(listener)

    def unsubscribe(self, listener: MemoryListener) -> None:
        """Tell a listener nothing any more."""
        self._listeners.remove(listener)

    def idle_bytes(self) -> int:
        """Bytes of pages in use that no running request uses."""
        return sum(listener.idle_bytes for listener in self._listeners)

    def released(self, rows: Rows) -> None:
        """See `MemoryListener.released`."""
        for listener in self._listeners:
            listener.released(rows)

    def compacted(self, row: int, group: str, moves: SlotMoves | None, slots: int) -> None:
        """See `MemoryListener.compacted`."""
        for listener in self._listeners:
            listener.compacted(row, group, moves, slots)

    def unpublish(self, page_class: PageClass, pages: PageNumbers) -> NDArray[np.bool_]:
        """See `MemoryListener.unpublish`."""
        done = np.zeros(len(pages), dtype=bool)
        for listener in self._listeners:
            done |= listener.unpublish(page_class, pages)
        return done
