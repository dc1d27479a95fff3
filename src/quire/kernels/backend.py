"""Interface between a step and the backend that computes its attention over pages.

A step is a flat batch of rows: decode rows (one token each) first, then prefill chunks. The new
keys and values are written to their slots before a backend attends. Slots are in the order they
were written, except that eviction may have permuted old ones. So inside a row, the query with slot
s attends to slots 0 .. s. With a window W it attends to slots s - W + 1 .. s, which eviction never
permutes.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int, Shaped
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.coded import CodedPages
from quire.kernels.token_precision import FullPrecisionPages, PromotedPages


@dataclass(frozen=True, slots=True)
class StepShape:
    """Number of new tokens of each row of the flat batch.

    Attributes:
        tokens: [rows] new tokens.
        starts: [rows] index of the row's first token in the flat batch.
        num_decode: number of leading rows with one token.
    """

    tokens: NDArray[np.int32]
    starts: NDArray[np.int64]
    num_decode: int

    @classmethod
    def of(cls, tokens: NDArray[np.int32]) -> "StepShape":
        """Build the shape from the new tokens of each row; leading rows with one token decode."""
        many = np.flatnonzero(tokens != 1)
        num_decode = int(many[0]) if len(many) else len(tokens)
        return cls(tokens, np.cumsum(tokens, dtype=np.int64) - tokens, num_decode)


@dataclass(frozen=True, slots=True)
class LaneSlots:
    """Live slots of the lanes of one layer, including the step's tokens.

    Attributes:
        slots: [rows, lanes] live slots; lanes is 1 for layer pages, KV heads for one-head pages.
        window: number of slots a query attends to, including its own; None for all.
    """

    slots: NDArray[np.int32]
    window: int | None


@dataclass(frozen=True, slots=True)
class LayerPages:
    """Location of the keys and values of one layer.

    Attributes:
        key, value: typed views of all pages of the class; for coded pages, views of the codes.
        table: page numbers [all rows, all lanes, capacity].
        rows: [rows] row of the table for each row of the step.
        first_lane: index of this layer's first lane on the table's second axis.
        num_lanes: number of lanes; KV heads are divided over them in order.
        positions: logical positions of all slots of the class, including the step's; None if slots
            are in the order of their positions.
        coded: decodes the pages; None for unquantized pages.
        full_precision: tokens that attention reads in full precision instead of their codes; None
            if there are none.
        promoted: tokens that attention reads in a finer codec; None if there are none.
    """

    key: Shaped[Tensor, "page head token _"]
    value: Shaped[Tensor, "page head token _"]
    table: Int[Tensor, "all_rows all_lanes capacity"]
    rows: Int[Tensor, " row"]
    first_lane: int
    num_lanes: int
    positions: Int[Tensor, "page token"] | None = None
    coded: CodedPages | None = None
    full_precision: FullPrecisionPages | None = None
    promoted: PromotedPages | None = None

    @property
    def page_tokens(self) -> int:
        """Slots in a page."""
        return self.key.shape[2]


@runtime_checkable  # for the shape checks in tests
class RotatesTo(Protocol):
    """RoPE of a layer, for queries and keys before RoPE."""

    def rotate_pre_rope(
        self, pre_rope: Float[Tensor, "token head head_dim"], positions: Int[Tensor, " token"]
    ) -> Float[Tensor, "token head head_dim"]:
        """Rotate queries or keys before RoPE to positions; return float32."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionMath:
    """Operations of a layer on its logits.

    Attributes:
        scale: factor on products of queries and keys.
        softcap: c in c * tanh(x / c), or None.
        sinks: logits that are added to the softmax without a value, [num_heads], or one such row
            per entry of a batch; or None.
        rotary: RoPE of the layer, if queries and stored keys are before RoPE; else None.
    """

    scale: float
    softcap: float | None = None
    sinks: Shaped[Tensor, "*batch num_heads"] | None = None
    rotary: RotatesTo | None = None


@dataclass(frozen=True, slots=True)
class NewSlots:
    """Slots to which a layer's new tokens are written.

    Attributes:
        key, value: typed views of all pages of the class; for coded pages, views of the codes.
        pages, offsets: int64 [new tokens, lanes].
        coded: encodes for the pages; None for unquantized pages.
    """

    key: Shaped[Tensor, "page head token _"]
    value: Shaped[Tensor, "page head token _"]
    pages: Int[Tensor, "new_token lane"]
    offsets: Int[Tensor, "new_token lane"]
    coded: CodedPages | None = None


