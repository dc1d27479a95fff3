"""The seam between a step and whoever computes its attention over pages.

A step is a flat batch of rows: those that decode (one token each) first, then prefill chunks. The
new keys and values are in their slots already when a backend is asked. Slots are in the order they
were written, except that eviction may have permuted old ones; so inside a row, the query with slot
s sees slots 0 .. s, or with a window W (such lanes never permute) slots s - W + 1 .. s.
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
    """How many new tokens each row of the flat batch has.

    Attributes:
        tokens: [rows] new tokens.
        starts: [rows] where the row's tokens start.
        num_decode: rows at the front with one token.
    """

    tokens: NDArray[np.int32]
    starts: NDArray[np.int64]
    num_decode: int

    @classmethod
    def of(cls, tokens: NDArray[np.int32]) -> "StepShape":
        """Rows in the order of the flat batch; those with one token at the front decode."""
        many = np.flatnonzero(tokens != 1)
        num_decode = int(many[0]) if len(many) else len(tokens)
        return cls(tokens, np.cumsum(tokens, dtype=np.int64) - tokens, num_decode)


@dataclass(frozen=True, slots=True)
class LaneSlots:
    """How full the lanes of one layer are, the step's tokens included.

    Attributes:
        slots: [rows, lanes] live slots; lanes is 1 for layer pages, KV heads for one-head pages.
        window: slots a query looks back, itself included; None for all.
    """

    slots: NDArray[np.int32]
    window: int | None


@dataclass(frozen=True, slots=True)
class LayerPages:
    """Where the keys and values of one layer are.

    Attributes:
        key, value: typed views of all pages of the class; where they hold codes, of the codes.
        table: page numbers [all rows, all lanes, capacity].
        rows: [rows] row of the table for each row of the step.
        first_lane: where this layer's lanes start on the table's second axis.
        num_lanes: how many they are; KV heads are split over them in order.
        positions: logical positions of all slots of the class, those of the step written; None
            where slots are in the order of their positions.
        coded: what decodes the pages; None where they hold plain numbers.
        kept: tokens that are attended as they were made all the same; None where there are none.
        promoted: tokens that are attended in a finer codec; None where there are none.
    """

    key: Shaped[Tensor, "page head token _"]
    value: Shaped[Tensor, "page head token _"]
    table: Int[Tensor, "all_rows all_lanes capacity"]
    rows: Int[Tensor, " row"]
    first_lane: int
    num_lanes: int
    positions: Int[Tensor, "page token"] | None = None
    coded: CodedPages | None = None
    kept: FullPrecisionPages | None = None
    promoted: PromotedPages | None = None

    @property
    def page_tokens(self) -> int:
        """Slots in a page."""
        return self.key.shape[2]


@runtime_checkable  # for the shape checks in tests
class Moves(Protocol):
    """RoPE of a layer, for queries and keys that have not gone through it yet."""

    def move(
        self, still: Float[Tensor, "token head head_dim"], positions: Int[Tensor, " token"]
    ) -> Float[Tensor, "token head head_dim"]:
        """What queries or keys given as at position 0 are at other positions, float32."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionMath:
    """What a layer does with its products.

    Attributes:
        scale: factor on them.
        softcap: c in c * tanh(x / c), or None.
        sinks: logits that join the softmax and carry no value, [num_heads], or one such row for
            each entry of a batch; or None.
        rotary: where queries and keys are given and stored before RoPE, what turns them; else None.
    """

    scale: float
    softcap: float | None = None
    sinks: Shaped[Tensor, "*batch num_heads"] | None = None
    rotary: Moves | None = None


@dataclass(frozen=True, slots=True)
class NewSlots:
    """Where a layer's new tokens are written.

    Attributes:
        key, value: typed views of all pages of the class; where they hold codes, of the codes.
        pages, offsets: int64 [new tokens, lanes].
        coded: what encodes for the pages; None where they hold plain numbers.
    """

    key: Shaped[Tensor, "page head token _"]
    value: Shaped[Tensor, "page head token _"]
    pages: Int[Tensor, "new_token lane"]
    offsets: Int[Tensor, "new_token lane"]
    coded: CodedPages | None = None


