"""Paged attention without pages: every key and value kept, a full float32 softmax, one mask.

The reference that fast attention is compared with, and the attention of the check at load. Slow on
purpose: what it computes can be read off the page.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from quire.models.base import AttentionCall


@dataclass(slots=True)
class DenseLane:
    """What one sequence holds in one layer, in the order of arrival.

    Attributes:
        positions: logical position of each slot.
        keys: [num_kv_heads, head_dim] each, after RoPE.
        values: like keys.
    """

    positions: list[int] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


class DenseAttention:
    """Keeps every key and value of every sequence, for as many forwards as one likes."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[Hashable, int], DenseLane] = {}

    def batch(self, sequences: Sequence[Hashable], positions: Sequence[int]) -> "DenseBatch":
        """The `PagedAttention` of one flat batch.

        Args:
            sequences: whose token each row is.
            positions: logical position of each row in its sequence.
        """
        return DenseBatch(self, tuple(sequences), tuple(positions))

    def lane(self, sequence: Hashable, layer: int) -> DenseLane:
        """What a sequence holds in a layer; empty at first."""
        return self._lanes.setdefault((sequence, layer), DenseLane())


@dataclass(frozen=True, slots=True)
class DenseBatch:
    """`DenseAttention` for the rows of one forward. See `DenseAttention.batch`."""

    store: DenseAttention
    sequences: tuple[Hashable, ...]
    positions: tuple[int, ...]

    def attend(
        self,
        call: AttentionCall,
        query: Float[Tensor, "num_tokens num_heads head_dim"],
        key: Float[Tensor, "num_tokens num_kv_heads head_dim"],
        value: Float[Tensor, "num_tokens num_kv_heads head_dim"],
    ) -> Float[Tensor, "num_tokens num_heads head_dim"]:
        """See `PagedAttention.attend`."""
        out = torch.empty_like(query)
        for sequence in dict.fromkeys(self.sequences):
            rows = [row for row, owner in enumerate(self.sequences) if owner == sequence]
            lane = self.store.lane(sequence, call.layer)
            lane.positions.extend(self.positions[row] for row in rows)
            lane.keys.extend(key[rows])
            lane.values.extend(value[rows])
            at = [self.positions[row] for row in rows]
            out[rows] = _attend(call, query[rows], lane, visible(call, at, lane.positions))
        return out


def visible(
    call: AttentionCall, queries: Sequence[int], slots: Sequence[int]
) -> Bool[Tensor, "num_queries num_slots"]:
    """Who sees whom, by logical position: nothing later, nothing outside the window."""
    distance = torch.tensor(queries).unsqueeze(1) - torch.tensor(slots).unsqueeze(0)
    seen = distance >= 0
    return seen if call.window is None else seen & (distance < call.window)


def _attend(call: AttentionCall, query: Tensor, lane: DenseLane, seen: Tensor) -> Tensor:
    group = query.shape[1] // lane.keys[0].shape[0]
    keys = torch.stack(lane.keys).float().repeat_interleave(group, dim=1)  # [slots, heads, dim]
    values = torch.stack(lane.values).float().repeat_interleave(group, dim=1)

    products = torch.einsum("qhd,shd->hqs", query.float(), keys) * call.scale
    if call.softcap is not None:
        products = call.softcap * torch.tanh(products / call.softcap)
    products = products.masked_fill(~seen.to(query.device), -torch.inf)
    if call.sinks is not None:
        sinks = call.sinks.float().view(-1, 1, 1).expand(-1, query.shape[0], 1)
        products = torch.cat([products, sinks], dim=-1)
    weights = products.softmax(dim=-1)[..., : len(lane.keys)]  # a sink takes weight, gives no value
    return torch.einsum("hqs,shd->qhd", weights, values).to(query.dtype)
