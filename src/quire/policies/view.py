"""The view a policy reads: sequences, whole layers, slots in the order of positions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import PolicyError
from quire.kernels.backend import Alibi, PageScores
from quire.kernels.device_copies import to_device
from quire.layout.statistics import Statistic

Rows = TypeVar("Rows", Tensor, NDArray[Any])


@runtime_checkable
class SlotReader(Protocol):
    """Gathers the keys and values of a view's slots on demand."""

    def keys(self) -> Float[Tensor, "lane slot head_dim"]:
        """Keys as stored (after RoPE), float32, in the view's order; zeros for empty slots."""
        ...

    def values(self) -> Float[Tensor, "lane slot value_dim"]:
        """Values, float32, in the view's order; zeros for empty slots."""
        ...


@runtime_checkable
class PagedSlotReader(SlotReader, Protocol):
    """A reader of slots in pages, which a backend may score without gathering them."""

    def in_pages(self, plane: str) -> PageScores | None:
        """Scores from the pages of keys or values; None if the backend does not read them.

        Args:
            plane: KEY or VALUE of `quire.layout.pages`.
        """
        ...


@runtime_checkable
class Rotation(Protocol):
    """RoPE applied to queries, for rules that estimate future queries."""

    def mean_rotation(
        self, layer: int, positions: Sequence[int]
    ) -> Float[Tensor, "head_dim head_dim"]:
        """Return the matrix R for which R @ q is the mean of q rotated to some positions.

        float32, including the model's factor on cosines and sines if it has one. The identity for a
        layer without RoPE.

        Args:
            layer: number of the layer in the model.
            positions: one or more.
        """
        ...


@runtime_checkable
class OutputProjection(Protocol):
    """Output projections of attention, for rules that measure values behind them."""

    def lengths(
        self, layers: Sequence[int], values: Float[Tensor, "lane slot value_dim"]
    ) -> Float[Tensor, "lane slot"]:
        """Return the L1 norm of each projected value, mean over the query heads of its lane.

        Each query head projects a value by its own columns of the layer's output projection.

        Args:
            layers: layers of the model, in order, once for each sequence.
            values: float32, of as many lanes in each of the layers: one for each KV head, or one
                for each query head.
        """
        ...


