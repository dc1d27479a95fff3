"""Interface between a step and the backend that computes its attention over pages.

A step is a flat batch of rows: decode rows (one token each) first, then prefill chunks. The new
keys and values are written to their slots before a backend attends. Slots are in the order they
were written, except that eviction may have permuted old ones. So inside a row, the query with slot
s attends to slots 0 .. s. With a window W it attends to slots s - W + 1 .. s, which eviction never
permutes.

Some backends can do more:

`ChainBackend`   prepares calls that are part of a chain. The calls of a decode step are short: all
                 layers take one call if no Python is between them.
`StaticPlans`    makes plans of decode steps whose tensors keep their addresses. A CUDA graph
                 repeats kernels with the same arguments: it reads live slots and page numbers from
                 memory that the engine overwrites before each replay.
`ScoringBackend` scores cached tokens for eviction, from their keys or values in the pages.
`RopeWriter`     computes RoPE in one kernel with the write of new keys and values.
`LaneSelector`   selects the slots that an eviction retains, and moves slots, each in one call for
                 all lanes of several sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.coded import CodedPages, CodedPlanes
from quire.kernels.token_precision import FullPrecisionPages, PromotedPages
from quire.layout.statistics import MEAN


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
class SparseLanes:
    """Pages that decode rows read; see `quire.kernels.sparse`.

    Attributes:
        pages: [rows, lanes] pages that each KV head of a lane reads; 0: all.
        sinks, recent: [rows] first and newest pages that are read in any case; the last page of a
            lane is always read.
    """

    pages: NDArray[np.int32]
    sinks: NDArray[np.int32]
    recent: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LaneSlots:
    """Live slots of the lanes of one layer, including the step's tokens.

    Attributes:
        slots: [rows, lanes] live slots; lanes is 1 for layer pages, KV heads for one-head pages.
        window: number of slots a query attends to, including its own; None for all.
        sparse: pages that rows read; None: all.
    """

    slots: NDArray[np.int32]
    window: int | None
    sparse: SparseLanes | None = None

    def slots_read(self, page_tokens: int) -> NDArray[np.int32]:
        """Return the slots [rows, lanes] of the pages that are read."""
        if self.sparse is None:
            return self.slots
        unread = -(-self.slots // page_tokens) - self.sparse.pages
        return self.slots - np.where(self.sparse.pages > 0, unread * page_tokens, np.int32(0))


def token_rows(step: StepShape, lanes: LaneSlots) -> tuple[StepShape, LaneSlots, NDArray[np.int64]]:
    """Make every token a row with one new token, which sees the slots up to its own.

    Returns:
        The rows, their slots, and the index of the row to which each token belongs in `step`.
    """
    token_row = np.repeat(np.arange(len(step.tokens)), step.tokens)
    behind = (step.starts + step.tokens)[token_row] - np.arange(len(token_row)) - 1
    slots = (lanes.slots[token_row] - behind[:, None]).astype(np.int32)
    ones = np.ones(len(token_row), dtype=np.int32)
    return StepShape.of(ones), LaneSlots(slots, lanes.window), token_row


@runtime_checkable  # for the shape checks in tests
class OffloadedPages(Protocol):
    """The pages of a layer in a step some of whose sparse rows have pages in offload memory."""

    def bounds(
        self, pages: "LayerPages", row: int, lane: int, columns: int
    ) -> Float[Tensor, "column head 1 both_dims"]:
        """Return the bounds of the first pages of a lane of a row."""
        ...

    def addresses(self, pages: "LayerPages", columns: int) -> NDArray[np.int64]:
        """Return where the bounds of the first pages of all rows are, [row, lane, column]."""
        ...

    def fetch(
        self, rows: NDArray[np.int64], columns: NDArray[np.int64], counts: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        """Bring pages to the device until the layer's attention has run.

        Args:
            rows: rows of the step.
            columns: [row, KV head, number] columns of the page table that they read.
            counts: [row, lane] number of such columns; 0: none.

        Returns:
            The page of each column, in which this KV head is valid.
        """
        ...


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
        index: view of the index keys; None if the layer has no index of its own.
        bounds: view of the bounds of the keys of each page; None if pages have none.
        offloaded: finds pages that sparse rows read; None: all are in the page table.
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
    index: Float[Tensor, "page 1 token index_dim"] | None = None
    bounds: Float[Tensor, "page head 1 both_dims"] | None = None
    offloaded: OffloadedPages | None = None

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


@dataclass(frozen=True, slots=True, eq=False)
class Alibi:
    """ALiBi: a bias on each query head's logits, linear in the distance of query and key.

    The bias of a key at position p is slope * (p - q) for a query at q. A number that all logits of
    a softmax share does not change it, so one bias serves the queries of all positions.
    Source: Press et al. 2022, arXiv 2108.12409.

    Attributes:
        slopes: float32, of each query head, or a row of them per entry of a batch.
        factor: factor on the biases.
        rounded: whether the bias, before `factor`, is the position times the slope in bfloat16, as
            Falcon computes it. It then depends on the position itself.
    """

    slopes: Float[Tensor, "*batch num_heads"]
    factor: float = 1.0
    rounded: bool = False

    def of_lanes(self, num_lanes: int, lanes: Int[Tensor, " entry"]) -> "Alibi":
        """Return the biases of the query heads of one lane per entry."""
        return replace(self, slopes=self.slopes.to(lanes.device).view(num_lanes, -1)[lanes])

    def bias(
        self, positions: Int[Tensor, "*batch slot"], newest: int | Int[Tensor, "*batch 1"]
    ) -> Float[Tensor, "*batch num_heads slot"]:
        """Return the biases of keys, float32.

        Args:
            positions: logical positions of the keys.
            newest: a position near the queries, so that the biases of near keys are small.
        """
        slopes = self.slopes.to(positions.device)[..., None]
        if self.rounded:
            rounded = slopes.bfloat16() * positions[..., None, :].bfloat16()
            return rounded.float() * self.factor
        return slopes * (positions - newest)[..., None, :].float() * self.factor


@runtime_checkable  # for the shape checks in tests
class LatentProjections(Protocol):
    """The projections of a layer's latents to keys and values of its heads (MLA).

    Scores with expanded keys equal those of folded queries with joined keys: the query's part for
    the projected keys is multiplied by their projection instead.
    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.2.
    """

    @property
    def value_dim(self) -> int:
        """Elements of an expanded value, and of the output of a query head."""
        ...

    def stored(self, key: Float[Tensor, "*batch key_dim"]) -> Float[Tensor, "*batch rotated_dim"]:
        """Return the part of a module's keys that pages store."""
        ...

    def fold(
        self, query: Float[Tensor, "token num_heads head_dim"]
    ) -> Float[Tensor, "token num_heads joined_dim"]:
        """Return queries that are compared with [latent, rotated part]."""
        ...

    def unfold(
        self, out: Float[Tensor, "token num_heads latent_dim"]
    ) -> Float[Tensor, "token num_heads value_dim"]:
        """Project the outputs of attention over latents to those over values."""
        ...

    def expand(
        self,
        key: Float[Tensor, "*batch 1 slot rotated_dim"],
        value: Float[Tensor, "*batch 1 slot latent_dim"],
    ) -> tuple[
        Float[Tensor, "*batch num_heads slot head_dim"],
        Float[Tensor, "*batch num_heads slot value_dim"],
    ]:
        """Return the keys and values of all heads."""
        ...

    def prefers_expanding(self, tokens: int, slots: int) -> bool:
        """Whether attention of a row's new tokens to its slots is cheaper with expanded heads."""
        ...


