"""What a policy may look at: one sequence, whole layers of it, slots in the order of positions."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int, Shaped
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import PolicyError
from quire.layout.statistics import Statistic

Rows = TypeVar("Rows", Tensor, NDArray[Any])


@runtime_checkable
class SlotReader(Protocol):
    """Gathers what the slots of a view hold, when a rule asks for it."""

    def keys(self) -> Float[Tensor, "lane slot head_dim"]:
        """Keys as stored (after RoPE), float32, in the view's order; zeros where no slot is."""
        ...

    def values(self) -> Float[Tensor, "lane slot head_dim"]:
        """Values, likewise."""
        ...


@runtime_checkable
class Rotation(Protocol):
    """What RoPE does to a query, for rules that ask about queries to come."""

    def mean_rotation(
        self, layer: int, start: int, tokens: int
    ) -> Float[Tensor, "head_dim head_dim"]:
        """The matrix R for which R @ q is the mean of a query q rotated to many positions.

        float32, with the factor on cosines and sines where a model has one. The identity for a
        layer without RoPE.

        Args:
            layer: number of the layer in the model.
            start: first position.
            tokens: positions, one behind the other.
        """
        ...


@dataclass(frozen=True)
class KVView:
    """One sequence, the lanes of some whole layers. A lane is one KV head of one layer.

    Lanes are layer-major: those of a layer stand side by side, `heads_per_layer` of them. In every
    lane slots are in the order of their positions, holes closed; a lane with fewer slots than the
    longest has -1 behind its last one.

    Attributes:
        positions: logical position of each slot, ascending; -1 where a lane has no slot.
        next_position: logical position the next token will get: tokens the sequence has had.
        heads_per_layer: KV heads, and so lanes, of a layer.
        layers: the model's layers, in order.
        prompt_tokens: tokens of the request's prompt.
        statistics: by the name of the declared statistic; per slot [lane, slot] (0 where no slot
            is; with the query heads apart [lane * group, slot]), else [lane, record, number]. Only
            those that the policy or its budget declared.
        slots: reads keys and values.
        head_dim: numbers of a key.
        scale: factor on products of queries and keys.
        rotation: what RoPE does to queries; only for rules that ask (expected_attention).
        group: query heads that share the KV head of a lane.
    """

    positions: Int[Tensor, "lane slot"]
    next_position: int
    heads_per_layer: int = 1
    layers: tuple[int, ...] = ()
    prompt_tokens: int = 0
    statistics: Mapping[str, Shaped[Tensor, "..."]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    slots: SlotReader | None = None
    head_dim: int = 0
    scale: float = 1.0
    rotation: Rotation | None = None
    group: int = 1

    @property
    def lane_layers(self) -> Int[Tensor, " lane"]:
        """Number of each lane's layer in the model; counted from 0 where the view names none."""
        lanes = self.positions.shape[0]
        layers = self.layers or tuple(range(lanes // self.heads_per_layer))
        numbers = torch.tensor(layers, device=self.positions.device)
        return numbers.repeat_interleave(self.heads_per_layer)

    @cached_property
    def live(self) -> Bool[Tensor, "lane slot"]:
        """Slots that hold a token."""
        return self.positions >= 0

    @property
    def queries_seen(self) -> Int[Tensor, "lane slot"]:
        """Queries that have seen each slot, its own among them: at least 1."""
        return torch.where(self.live, self.next_position - self.positions, 1)

    @cached_property
    def num_slots(self) -> Int[Tensor, "lane 1"]:
        """Tokens of each lane."""
        return self.live.sum(dim=1, keepdim=True)

    @property
    def keys(self) -> Float[Tensor, "lane slot head_dim"]:
        """Keys as stored, after RoPE, float32."""
        return self._reader.keys()

    @property
    def values(self) -> Float[Tensor, "lane slot head_dim"]:
        """Values, float32."""
        return self._reader.values()

    def remembered(self, statistic: Statistic) -> Float[Tensor, "..."]:
        """What was written for a declared statistic.

        Raises:
            PolicyError: it was not declared, or the view was made without it.
        """
        if statistic.name not in self.statistics:
            raise PolicyError(f"this view was made without the statistic {statistic.name}")
        return self.statistics[statistic.name]

    @property
    def _reader(self) -> SlotReader:
        if self.slots is None:
            raise PolicyError("this view was made without keys and values")
        return self.slots

    def by_layer(self, numbers: Shaped[Tensor, "lane ..."]) -> Shaped[Tensor, "layer head ..."]:
        """[lane, ...] as [layer, KV head, ...], the same memory."""
        return numbers.view(-1, self.heads_per_layer, *numbers.shape[1:])

    def first_heads(self, numbers: Rows) -> Rows:
        """Those of each layer's first KV head: of all, where heads hold and ask the same.

        Args:
            numbers: a tensor or an array, [lane, ...].
        """
        of_layer: Rows = numbers[:: self.heads_per_layer]
        return of_layer

    def newest(self, tokens: int | Int[Tensor, "lane 1"]) -> Bool[Tensor, "lane slot"]:
        """The last `tokens` cached tokens of each lane, or of each its own number."""
        place = torch.arange(self.positions.shape[1], device=self.positions.device)
        return self.live & (place >= self.num_slots - tokens)

    def oldest_positions(self, sinks: int) -> Bool[Tensor, "lane slot"]:
        """Tokens at logical positions below `sinks`."""
        return self.live & (self.positions < sinks)