@dataclass(frozen=True)
class KVView:
    """The lanes of whole layers of one or several sequences. A lane is a KV head of a layer.

    Sequences follow one another. Their lanes are layer-major: the `heads_per_layer` lanes of a
    layer are consecutive. In every lane, slots are in the order of their positions without gaps; a
    lane with fewer slots than the longest is padded with -1.

    Attributes:
        positions: logical position of each slot, ascending; -1 for an empty slot.
        next_position: logical position of the next token: the number of tokens processed so far;
            [lane, 1] if it differs between sequences.
        heads_per_layer: KV heads, and therefore lanes, of a layer.
        layers: the model's layers, in order, once for each sequence.
        prompt_tokens: tokens of the request's prompt; [lane, 1] if it differs between sequences.
        statistics: declared statistics by name; per slot [lane, slot] (0 for an empty slot; with
            separate query heads [lane * group, slot]), else [lane, record, number]. Only those that
            the policy or its budget declared.
        slots: reads keys and values.
        head_dim: elements of a key.
        layer_scales: factor on products of queries and keys, of each layer; empty: 1.
        alibi: biases of logits by the positions of keys, in all layers; None: no biases.
        rotation: RoPE of queries; only for rules that need it (expected_attention).
        projection: output projections of attention; only for rules that declare it
            (`EvictionPolicy.reads_projection`).
        group: query heads that share the KV head of a lane, those of all layers that read it.
        readers: layers that read the lanes of each layer, whose queries all count; [lane, 1] if it
            differs between layers.
        breaches: collects conditions that break the contract of a rule, on the device; None if a
            breach raises an error at once.
    """

    positions: Int[Tensor, "lane slot"]
    next_position: int | Int[Tensor, "lane 1"]
    heads_per_layer: int = 1
    layers: tuple[int, ...] = ()
    prompt_tokens: int | Int[Tensor, "lane 1"] = 0
    statistics: Mapping[str, Shaped[Tensor, "..."]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    slots: SlotReader | None = None
    head_dim: int = 0
    layer_scales: tuple[float, ...] = ()
    alibi: Alibi | None = None
    rotation: Rotation | None = None
    projection: OutputProjection | None = None
    group: int = 1
    readers: int | Int[Tensor, "lane 1"] = 1
    breaches: list[Bool[Tensor, ""]] | None = None

    def breaks_contract(self, condition: Bool[Tensor, "..."]) -> bool:
        """Whether a condition holds anywhere. On a device it is noted, and read after the step."""
        if self.breaches is None:
            return bool(condition.any())
        self.breaches.append(condition.any())
        return False

    @property
    def lane_layers(self) -> Int[Tensor, " lane"]:
        """Number of each lane's layer in the model; counted from 0 if the view names no layers."""
        lanes = self.positions.shape[0]
        layers = self.layers or tuple(range(lanes // self.heads_per_layer))
        numbers = np.repeat(np.array(layers, dtype=np.int64), self.heads_per_layer)
        return to_device(numbers, self.positions.device)

    def mean_rotations(
        self, positions: Callable[[int], Sequence[int]]
    ) -> Float[Tensor, "lane head_dim head_dim"]:
        """Return the mean rotation (`Rotation.mean_rotation`) of each lane's layer.

        Args:
            positions: returns those of the queries from the position of the next token.

        Raises:
            PolicyError: the view was built without rotations.
        """
        if self.rotation is None:
            raise PolicyError("this view was built without rotations, which estimate queries")
        layers, first = self.first_heads(self.lane_layers).tolist(), self.next_position
        each = self.first_heads(first)[:, 0].tolist() if isinstance(first, Tensor) else [first]
        starts = each * (len(layers) // len(each))
        found = [
            self.rotation.mean_rotation(layer, positions(start))
            for layer, start in zip(layers, starts, strict=True)
        ]
        return torch.stack(found).repeat_interleave(self.heads_per_layer, dim=0)

    @property
    def lane_scales(self) -> Float[Tensor, "lane 1 1"]:
        """Factor on products of queries and keys, of each lane's layer."""
        scales = np.array(self.layer_scales or (1.0,), dtype=np.float32)
        of_lanes = np.repeat(scales, self.shape[0] // len(scales))
        return to_device(of_lanes[:, None, None], self.positions.device)

    def biases(self) -> Float[Tensor, "lane group 1 slot"] | None:
        """Biases of the logits of each lane's query heads, for queries at any position."""
        if self.alibi is None:
            return None
        lane = torch.arange(self.shape[0], device=self.positions.device) % self.heads_per_layer
        alibi = self.alibi.of_lanes(self.heads_per_layer, lane)
        return alibi.bias(self.positions, self.next_position)[:, :, None]

    @property
    def shape(self) -> tuple[int, ...]:
        """Lanes and slots."""
        return tuple(self.positions.shape)

    @cached_property
    def live(self) -> Bool[Tensor, "lane slot"]:
        """Slots that hold a token."""
        return self.positions >= 0

    @property
    def queries_seen(self) -> Int[Tensor, "lane slot"]:
        """Number of queries that have seen each slot, including the token's own: at least 1.

        Each layer that reads the lanes has a query for each token.
        """
        return torch.where(self.live, (self.next_position - self.positions) * self.readers, 1)

    @cached_property
    def num_slots(self) -> Int[Tensor, "lane 1"]:
        """Number of tokens in each lane."""
        return self.live.sum(dim=1, keepdim=True)

    @property
    def keys(self) -> Float[Tensor, "lane slot head_dim"]:
        """Keys as stored, after RoPE, float32."""
        return self._reader.keys()

    @property
    def values(self) -> Float[Tensor, "lane slot value_dim"]:
        """Values, float32."""
        return self._reader.values()

    def in_pages(self, plane: str) -> PageScores | None:
        """Scores that a backend computes from the pages; None: compute them from `keys`, `values`.

        Both forms give the same scores up to rounding.

        Args:
            plane: KEY or VALUE of `quire.layout.pages`.
        """
        slots = self.slots
        return slots.in_pages(plane) if isinstance(slots, PagedSlotReader) else None

    def projected_lengths(self) -> Float[Tensor, "lane slot"]:
        """Return the L1 norm of each value behind the output projection; see `OutputProjection`.

        Raises:
            PolicyError: the view was built without output projections.
        """
        if self.projection is None:
            raise PolicyError(
                "this view was built without output projections; use value_norm, which reads none"
            )
        layers = self.layers or tuple(range(self.shape[0] // self.heads_per_layer))
        return self.projection.lengths(layers, self.values)

    def statistic(self, statistic: Statistic) -> Float[Tensor, "..."]:
        """Return the stored values of a declared statistic.

        Raises:
            PolicyError: the statistic was not declared, or the view was built without it.
        """
        if statistic.name not in self.statistics:
            raise PolicyError(f"this view was built without the statistic {statistic.name}")
        return self.statistics[statistic.name]

    @property
    def _reader(self) -> SlotReader:
        if self.slots is None:
            raise PolicyError("this view was built without keys and values")
        return self.slots

    def by_layer(self, numbers: Shaped[Tensor, "lane ..."]) -> Shaped[Tensor, "layer head ..."]:
        """Reshape [lane, ...] to [layer, KV head, ...] without copying."""
        return numbers.view(-1, self.heads_per_layer, *numbers.shape[1:])

    def first_heads(self, numbers: Rows) -> Rows:
        """Return the rows of each layer's first KV head, for data that all heads share.

        Args:
            numbers: a tensor or an array, [lane, ...].
        """
        of_layer: Rows = numbers[:: self.heads_per_layer]
        return of_layer

    def newest(self, tokens: int | Int[Tensor, "lane 1"]) -> Bool[Tensor, "lane slot"]:
        """Return the last `tokens` cached tokens of each lane; one number, or one per lane."""
        index = torch.arange(self.positions.shape[1], device=self.positions.device)
        return self.live & (index >= self.num_slots - tokens)

    def oldest_positions(self, sinks: int) -> Bool[Tensor, "lane slot"]:
        """Return the tokens at logical positions below `sinks`."""
        if sinks <= 0:
            return torch.zeros_like(self.live)
        return self.live & (self.positions < sinks)