@dataclass(slots=True, eq=False)
class TokenIndex:
    """Index queries and keys of a flat batch, and the selection by them.

    The first layer that attends with it selects by its own index keys; the layers after it that
    have no index use the same selection.

    Attributes:
        query: index queries, after RoPE; can have padding tokens after those of the batch.
        weights: float32 weights of the index heads.
        key: index keys, after RoPE.
        scale: factor on the products.
        topk: tokens to which a query attends.
        rotated_from: element of a query or key from which on RoPE rotates.
        rows: rows of the step with more slots than `topk`; None: not selected yet.
        positions: of the selected tokens, for each token in `rows`; else -1.
    """

    query: Float[Tensor, "num_tokens index_heads index_dim"]
    weights: Float[Tensor, "num_tokens index_heads"]
    key: Float[Tensor, "num_tokens index_dim"]
    scale: float
    topk: int
    rotated_from: int = 0
    rows: NDArray[np.int64] | None = None
    positions: Int[Tensor, "num_tokens topk"] | None = None


@dataclass(frozen=True, slots=True)
class AttentionMath:
    """Operations of a layer on its logits.

    Attributes:
        scale: factor on products of queries and keys.
        softcap: c in c * tanh(x / c), or None.
        sinks: logits that are added to the softmax without a value, [num_heads], or one such row
            per entry of a batch; or None.
        rotary: RoPE of the layer, if queries and stored keys are before RoPE; else None.
        alibi: biases of the logits by the positions of keys, or None.
        bias: the biases of the keys of one call, [batch or 1, num_heads, slots]; or None.
        latent: projections of a layer whose pages hold latents; None: keys and values of heads.
        joined: queries are folded, and attend to latents: the key of a slot is its value followed
            by its stored key. Otherwise queries attend to keys and values, expanded by `latent`.
        index: selects the slots to which queries attend; None: they attend to all.
        selected: the slots to which each query of one call attends at most; None: all.
    """

    scale: float
    softcap: float | None = None
    sinks: Shaped[Tensor, "*batch num_heads"] | None = None
    rotary: RotatesTo | None = None
    alibi: Alibi | None = None
    bias: Float[Tensor, "batch num_heads slot"] | None = None
    latent: LatentProjections | None = None
    joined: bool = False
    index: TokenIndex | None = None
    selected: Bool[Tensor, "*rows num_tokens slot"] | None = None

    def heads(
        self,
        key: Float[Tensor, "*batch head slot _"],
        value: Float[Tensor, "*batch head slot _"],
    ) -> tuple[Float[Tensor, "*batch _ slot _"], Float[Tensor, "*batch _ slot _"]]:
        """Return keys and values to which queries attend, from those that pages hold."""
        if self.joined:
            return torch.cat([value, key], dim=-1), value
        return (key, value) if self.latent is None else self.latent.expand(key, value)

    def output_dim(self, pages: "LayerPages") -> int:
        """Return the elements of the output of a query head."""
        return dims_of(pages)[1] if self.latent is None or self.joined else self.latent.value_dim

    def of_lanes(self, num_lanes: int, lanes: Int[Tensor, " entry"]) -> "AttentionMath":
        """Return the operations on the query heads of one lane per entry."""
        if self.sinks is None and self.alibi is None:
            return self
        return replace(
            self,
            sinks=None if self.sinks is None else self.sinks.view(num_lanes, -1)[lanes],
            alibi=None if self.alibi is None else self.alibi.of_lanes(num_lanes, lanes),
        )

    def at(
        self,
        positions: Int[Tensor, "*batch slot"],
        newest: int | Int[Tensor, "*batch 1"],
    ) -> "AttentionMath":
        """Return the operations with the biases of keys at these positions; see `Alibi.bias`."""
        if self.alibi is None:
            return self
        bias = self.alibi.bias(positions, newest)
        return replace(self, alibi=None, bias=bias if bias.dim() == 3 else bias[None])

    def selected_by(self, tokens: slice) -> Bool[Tensor, "token slot"] | None:
        """Return the slots to which some tokens attend at most; None: all."""
        return None if self.selected is None else self.selected[tokens]

    def with_columns(self, index: Int[Tensor, " column"]) -> "AttentionMath":
        """Return the operations with the biases of these keys once more, after the others."""
        if self.bias is None:
            return self
        return replace(self, bias=torch.cat([self.bias, self.bias[..., index]], dim=-1))


