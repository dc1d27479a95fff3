"""Which positions a row still holds, head by head."""

from quire.kv.lane_reader import LaneReader
from quire.kv.step import PagedKV


def retained_positions(kv: PagedKV, row: int, layer: int) -> list[list[int]]:
    """Positions in the lanes of a layer, ascending, for each KV head.

    Args:
        kv: memory and bytes.
        row: of the memory.
        layer: of the model.
    """
    group, index = kv.place[layer]
    reader = LaneReader(kv, group.name, row, range(index, index + 1))
    return [[position for position in head if position >= 0] for head in reader.positions.tolist()]