@dataclass(frozen=True, slots=True)
class MovedSlots:
    """Slots that are copied onto others of the same page class.

    Attributes:
        planes: typed views of all pages of the class, [page, head, token, width] each.
        source, target: pages and offsets in them, int64 [moves] each. A slot can be both: all are
            read before any is written.
    """

    planes: tuple[Shaped[Tensor, "page _ token _"], ...]
    source: tuple[Int[Tensor, " move"], Int[Tensor, " move"]]
    target: tuple[Int[Tensor, " move"], Int[Tensor, " move"]]


class AttentionMeasure(IntEnum):
    """What is counted of the weights that queries give to a slot; the numbers are those of C."""

    SUM = 0
    SQUARES = 1
    LOW = 2


@dataclass(frozen=True, slots=True)
class AttentionStatistic:
    """One number for each slot of a layer, made from the weights it gets.

    Attributes:
        numbers: float32 view of all pages of the class.
        table: page numbers [all rows, all lanes, capacity], of these pages.
        first_lane: where this layer's lanes start on the table's second axis.
        count: what is counted.
        heads: how the query heads of a KV head are reduced: mean, max or sum.
    """

    numbers: Float[Tensor, "page head token 1"]
    table: Int[Tensor, "all_rows all_lanes capacity"]
    first_lane: int
    count: AttentionMeasure
    heads: str


@dataclass(frozen=True, slots=True)
class StatisticRows:
    """Which rows of a step take part in a tally.

    Attributes:
        step_rows: int64 [rows] their numbers in the step.
        table_rows: int64 [rows] their rows in the tables.
        slots: int32 [rows, lanes of the layer] live slots, the step's tokens included.
        fresh: int32 [rows] so many of them, the last ones, are new: nothing was counted for them.
    """

    step_rows: Int[Tensor, " row"]
    table_rows: Int[Tensor, " row"]
    slots: Int[Tensor, "row lane"]
    fresh: Int[Tensor, " row"]


@runtime_checkable
class AttentionBackend(Protocol):
    """Computes attention over pages. Holds no state of any sequence."""

    @property
    def name(self) -> str:
        """The registered name."""
        ...

    @property
    def peak_scratch_bytes(self) -> int:
        """Most bytes of gathered keys and values held at once so far."""
        ...

    def plan(self, step: StepShape, lanes: LaneSlots, page_tokens: int, slot_bytes: int) -> object:
        """What can be made once for all layers whose lanes are equally full."""
        ...

    def write(
        self,
        slots: NewSlots,
        key: Float[Tensor, "num_tokens num_kv_heads head_dim"],
        value: Float[Tensor, "num_tokens num_kv_heads head_dim"],
    ) -> None:
        """Put the keys and values of the flat batch into their slots."""
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
        """Attend for all rows of the step.

        Args:
            plan: from `plan`, for these lanes.
            pages: the layer's pages, new tokens written.
            math: scale and extras.
            query: the flat batch, after RoPE.
            fresh: keys and values of the flat batch, [num_tokens, num_kv_heads, head_dim], as they
                were before they were written; where pages hold codes, the codes are what counts.
            column_sums: float32, contiguous, at least as wide as the fullest lane; gets each slot's
                weights summed over the row's queries of this step, for each query head. Zeros where
                a row has several tokens; of rows with one token the live slots are written over.
                The output is the same with and without.

        Returns:
            Like query.
        """
        ...

    def move(self, moves: MovedSlots) -> None:
        """Copy slots onto others; no two have the same target."""
        ...

    def tally(
        self,
        tally: AttentionStatistic,
        rows: StatisticRows,
        column_sums: Float[Tensor, "step_row num_heads slot"],
    ) -> None:
        """Add what slots of a layer got in this step to their numbers.

        Args:
            tally: where the numbers are, and what is counted.
            rows: with one token each, unless sums are counted and heads are not reduced by `max`:
                then the sum over queries is all that is needed.
            column_sums: of `attend`, for this layer.
        """
        ...