@dataclass(frozen=True, slots=True)
class NewSlots:
    """Slots to which a layer's new tokens are written.

    Attributes:
        key, value: typed views of all pages of the class; for coded pages, views of the codes.
        pages, offsets: int64 [new tokens, lanes].
        coded: encodes for the pages; None for unquantized pages.
        index: view of the index keys; None if the layer has no index of its own.
        bounds: view of the bounds of the keys of each page; None if pages have none.
    """

    key: Shaped[Tensor, "page head token _"]
    value: Shaped[Tensor, "page head token _"]
    pages: Int[Tensor, "new_token lane"]
    offsets: Int[Tensor, "new_token lane"]
    coded: CodedPages | None = None
    index: Float[Tensor, "page 1 token index_dim"] | None = None
    bounds: Float[Tensor, "page head 1 both_dims"] | None = None

    def write_index(self, keys: Float[Tensor, "num_tokens index_dim"]) -> None:
        """Write the index keys of the new tokens to their slots."""
        assert self.index is not None, "of a layer with an index"
        self.index[self.pages, :, self.offsets] = keys[: len(self.pages), None, None]


def dims_of(pages: LayerPages | NewSlots) -> tuple[int, int]:
    """Return the elements of a key, and those of a value and of the output of a query head."""
    if pages.coded is None:
        return pages.key.shape[3], pages.value.shape[3]
    return pages.coded.key.codec.head_dim, pages.coded.value.codec.head_dim


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
        max_slots: the most live slots of a lane, each of which has one; None: on the device only.
        number: int32 [rows of the step] index in these rows, or -1; None: not known. A chain needs
            it.
    """

    step_rows: Int[Tensor, " row"]
    table_rows: Int[Tensor, " row"]
    slots: Int[Tensor, "row lane"]
    fresh: Int[Tensor, " row"]
    max_slots: int | None = None
    number: Int[Tensor, " step_row"] | None = None


@dataclass(frozen=True, slots=True)
class StoredQueries:
    """Queries of a step that are stored in records of a layer's lanes, each followed by a mark.

    Attributes:
        numbers: float32 view of all pages of the class.
        pages: int64 [records, lanes of the layer].
        offsets: int64 [records] in these pages.
        tokens: int64 [records] indices of the queries in the flat batch.
        marks: float32 [records] last numbers of the records.
        first: index of the first number of the queries; records of lanes that several layers read
            hold the queries of all these layers one after the other.
    """

    numbers: Float[Tensor, "page head place width"]
    pages: Int[Tensor, "record lane"]
    offsets: Int[Tensor, " record"]
    tokens: Int[Tensor, " record"]
    marks: Float[Tensor, " record"]
    first: int = 0


@dataclass(frozen=True, slots=True)
class LayerRecords:
    """What a chain records of a layer's attention.

    Attributes:
        tallies: statistics of slots and the rows that use them.
        queries: stored queries.
    """

    tallies: tuple[tuple[AttentionStatistic, StatisticRows], ...] = ()
    queries: tuple[StoredQueries, ...] = ()


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
        value: Float[Tensor, "num_tokens num_kv_heads value_dim"],
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
    ) -> Float[Tensor, "num_tokens num_heads value_dim"]:
        """Compute attention for all rows of the step.

        Args:
            plan: result of `plan` for these lanes.
            pages: the layer's pages, with new tokens written.
            math: scale, soft cap, sinks and RoPE.
            query: the flat batch, after RoPE.
            fresh: keys and values of the flat batch before they were written, [num_tokens,
                num_kv_heads, head_dim or value_dim]. With coded pages, attention uses the codes,
                and these keys may be before RoPE.
            column_sums: float32, contiguous, at least as wide as the fullest lane; receives, per
                query head, each slot's weights summed over the row's queries of this step. Must be
                zero for rows with several tokens; for rows with one token the live slots are
                overwritten. It does not change the output.

        Returns:
            The attention output, in the type of query.
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


