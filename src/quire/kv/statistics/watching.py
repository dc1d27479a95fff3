"""Everything that a step writes down about the rows of one lane group."""

from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import InvariantError
from quire.kernels.backend import AttentionBackend, AttentionMath, LayerPages
from quire.kv.flat_batch import FlatBatch
from quire.kv.statistics.pages import Queries, StatisticPages, positions_of
from quire.kv.statistics.recorders import MomentsStep, ResidualSimilarityStep, RingStep
from quire.kv.statistics.slot_attention import AttentionStatisticsStep
from quire.layout.statistics import (
    OfWeights,
    QueryMoments,
    QueryRing,
    ResidualSimilarity,
    Statistic,
)

QUERY_STEPS: dict[type[Statistic], type[RingStep] | type[MomentsStep]] = {
    QueryRing: RingStep,
    QueryMoments: MomentsStep,
}
SUMS_ALIGNMENT = 16  # numbers of a cache line


@runtime_checkable  # for the shape checks in tests
class Unrotates(Protocol):
    """Takes RoPE off queries."""

    def unrotate(
        self, rotated: Float[Tensor, "token head head_dim"], positions: Int[Tensor, " token"]
    ) -> Float[Tensor, "token head head_dim"]:
        """The queries as they were before, float32."""
        ...


class SumsScratch:
    """Memory for column sums, used again by every layer."""

    def __init__(self, device: torch.device) -> None:
        self._numbers = torch.empty(0, device=device)

    @property
    def num_bytes(self) -> int:
        """How large it has become."""
        return self._numbers.nbytes

    def sums(self, batch: FlatBatch, num_heads: int, slots: int) -> Tensor:
        """Column sums [rows, num_heads, slots or a few more], as `AttentionBackend.attend` wants.

        What was there before is gone.
        """
        width = -(-slots // SUMS_ALIGNMENT) * SUMS_ALIGNMENT
        shape = (len(batch.rows), num_heads, width)
        count = shape[0] * shape[1] * shape[2]
        if self._numbers.numel() < count:
            self._numbers = torch.empty(count, device=self._numbers.device)
        sums = self._numbers[:count].view(shape)
        sums[batch.shape.num_decode :] = 0
        return sums


class GroupWatch:
    """What one lane group's rows have remembered of one step.

    Args:
        places: statistics of the group that some row of the step has, at least one.
        batch: the step.
        slots: [rows, lanes] of the group, the step's tokens included.
        lengths: logical lengths of all rows, the step's tokens included.
    """

    def __init__(
        self,
        places: list[StatisticPages],
        batch: FlatBatch,
        slots: NDArray[np.int32],
        lengths: NDArray[np.int64],
    ) -> None:
        self._batch, self._most_slots = batch, int(slots.max(initial=0))
        per_slot = [place for place in places if isinstance(place.statistic, OfWeights)]
        self._slot_attention = AttentionStatisticsStep(per_slot, batch, slots) if per_slot else None
        positions = positions_of(batch, lengths)
        self._queries = [
            QUERY_STEPS[type(place.statistic)](place, batch, positions)
            for place in places
            if type(place.statistic) in QUERY_STEPS
        ]
        self._shifts = [
            ResidualSimilarityStep(place, batch)
            for place in places
            if isinstance(place.statistic, ResidualSimilarity)
        ]
        self._needs_pre_rope_keys = any(step.needs_pre_rope_keys for step in self._queries)
        self._positions = torch.from_numpy(positions).to(places[0].numbers.device)

    @property
    def wants_residual_similarity(self) -> bool:
        """Whether `note_residual_similarity` is to be called."""
        return bool(self._shifts)

    def room_for_sums(self, num_heads: int, scratch: SumsScratch) -> Tensor | None:
        """Where attention is to put column sums; None where nobody needs them."""
        if self._slot_attention is None or not self._slot_attention.needs_sums:
            return None
        return scratch.sums(self._batch, num_heads, self._most_slots)

    def note(
        self,
        layer: int,
        backend: AttentionBackend,
        pages: LayerPages,
        math: AttentionMath,
        query: Float[Tensor, "num_tokens num_heads head_dim"],
        column_sums: Tensor | None,
        rotary: Unrotates | None,
    ) -> None:
        """Write down what a layer did; `layer` is counted inside the group."""
        if self._slot_attention is not None:
            self._slot_attention.note(layer, backend, pages, math, query, column_sums)
        if self._queries:
            seen = Queries(query, self._before_rope(query, rotary))
            for step in self._queries:
                step.note(layer, seen)

    def _before_rope(self, query: Tensor, rotary: Unrotates | None) -> Tensor | None:
        if not self._needs_pre_rope_keys:
            return None
        if rotary is None:
            raise InvariantError("queries before RoPE are asked of a model that cannot give them")
        return rotary.unrotate(query, self._positions)

    def note_residual_similarity(self, layer: int, cosines: Float[Tensor, " num_tokens"]) -> None:
        """Write down how much attention changed the residual stream."""
        for step in self._shifts:
            step.note(layer, cosines)


def watch_group(
    places: list[StatisticPages],
    batch: FlatBatch,
    slots: NDArray[np.int32],
    lengths: NDArray[np.int64],
) -> GroupWatch | None:
    """The watch of a step; None where no row of it has statistics of this group."""
    active = [place for place in places if place.active_rows(batch).any()]
    return GroupWatch(active, batch, slots, lengths) if active else None