@dataclass(frozen=True, slots=True)
class MovedSlots:
    """Copies between slots of one page class.

    Attributes:
        planes: typed views of all pages of the class, [page, head, token, width] each.
        source, target: pages and offsets in them, int64 [moves] each. A slot can be both: all
            sources are read before any target is written.
    """

    planes: tuple[Shaped[Tensor, "page _ token _"], ...]
    source: tuple[Int[Tensor, " move"], Int[Tensor, " move"]]
    target: tuple[Int[Tensor, " move"], Int[Tensor, " move"]]


class AttentionMeasure(IntEnum):
    """What is accumulated from a slot's attention weights; the numbers are those of the C code."""

    SUM = 0
    SQUARES = 1
    LOW = 2


@dataclass(frozen=True, slots=True)
class AttentionStatistic:
    """One number per slot of a layer, accumulated from its attention weights.

    Attributes:
        numbers: float32 view of all pages of the class.
        table: page numbers [all rows, all lanes, capacity] of these pages.
        first_lane: index of this layer's first lane on the table's second axis.
        count: what is accumulated.
        heads: reduction over the query heads of a KV head: mean, max or sum.
    """

    numbers: Float[Tensor, "page head token 1"]
    table: Int[Tensor, "all_rows all_lanes capacity"]
    first_lane: int
    count: AttentionMeasure
    heads: str


@dataclass(frozen=True, slots=True)
class StatisticRows:
    """Rows of a step whose attention is accumulated.

    Attributes:
        step_rows: int64 [rows] their indices in the step.
        table_rows: int64 [rows] their rows in the tables.
        slots: int32 [rows, lanes of the layer] live slots, including the step's tokens.
        fresh: int32 [rows] number of new slots, the last ones, whose statistics start at 0.
    """

    step_rows: Int[Tensor, " row"]
    table_rows: Int[Tensor, " row"]
    slots: Int[Tensor, "row lane"]
    fresh: Int[Tensor, " row"]


@runtime_checkable
class AttentionBackend(Protocol):
    """Computes attention over pages. Holds no state of sequences."""

    @property
    def name(self) -> str:
        """The registered name."""
        ...

    @property
    def peak_scratch_bytes(self) -> int:
        """Peak bytes of gathered keys and values since the start."""
        ...

    def plan(self, step: StepShape, lanes: LaneSlots, page_tokens: int, slot_bytes: int) -> object:
        """Prepare data that all layers with equal lane lengths share."""
        ...

    def write(
        self,
        slots: NewSlots,
        key: Float[Tensor, "num_tokens num_kv_heads head_dim"],
        value: Float[Tensor, "num_tokens num_kv_heads head_dim"],
    ) -> None:
        """Write the keys and values of the flat batch to their slots."""
        ...

    def attend(
        self,
        plan: object,
        pages: LayerPages,
        math: AttentionMath,
        query: Float[Tensor, "num_tokens num_heads head_dim"],
        fresh: tuple[Tensor, Tensor],
        *,
        column_sums: Float[Tensor, "row num_heads slot"] | None = None,
    ) -> Float[Tensor, "num_tokens num_heads head_dim"]:
        """Compute attention for all rows of the step.

        Args:
            plan: result of `plan` for these lanes.
            pages: the layer's pages, with new tokens written.
            math: scale, soft cap, sinks and RoPE.
            query: the flat batch, after RoPE.
            fresh: keys and values of the flat batch before they were written, [num_tokens,
                num_kv_heads, head_dim]. With coded pages, attention uses the codes, and these keys
                may be before RoPE.
            column_sums: float32, contiguous, at least as wide as the fullest lane; receives, per
                query head, each slot's weights summed over the row's queries of this step. Must be
                zero for rows with several tokens; for rows with one token the live slots are
                overwritten. It does not change the output.

        Returns:
            The attention output, in the shape of query.
        """
        ...

    def move(self, moves: MovedSlots) -> None:
        """Copy slots to other slots; all targets are distinct."""
        ...

    def tally(
        self,
        tally: AttentionStatistic,
        rows: StatisticRows,
        column_sums: Float[Tensor, "step_row num_heads slot"],
    ) -> None:
        """Add the attention of this step to the statistics of a layer's slots.

        Args:
            tally: the statistic and its pages.
            rows: rows with one token each; rows with several tokens are allowed if weights are
                summed and heads are not reduced by `max`, because then the sum over queries
                suffices.
            column_sums: column sums of this layer, from `attend`.
        """
        ...
