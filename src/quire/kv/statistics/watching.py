"""Recording of all attention statistics of one lane group in a step."""

from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import InvariantError
from quire.kernels.backend import AttentionBackend, AttentionMath, LayerPages
from quire.kernels.device_copies import to_device
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
SUMS_ALIGNMENT = 16  # float32 numbers in a cache line


@runtime_checkable  # for the shape checks in tests
class Unrotates(Protocol):
    """Undoes RoPE on queries."""

    def unrotate(
        self, rotated: Float[Tensor, "token head head_dim"], positions: Int[Tensor, " token"]
    ) -> Float[Tensor, "token head head_dim"]:
        """Return the queries before RoPE, float32."""
        ...


class SumsScratch:
    """Scratch memory for column sums, reused by every layer."""

    def __init__(self, device: torch.device) -> None:
        self._numbers = torch.empty(0, device=device)

    @property
    def num_bytes(self) -> int:
        return self._numbers.nbytes

    def sums(self, batch: FlatBatch, num_heads: int, slots: int) -> Tensor:
        """Return memory for column sums [rows, num_heads, slots rounded up to SUMS_ALIGNMENT].

        `AttentionBackend.attend` takes it. Earlier sums are overwritten.
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
    """Records attention statistics of one lane group in one step; slots are [rows, lanes]."""

    def __init__(
        self,
        places: list[StatisticPages],
        batch: FlatBatch,
        slots: NDArray[np.int32],
        lengths: NDArray[np.int64],
    ) -> None:
        self._batch, self._max_slots = batch, int(slots.max(initial=0))
        per_slot = [place for place in places if isinstance(place.statistic, OfWeights)]
        self._slot_attention = AttentionStatisticsStep(per_slot, batch, slots) if per_slot else None
        positions = positions_of(batch, lengths)
        self._queries = [
            QUERY_STEPS[type(place.statistic)](place, batch, positions)
            for place in places
            if type(place.statistic) in QUERY_STEPS
        ]
        self._residual_similarity = [
            ResidualSimilarityStep(place, batch)
            for place in places
            if isinstance(place.statistic, ResidualSimilarity)
        ]
        self._needs_pre_rope_keys = any(step.needs_pre_rope_keys for step in self._queries)
        self._positions = to_device(positions, places[0].numbers.device)

    @property
    def wants_residual_similarity(self) -> bool:
        return bool(self._residual_similarity)

    def room_for_sums(self, num_heads: int, scratch: SumsScratch) -> Tensor | None:
        """Return memory for the column sums of attention; None if no statistic needs them."""
        if self._slot_attention is None or not self._slot_attention.needs_sums:
            return None
        return scratch.sums(self._batch, num_heads, self._max_slots)

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
        """Record the statistics of a layer's attention; `layer` is its index in the group."""
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
            raise InvariantError("query moments need queries before RoPE, which the model lacks")
        return rotary.unrotate(query, self._positions)

    def note_residual_similarity(self, layer: int, cosines: Float[Tensor, " num_tokens"]) -> None:
        """Record how much attention changed the residual stream."""
        for step in self._residual_similarity:
            step.note(layer, cosines)


def watch_group(
    places: list[StatisticPages],
    batch: FlatBatch,
    slots: NDArray[np.int32],
    lengths: NDArray[np.int64],
) -> GroupWatch | None:
    """Return the recorder of a step; None if no row of the step uses statistics of this group."""
    active = [place for place in places if place.active_rows(batch).any()]
    return GroupWatch(active, batch, slots, lengths) if active else None