@dataclass(frozen=True, slots=True, eq=False)
class HeadBuffers:
    """Contiguous memory of a batch that its layers reuse, each [tokens, heads, elements].

    Attributes:
        query, key, value: input of attention.
        out: output of attention.
    """

    query: Float[Tensor, "num_tokens num_heads head_dim"]
    key: Float[Tensor, "num_tokens num_kv_heads head_dim"]
    value: Float[Tensor, "num_tokens num_kv_heads value_dim"]
    out: Float[Tensor, "num_tokens num_heads value_dim"]

    def first(self, num_tokens: int) -> "HeadBuffers":
        """Return the memory of the first tokens."""
        buffers = (self.query, self.key, self.value, self.out)
        return HeadBuffers(*(buffer[:num_tokens] for buffer in buffers))


class ChainLayer(NamedTuple):
    """A layer of a chain.

    Attributes:
        pages, slots, math: its pages, slots of new tokens, and operations.
        records: what is recorded of its attention.
    """

    pages: LayerPages
    slots: NewSlots
    math: AttentionMath
    records: LayerRecords = LayerRecords()


@runtime_checkable
class SparseBackend(Protocol):
    """A backend that selects and reads pages itself; see `LaneSlots.sparse`."""

    @property
    def plans_sparse(self) -> bool:
        """Whether its plans take lanes of which rows read only some pages."""
        ...


