"""What leaves a row's tables: pages behind a window, the tail.

Each function changes one table and returns the pages it no longer names; `KVMemory` releases them.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError
from quire.kv.pages import PageNumbers
from quire.kv.tables import LaneTable, Rows


def drop_behind_window(
    table: LaneTable, rows: Rows, lengths: NDArray[np.int64], window: int
) -> Iterator[tuple[int, int, PageNumbers]]:
    """Drop the pages that no query from the next position on can see: row, lane and pages.

    Args:
        table: of a group with a window.
        rows: [n] row numbers.
        lengths: [n] their next positions.
        window: positions a query looks back, itself included.
    """
    per_page = table.group.page_class.tokens
    full_pages = table.num_slots[rows] // per_page
    last_hidden = lengths + 1 - window - per_page  # first slot of a page behind
    behind = (full_pages > 0) & (table.page_positions[rows, :, 0] <= last_hidden[:, None])
    for i, lane in zip(*np.nonzero(behind), strict=True):
        first_slots = table.page_positions[rows[i], lane, : full_pages[i, lane]]
        num_behind = np.searchsorted(first_slots, last_hidden[i], side="right")
        row = int(rows[i])
        yield row, int(lane), table.drop(row, int(lane), np.arange(num_behind))


def cut_slots(table: LaneTable, row: int, keep_slots: NDArray[np.int32]) -> PageNumbers:
    """Drop the slots behind the first `keep_slots` [lanes] of a row."""
    table.num_slots[row] = keep_slots
    return table.cut(row, -(-keep_slots // table.group.page_class.tokens))


def slots_below(table: LaneTable, row: int, row_length: int, length: int) -> NDArray[np.int32]:
    """Slots [lanes] at positions below `length`, all of them at the front of their lanes.

    Of lanes that mirror others this is no answer: they keep as many slots as those. Records of
    fixed number stay while there is a token.

    Raises:
        ConfigError: some lane has lost its order, a window lane has already dropped pages that
            a row of `length` tokens would look back to, or the newest tokens were kept as they were
            made, which those before them are no longer.
    """
    slots: NDArray[np.int32] = table.num_slots[row]
    if not table.active[row] or table.group.mirrors is not None:
        return slots.copy()
    if length < row_length:
        table.require_in_place(row, length // table.group.page_class.tokens)
    recent = 0 if table.group.kept is None else table.group.kept.recent
    if recent and 0 < length < row_length:
        raise ConfigError(
            f"a row that keeps its newest {recent} tokens as they were made cannot be truncated "
            f"from {row_length} to {length}: what was kept before them is gone"
        )
    if table.group.fixed_slots is not None:
        return np.full_like(slots, table.group.slots_of(length))
    if not table.group.ordered:
        if (slots != row_length).any():
            raise ConfigError("a lane that has evicted tokens cannot be truncated by position")
        return np.full_like(slots, length)
    kept = np.empty_like(slots)
    for lane in range(table.group.num_lanes):
        positions = table.slot_positions(row, lane)
        kept[lane] = np.searchsorted(positions, length)
        if table.group.window is not None:
            first_needed = max(0, length + 1 - table.group.window)
            first_held = int(positions[0]) if len(positions) else row_length
            if first_held > first_needed and first_needed < length:
                raise ConfigError(
                    f"group {table.group.name!r} has dropped positions below {first_held} that a "
                    f"row of {length} needs"
                )
    return kept
