"""Pages of a statistic of a lane group, and the records that a step writes."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.device_copies import to_device
from quire.kv.flat_batch import DeviceTable, FlatBatch
from quire.kv.tables import LaneTable
from quire.layout.pages import LaneGroup
from quire.layout.statistics import Statistic


@dataclass(frozen=True, slots=True)
class StatisticPages:
    """The pages of one statistic."""

    group: LaneGroup
    statistic: Statistic
    numbers: Float[Tensor, "page head record width"]  # float32 view of all pages of the class
    table: LaneTable
    device_table: DeviceTable  # `table` as a tensor

    def active_rows(self, batch: FlatBatch) -> NDArray[np.bool_]:
        """Return a mask [rows of the step] of the rows that use this statistic."""
        active: NDArray[np.bool_] = self.table.active[batch.rows]
        return active


@dataclass(frozen=True, slots=True)
class StatisticRecords:
    """Distinct records in the lanes of all layers of a group."""

    numbers: Float[Tensor, "page head record width"]  # float32 view of all pages of the statistic
    pages: Tensor  # int64 [layers, records, lanes of a layer]
    offsets: Tensor  # int64 [records, 1] in the page

    @classmethod
    def of(
        cls, place: StatisticPages, rows: NDArray[np.int64], records: NDArray[np.int64]
    ) -> "StatisticRecords":
        """Locate record `records[i]` of table row `rows[i]` in every lane."""
        group, device = place.group, place.numbers.device
        column, offset = np.divmod(records, group.page_class.tokens)
        lane = np.arange(group.num_lanes)
        pages = place.table.pages[rows[:, None], lane, column[:, None]].astype(np.int64)
        by_layer = pages.reshape(len(rows), len(group.layers), group.lanes_per_layer).swapaxes(0, 1)
        return cls(
            numbers=place.numbers,
            pages=to_device(by_layer, device),
            offsets=to_device(offset[:, None].copy(), device),
        )

    def write(self, layer: int, fresh: Float[Tensor, "record num_kv_heads width"]) -> None:
        """Overwrite these records of a layer; `layer` is its index in the group."""
        self.numbers[self.pages[layer], :, self.offsets] = self._by_lane(layer, fresh)

    def add(self, layer: int, more: Float[Tensor, "record num_kv_heads width"]) -> None:
        """Add to these records of a layer; `layer` is its index in the group."""
        place = (self.pages[layer], slice(None), self.offsets)
        self.numbers[place] = self.numbers[place] + self._by_lane(layer, more)

    def _by_lane(self, layer: int, given: Tensor) -> Tensor:
        return given.reshape(*self.pages[layer].shape, -1, given.shape[2])


@dataclass(frozen=True, slots=True)
class Queries:
    """Queries of a layer, as input of query statistics."""

    query: Float[Tensor, "num_tokens num_heads head_dim"]  # of the flat batch after RoPE
    # None if no statistic needs them
    before_rope: Float[Tensor, "num_tokens num_heads head_dim"] | None


def positions_of(batch: FlatBatch, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Logical positions [tokens] of the batch's tokens; `lengths` include them."""
    first = lengths[batch.rows] - batch.shape.tokens
    positions: NDArray[np.int64] = first[batch.token_row] + batch.token_offset
    return positions
