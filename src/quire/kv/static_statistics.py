"""Attention statistics of one lane group in a decode step whose inputs keep their addresses.

The rows that use a statistic differ from step to step. All rows of the step are in the launch, and
those that do not use the statistic, and padding rows, have 0 live slots in the rows of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from quire.kernels.backend import AttentionBackend, AttentionStatistic, StatisticRows
from quire.kernels.static_plan import StaticStatistics
from quire.kv.statistics.pages import StatisticPages
from quire.kv.statistics.slot_attention import COUNTS, statistic_of_layer
from quire.kv.statistics.watching import SUMS_ALIGNMENT
from quire.layout.statistics import OfWeights

MOST_SUMS_BYTES = 256 << 20  # of the column sums of a graph
_FLOAT_BYTES = 4


def is_recordable(place: StatisticPages) -> bool:
    """Whether column sums of a decode step suffice for a statistic."""
    return isinstance(place.statistic, OfWeights)


@dataclass(frozen=True, slots=True)
class RecordedStatistic:
    """One statistic: its numbers and rows in each layer of the group."""

    layers: tuple[tuple[AttentionStatistic, StatisticRows], ...]

    @classmethod
    def of(
        cls,
        place: StatisticPages,
        slots: Int[Tensor, "distinct row lane"],
        table_rows: Int[Tensor, " row"],
    ) -> "RecordedStatistic":
        """Describe a statistic whose live slots are overwritten before each step."""
        statistic, device = place.statistic, slots.device
        assert isinstance(statistic, OfWeights), "checked by is_recordable"
        step_rows = torch.arange(len(table_rows), device=device)
        fresh = torch.ones(len(table_rows), dtype=torch.int32, device=device)
        layers = len(place.group.layers)
        by_layer = list(slots) * (layers // len(slots))
        count, heads = COUNTS[type(statistic)], statistic.reduction
        return cls(
            tuple(
                (
                    statistic_of_layer(place, count, heads, layer),
                    StatisticRows(step_rows, table_rows, by_layer[layer], fresh),
                )
                for layer in range(layers)
            )
        )


class StaticRecords:
    """All statistics of a lane group in a step, and memory for column sums.

    Args:
        recorded: the statistics that some row uses; may be empty.
        shape: rows, query heads and most slots of the column sums.
        device: of the pages.
    """

    def __init__(
        self,
        recorded: Sequence[RecordedStatistic],
        shape: tuple[int, int, int],
        device: torch.device,
    ) -> None:
        rows, self._num_heads, slots = shape
        width = -(-slots // SUMS_ALIGNMENT) * SUMS_ALIGNMENT
        self._recorded = tuple(recorded)
        self._fits = _FLOAT_BYTES * rows * self._num_heads * width <= MOST_SUMS_BYTES
        self.sums: Float[Tensor, "row num_heads slot"] | None = None
        if recorded and self._fits:
            self.sums = torch.zeros(rows, self._num_heads, width, device=device)

    def is_possible(self, backend: AttentionBackend) -> bool:
        """Whether a backend can record all statistics under the rules of a graph."""
        if not self._recorded:
            return True
        return (
            self._fits
            and isinstance(backend, StaticStatistics)
            and all(
                backend.can_record(statistic, rows, self._num_heads)
                for one in self._recorded
                for statistic, rows in one.layers
            )
        )

    def record(self, layer: int, backend: AttentionBackend) -> None:
        """Add the column sums of a layer; `layer` is its index in the group."""
        for one in self._recorded:
            statistic, rows = one.layers[layer]
            assert self.sums is not None, "allocated if there are statistics"
            backend.tally(statistic, rows, self.sums)