@runtime_checkable
class ChainBackend(Protocol):
    """A backend whose calls can be part of a chain of C calls that runs all layers."""

    def chain(
        self,
        plan: object,
        layers: Sequence[ChainLayer],
        heads: HeadBuffers,
    ) -> Sequence[object] | None:
        """Prepare writing, attention and statistics of the layers of a plan.

        Args:
            plan: result of `AttentionBackend.plan`.
            layers: they differ in their lanes and in numbers only. The tensors of their records
                are read at each call, and change with the step.
            heads: input and output of every layer.

        Returns:
            The calls of each layer; None if the backend cannot compute the step in this way.
        """
        ...

    def advance(self, plan: object, lanes: LaneSlots) -> bool:
        """Change the live slots of a plan of decode rows in place, if its calls stay right.

        Args:
            plan: result of `AttentionBackend.plan`; its arrays were given to no other plan.
            lanes: live slots, including the step's tokens.

        Returns:
            Whether the plan has these slots now; else it is unchanged, and a new plan is needed.
        """
        ...


@dataclass(frozen=True, slots=True)
class LaneVectors:
    """Keys or values of the tokens of some lanes, in the order of their positions.

    Attributes:
        plane: typed view of all pages of the class; for coded pages, a view of the codes.
        coded: decodes the pages; None for unquantized pages.
        pages: int32 page numbers; entries past a lane's last slot are not read.
        order: int64 slots in the order of positions, and after them the other slots.
        positions: int64, ascending; -1 past a lane's last slot.
        held: int64 number of slots.
    """

    plane: Shaped[Tensor, "page head token _"]
    coded: CodedPlanes | None
    pages: Int[Tensor, "lane column"]
    order: Int[Tensor, "lane slot"]
    positions: Int[Tensor, "lane slot"]
    held: Int[Tensor, " lane"]

    @property
    def head_dim(self) -> int:
        """Elements of a vector."""
        return self.plane.shape[3] if self.coded is None else self.coded.codec.head_dim


@dataclass(frozen=True, slots=True)
class WindowFinish:
    """How the sums of a window become scores: without the newest slots, pooled, one per KV head.

    Attributes:
        newest: slots at the end of each lane whose sums count as 0.
        kernel: neighbouring slots that are pooled, odd; past the ends of a lane are zeros.
        pooling: avg or max.
        heads: reduction over the query heads of a KV head, after pooling: mean, max or sum.
    """

    newest: int = 0
    kernel: int = 1
    pooling: str = "avg"
    heads: str = MEAN


