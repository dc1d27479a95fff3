"""Slot moves of a compaction."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError, InvariantError

# Slot moves after eviction: a keep mask in, slot numbers out.
#
# slots         0 1 2 3 | 4 5 6 7 | 8 9 . .      retain 6 of 10: x marks evicted slots
# keep          o x o o | x o x o | o x
# fill holes    o 8 o o | 7 o                    retained slots from 6 on fill the holes before 6
# close gaps    0 2 3 5 | 7 8                    all slots after the first hole shift, in order

Mask = NDArray[np.bool_]
Slots = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SlotMoves:
    """Slot moves of a row, [moves] each. All sources are read before any target is written."""

    lane: Slots
    source: Slots
    target: Slots

    def __len__(self) -> int:
        return len(self.lane)


def no_moves() -> SlotMoves:
    """Return an empty set of moves."""
    none = np.empty(0, dtype=np.int64)
    return SlotMoves(none, none, none)


def fill_holes(keep: Mask) -> SlotMoves:
    """Compute at most min(retained, evicted) moves per lane, for lanes with unordered slots."""
    past_end = np.arange(keep.shape[1]) >= keep.sum(axis=1, dtype=np.int32)[:, None]
    width = max(1, keep.shape[1])
    # flatnonzero and divmod: many times faster than nonzero on two axes
    lane, hole = np.divmod(np.flatnonzero(~(keep | past_end)), width)
    return SlotMoves(lane, np.flatnonzero(keep & past_end) % width, hole)


def close_gaps(keep: Mask) -> SlotMoves:
    """Move every retained slot after a hole towards slot 0; the slot order is preserved."""
    lane, source = np.nonzero(keep)
    target = (np.cumsum(keep, axis=1) - 1)[lane, source]
    moves = source != target
    return SlotMoves(lane[moves], source[moves], target[moves])


def retained_pages(keep: Mask, num_slots: NDArray[np.int32], page_tokens: int) -> Mask:
    """Mask [lanes, columns] of retained pages; ConfigError if a page has evicted slots too."""
    lanes, columns = len(keep), -(-keep.shape[1] // page_tokens)
    padded = np.zeros((lanes, columns * page_tokens), dtype=bool)
    padded[:, : keep.shape[1]] = keep
    retained = padded.reshape(lanes, columns, page_tokens).sum(axis=2)
    held = np.clip(num_slots[:, None] - np.arange(columns) * page_tokens, 0, page_tokens)
    if ((retained != 0) & (retained != held)).any():
        lane, column = np.argwhere((retained != 0) & (retained != held))[0]
        raise ConfigError(
            f"expected whole pages to be retained or evicted, got page {column} of lane {lane} "
            f"with {retained[lane, column]} of {held[lane, column]} slots retained"
        )
    is_retained: Mask = retained > 0
    return is_retained


def prove_one_to_one(keep: Mask, moves: SlotMoves) -> None:
    """Check that the retained slots are dense after the moves, each in a separate slot."""
    filled = keep.copy()
    slots = np.concatenate([moves.source, moves.target])
    if len(slots) and not 0 <= slots.min() <= slots.max() < keep.shape[1]:
        raise InvariantError("a compaction moves slots that do not exist")
    num_kept = np.count_nonzero(keep)
    filled[moves.lane, moves.source] = False
    if np.count_nonzero(filled) != num_kept - len(moves):
        raise InvariantError("a compaction moves a slot twice, or an evicted slot")
    if filled[moves.lane, moves.target].any():
        raise InvariantError("a compaction overwrites a retained slot that does not move")
    filled[moves.lane, moves.target] = True
    dense = np.arange(keep.shape[1]) < keep.sum(axis=1)[:, None]
    if (filled != dense).any():
        raise InvariantError("a compaction moves two slots into one, or leaves a hole")
