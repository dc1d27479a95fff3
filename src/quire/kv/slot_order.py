"""Order of a lane's slots by the positions of their tokens."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SlotOrder:
    """Slots of the table's lanes sorted by position; each array is [lanes, slots].

    Past a lane's last slot, positions are -1 and `slot` lists the remaining slot numbers.
    """

    positions: NDArray[np.int32]
    slot: NDArray[np.int64]
    live: NDArray[np.bool_]


def by_position(positions: NDArray[np.int32], live: NDArray[np.bool_]) -> SlotOrder:
    """Sort the live slots by position; live slots are the first slots of their lanes.

    Position and slot are packed into one integer: `np.sort` is faster than `np.argsort`.
    """
    bits = positions.shape[1].bit_length()
    past_end = int(positions.max(initial=0, where=live)) + 1  # sorts after every live position
    number: type[np.unsignedinteger[Any]] = np.uint32 if past_end < 1 << 32 - bits else np.uint64
    keys = np.where(live, positions, past_end).astype(number)
    keys <<= number(bits)
    keys |= np.arange(positions.shape[1], dtype=number)
    keys.sort(axis=1)
    slot = (keys & number((1 << bits) - 1)).astype(np.int64)
    return SlotOrder(np.where(live, (keys >> number(bits)).astype(np.int32), -1), slot, live)
