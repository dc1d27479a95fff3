"""What a KV memory tells, and asks, those who depend on its pages."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError, InvariantError
from quire.kv.pages import PageNumbers
from quire.kv.tables import Rows
from quire.layout.pages import PageClass

# ---- slot moves ----------------------------------------------------------------------------------

# Which slots move where when a lane loses some: masks in, slot numbers out.
#
# slots         0 1 2 3 | 4 5 6 7 | 8 9 . .      keep 6 of 10: x marks those that leave
# keep          o x o o | x o x o | o x
# fill holes    o 8 o o | 7 o                    survivors behind slot 6 fill holes before it
# close gaps    0 2 3 5 | 7 8                    all behind the first hole shift, in order

Mask = NDArray[np.bool_]
Slots = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SlotMoves:
    """Slots of a row that move, [moves] each. All are read before any is written.

    Attributes:
        lane: of both slots.
        source, target: from where to where.
    """

    lane: Slots
    source: Slots
    target: Slots

    def __len__(self) -> int:
        return len(self.lane)


def no_moves() -> SlotMoves:
    """None."""
    none = np.empty(0, dtype=np.int64)
    return SlotMoves(none, none, none)


def fill_holes(keep: Mask) -> SlotMoves:
    """At most min(kept, leaving) moves a lane, for lanes whose slots have no order.

    Args:
        keep: [lanes, slots] True where a slot stays.
    """
    behind = np.arange(keep.shape[1]) >= keep.sum(axis=1, dtype=np.int32)[:, None]
    width = max(1, keep.shape[1])
    # flat and then divided: many times faster than indices of two axes
    lane, hole = np.divmod(np.flatnonzero(~(keep | behind)), width)
    return SlotMoves(lane, np.flatnonzero(keep & behind) % width, hole)


def close_gaps(keep: Mask) -> SlotMoves:
    """Every survivor behind a hole moves to the front: slots stay in the order they are in."""
    lane, source = np.nonzero(keep)
    target = (np.cumsum(keep, axis=1) - 1)[lane, source]
    moves = source != target
    return SlotMoves(lane[moves], source[moves], target[moves])


def retained_pages(keep: Mask, num_slots: NDArray[np.int32], page_tokens: int) -> Mask:
    """Which pages [lanes, columns] stay, where whole pages do or do not.

    Args:
        keep: [lanes, slots] True where a slot stays; False behind a lane's last one.
        num_slots: [lanes].
        page_tokens: slots of a page.

    Raises:
        ConfigError: some slots of a page stay and others leave.
    """
    lanes, columns = len(keep), -(-keep.shape[1] // page_tokens)
    padded = np.zeros((lanes, columns * page_tokens), dtype=bool)
    padded[:, : keep.shape[1]] = keep
    staying = padded.reshape(lanes, columns, page_tokens).sum(axis=2)
    held = np.clip(num_slots[:, None] - np.arange(columns) * page_tokens, 0, page_tokens)
    if ((staying != 0) & (staying != held)).any():
        lane, column = np.argwhere((staying != 0) & (staying != held))[0]
        raise ConfigError(
            f"pages leave whole or stay, but of page {column} of lane {lane} "
            f"{staying[lane, column]} of {held[lane, column]} slots stay"
        )
    stays: Mask = staying > 0
    return stays


def prove_one_to_one(keep: Mask, moves: SlotMoves) -> None:
    """Prove that moves bring every survivor to the front, each to a slot of its own.

    Raises:
        InvariantError: two slots move into one, one moves twice, a survivor is written over, or a
            hole is left.
    """
    places = keep.copy()
    slots = np.concatenate([moves.source, moves.target])
    if len(slots) and not 0 <= slots.min() <= slots.max() < keep.shape[1]:
        raise InvariantError("a compaction moves slots that are not there")
    num_kept = np.count_nonzero(keep)
    places[moves.lane, moves.source] = False
    if np.count_nonzero(places) != num_kept - len(moves):
        raise InvariantError("a compaction moves a slot twice, or one that leaves")
    if places[moves.lane, moves.target].any():
        raise InvariantError("a compaction writes over a slot that stays where it is")
    places[moves.lane, moves.target] = True
    front = np.arange(keep.shape[1]) < keep.sum(axis=1)[:, None]
    if (places != front).any():
        raise InvariantError("a compaction moves two slots into one, or leaves a hole")


# ---- listeners -----------------------------------------------------------------------------------


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