@runtime_checkable
class ScoringBackend(Protocol):
    """A backend that scores cached tokens from the pages, without copies of their vectors.

    Scores are float32, of one KV head after the other in each lane, and 0 past a lane's last slot.
    The score of a token does not depend on its slot, nor on other lanes.
    """

    def can_score(self, plane: Tensor, coded: CodedPlanes | None) -> bool:
        """Whether the backend reads these keys or values; see `LaneVectors`."""
        ...

    def window_sums(
        self,
        lanes: LaneVectors,
        records: Float[Tensor, "kv_head query width"],
        scales: Float[Tensor, " kv_head"],
        finish: WindowFinish | None = None,
    ) -> Float[Tensor, "kv_head *group slot"]:
        """Sum, per query head, the weights of recorded queries over the cached keys.

        The weights of a query are the softmax of its products with the keys that are not newer.
        Finished sums are one number of each KV head and slot; NaN in a KV head without a query.

        Args:
            lanes: keys.
            records: the query heads of a KV head, one after the other, and the number of the
                position after the query's; 0: no query.
            scales: factors on the products.
            finish: what is done with the sums; None: they are returned.
        """
        ...

    def mean_cosines(self, lanes: LaneVectors) -> Float[Tensor, "kv_head slot"]:
        """Return the cosine of each vector with the mean of the unit vectors of its KV head."""
        ...

    def norms(self, lanes: LaneVectors) -> Float[Tensor, "kv_head slot"]:
        """Return the Euclidean norm of each vector."""
        ...


@dataclass(frozen=True, slots=True)
class PageScores:
    """Scores of the tokens of some lanes; see `ScoringBackend`."""

    backend: ScoringBackend
    lanes: LaneVectors

    def window_sums(
        self,
        records: Float[Tensor, "kv_head query width"],
        scales: Float[Tensor, " kv_head"],
        finish: WindowFinish | None = None,
    ) -> Float[Tensor, "kv_head *group slot"]:
        return self.backend.window_sums(self.lanes, records, scales, finish)

    def mean_cosines(self) -> Float[Tensor, "kv_head slot"]:
        return self.backend.mean_cosines(self.lanes)

    def norms(self) -> Float[Tensor, "kv_head slot"]:
        return self.backend.norms(self.lanes)


@dataclass(frozen=True, slots=True)
class StaticLanes:
    """Live slots of the lanes of a layer, in memory that keeps its address.

    Attributes:
        slots: int32 [rows, lanes] on the device of the pages: live slots of each lane, including
            the step's token. The engine overwrites them between calls. All are at least 1.
        max_slots: no lane will have more slots: the page tables have columns for this number.
        window: number of slots a query attends to, including its own; None for all.
    """

    slots: Int[Tensor, "row lane"]
    max_slots: int
    window: int | None


