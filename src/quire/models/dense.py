"""Paged attention without pages: plain tensors, float32 softmax, one row at a time.

The reference that fast attention is compared with, and the attention of the check at load. Slow on
purpose: every line is the definition.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from quire.models.base import AttentionCall


@dataclass(slots=True)
class _Lane:
    # What one sequence holds in one layer, in the order of arrival.
    positions: list[int] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)  # each [num_kv_heads, head_dim]
    values: list[Tensor] = field(default_factory=list)


class DenseAttention:
    """Keeps every key and value of every sequence, for as many forwards as one likes."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[Hashable, int], _Lane] = {}

    def batch(self, sequences: Sequence[Hashable], positions: Sequence[int]) -> "DenseBatch":
        """The `PagedAttention` of one flat batch.

        Args:
            sequences: whose token each row is.
            positions: logical position of each row in its sequence.
        """
        return DenseBatch(self, tuple(sequences), tuple(positions))

    def lane(self, sequence: Hashable, layer: int) -> _Lane:
        """What a sequence holds in a layer; empty at first."""
        return self._lanes.setdefault((sequence, layer), _Lane())


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
        rows = list(zip(self.sequences, self.positions, strict=True))
        for row, (sequence, position) in enumerate(rows):
            lane = self.store.lane(sequence, call.layer)
            lane.positions.append(position)
            lane.keys.append(key[row])
            lane.values.append(value[row])
        outputs = [
            _attend_row(call, query[row], self.store.lane(sequence, call.layer), position)
            for row, (sequence, position) in enumerate(rows)
        ]
        return torch.stack(outputs)


def _attend_row(call: AttentionCall, query: Tensor, lane: _Lane, position: int) -> Tensor:
    oldest = 0 if call.window is None else position - call.window + 1
    seen = [slot for slot, at in enumerate(lane.positions) if oldest <= at <= position]
    group = query.shape[0] // lane.keys[0].shape[0]
    keys = torch.stack([lane.keys[slot] for slot in seen], dim=1).float()
    values = torch.stack([lane.values[slot] for slot in seen], dim=1).float()
    keys = keys.repeat_interleave(group, dim=0)  # [num_heads, seen, head_dim]
    values = values.repeat_interleave(group, dim=0)

    products = torch.einsum("hd,hsd->hs", query.float(), keys) * call.scale
    if call.softcap is not None:
        products = call.softcap * torch.tanh(products / call.softcap)
    if call.sinks is not None:
        products = torch.cat([products, call.sinks.float().unsqueeze(-1)], dim=-1)
    weights = products.softmax(dim=-1)[:, : len(seen)]  # a sink takes weight and gives no value
    return torch.einsum("hs,hsd->hd", weights, values).to(query.dtype)