@runtime_checkable
class StaticPlans(Protocol):
    """A backend whose decode plans stay valid while live slots and page numbers change.

    With such a plan, `AttentionBackend.write`, `AttentionBackend.attend` and
    `AttentionBackend.tally` must launch the same kernels with the same arguments on every call:

    * They read live slots from `StaticLanes.slots`, pages from `LayerPages.table` and
      `LayerPages.rows`, and places of new tokens from `NewSlots`, all on the device. Grids, numbers
      of splits and scratch sizes depend on shapes and `max_slots` only.
    * They neither wait for the device nor read its data, and make no copies from the CPU.
    * Scratch is allocated by torch in the call, or before the capture: calls are captured after
      warm-up calls on the same stream, and torch then allocates from the memory pool of the graphs.
    * Each row has one new token. `column_sums`, if any, have `max_slots` slots. The pages have
      neither tokens in full precision nor promoted tokens.
    * The statistics of rows without live slots in `StatisticRows.slots` are not written.
    * Several rows may name the same table row and the same place of their new token; their new
      keys and values are then equal. Such rows fill up the batch, and their outputs are not used.
    """

    def static_plan(
        self, step: StepShape, lanes: StaticLanes, layers: Sequence[LayerPages], slot_bytes: int
    ) -> object | None:
        """Prepare a plan that layers of equal lane lengths share.

        Args:
            step: one new token for each row.
            lanes: live slots; their present values are arbitrary.
            layers: pages of these layers.
            slot_bytes: bytes of a slot, as for `AttentionBackend.plan`.

        Returns:
            The plan; None if a layer cannot be computed in this way.
        """
        ...

    def refresh(self, plan: object, slots: NDArray[np.int32]) -> bool:
        """Prepare a plan for the next calls, outside of the captured kernels.

        `StaticLanes.slots` has the new values already, or a copy to it is queued on the current
        stream. A backend that derives data from live slots on the CPU queues its copies here.

        Args:
            plan: result of `static_plan`.
            slots: [rows, lanes] the new live slots, on the CPU.

        Returns:
            Whether the plan can compute these slots; if not, the step runs without a graph.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class CosSin:
    """Cosines and sines of a batch, which rotate elements i and i + half of a head as a pair.

    Attributes:
        cosine, sine: float32, contiguous; the second half of a row repeats the first.
    """

    cosine: Float[Tensor, "num_tokens rotary_dim"]
    sine: Float[Tensor, "num_tokens rotary_dim"]

    @property
    def rotary_dim(self) -> int:
        """Leading elements of a head that are rotated."""
        return self.cosine.shape[1]

    def rotate(
        self, heads: Float[Tensor, "num_tokens head head_dim"]
    ) -> Float[Tensor, "num_tokens head head_dim"]:
        """Return rotated queries or keys, computed in float32 and rounded to their type."""
        rotating = heads[..., : self.rotary_dim].float()
        first, second = rotating.chunk(2, dim=-1)
        half = self.rotary_dim // 2
        cosine, sine = self.cosine[:, None, :half], self.sine[:, None, :half]
        turned = (first * cosine - second * sine, second * cosine + first * sine)
        parts = [part.to(heads.dtype) for part in turned]
        return torch.cat([*parts, heads[..., self.rotary_dim :]], dim=-1)


@runtime_checkable
class RopeWriter(Protocol):
    """A backend that rotates queries and keys and writes keys and values in one kernel."""

    def rotate_and_write(
        self,
        slots: NewSlots,
        query: Float[Tensor, "num_tokens num_heads head_dim"],
        key: Float[Tensor, "num_tokens num_kv_heads head_dim"],
        value: Float[Tensor, "num_tokens num_kv_heads value_dim"],
        rope: CosSin,
        source: Int[Tensor, " num_tokens"] | None = None,
    ) -> bool:
        """Rotate queries in place, and write rotated keys and values to their slots.

        Keys of plain pages are rotated in place too.

        Args:
            slots: slots of the new tokens.
            query: queries of the flat batch before RoPE.
            key: keys before RoPE.
            value: values.
            rope: cosines and sines of the batch.
            source: tokens of which this is not the own index are padding and left out.

        Returns:
            Whether that was done; else nothing is changed.
        """
        ...


def rotated_and_written(
    backend: object,
    slots: NewSlots,
    heads: tuple[Tensor, Tensor, Tensor],
    rope: CosSin,
    source: Tensor | None = None,
) -> bool:
    """Rotate and write with one kernel, if the backend has one for these pages.

    Args:
        backend: of the step.
        slots: slots of the new tokens.
        heads: queries, keys and values.
        rope: cosines and sines of the batch.
        source: see `RopeWriter.rotate_and_write`.
    """
    return isinstance(backend, RopeWriter) and backend.rotate_and_write(slots, *heads, rope, source)


@dataclass(frozen=True, slots=True)
class HeldLanes:
    """Slots of lanes in pages; lanes of several sequences follow one another.

    Attributes:
        positions: int32 view of all pages of the class: position of each slot.
        pages: int32 [lane, column] page numbers; undefined after a lane's last page.
        held: int32 [lane] live slots, the first ones of a lane.
        max_held: the most live slots of a lane.
    """

    positions: Int[Tensor, "page token"]
    pages: Int[Tensor, "lane column"]
    held: Int[Tensor, " lane"]
    max_held: int


@dataclass(frozen=True, slots=True)
class StoredNumbers:
    """A number of each slot, in pages of their own.

    Attributes:
        numbers: float32 view of all pages of the class.
        pages: int32 [lane, column] page numbers.
        next_position: int32 [lane] position of the next token: numbers are divided by the number of
            queries that have seen their slot; None: they are not.
    """

    numbers: Float[Tensor, "page 1 token 1"]
    pages: Int[Tensor, "lane column"]
    next_position: Int[Tensor, " lane"] | None = None


@dataclass(frozen=True, slots=True)
class SlotRanking:
    """Which slots of lanes are retained: protected ones, then those with the highest scores.

    Equal scores retain the lower position.

    Attributes:
        keep: int32 [lane] number of slots to retain, at most those that are held.
        max_moves: the most of `min(keep, held - keep)` in a lane.
        max_evicted: the most of `held - keep` in a lane.
        score: contiguous, by position; neighbouring lanes share a row if there are fewer rows.
            float32 or float64; or bool: the slots to retain. None: `numbers`.
        numbers: scores that are stored; None: the score is the position.
        sinks: slots at positions below are protected.
        newest: int32 [lane] number of newest slots that are protected; None: no slot.
        protected: protected slots by position, instead of `sinks` and `newest`.
    """

    keep: Int[Tensor, " lane"]
    max_moves: int
    max_evicted: int
    score: Shaped[Tensor, "row slot"] | None = None
    numbers: StoredNumbers | None = None
    sinks: int = 0
    newest: Int[Tensor, " lane"] | None = None
    protected: Bool[Tensor, "lane slot"] | None = None


@dataclass(frozen=True, slots=True)
class SelectedSlots:
    """What an eviction does to lanes.

    Attributes:
        moves: int32 [lane, 2, max_moves]: slots from the end of a lane, ascending, and the holes
            before the number of retained slots that they fill, ascending.
        evicted: int32 [lane, 2 + max_evicted]: not 0 if the ranking breaks the contract of a rule
            (a score is not finite, more slots are protected than retained, or a mask has another
            number of slots; the newest slots are retained then); the number of moves; the
            evicted positions, ascending.
    """

    moves: Int[Tensor, "lane 2 move"]
    evicted: Int[Tensor, "lane number"]


@runtime_checkable
class LaneSelector(Protocol):
    """A backend that evicts from all lanes of several sequences, without reads of the CPU."""

    def order_lanes(
        self, lanes: HeldLanes
    ) -> tuple[Int[Tensor, "lane slot"], Int[Tensor, "lane slot"]] | None:
        """Sort the slots of each lane by position.

        Returns:
            int64 positions, ascending, -1 past a lane's last slot, and slots, there the remaining
            numbers; None if the backend cannot.
        """
        ...

    def select_lanes(self, lanes: HeldLanes, ranking: SlotRanking) -> SelectedSlots | None:
        """Select the slots to retain; None if the backend cannot."""
        ...

    def move_lanes(
        self,
        planes: Sequence[Shaped[Tensor, "page head token _"]],
        pages: Int[Tensor, "lane column"],
        selected: SelectedSlots,
    ) -> None:
        """Make the moves in planes of a page class that have a record of each slot.

        Args:
            planes: typed views of all pages of the class, or of another class with pages of the
                same lanes.
            pages: int32 [lane, column] page numbers; these pages are private.
            selected: result of `select_lanes`.
        """
        ...
