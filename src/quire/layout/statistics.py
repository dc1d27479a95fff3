"""What an eviction policy can have remembered, and how many float32 numbers that takes.

Statistics live in private pages of the sequence, in the fixed pool, and count in its bytes:

    per slot    one record for each token of a lane, moved, copied and freed with its slot
    per lane    a fixed number of records for each lane, whatever its length: rings and moments

A lane here is one KV head of one layer. Only queries of the request's own tokens count, never pads;
all sums are float32. What is written when is in `quire.kv.statistics`, one file a statistic.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from quire.errors import ConfigError
from quire.layout.model import ModelSpec

MEAN, MAX, SUM = "mean", "max", "sum"
REDUCTIONS = (MEAN, MAX, SUM)
"""How the query heads that share a KV head become one number: in each query's row, before sums."""
APART = "apart"
"""They do not: each keeps its own."""


def check_reduction(heads: str) -> None:
    """Refuse a reduction that is none.

    Raises:
        ConfigError: with the names there are.
    """
    if heads not in REDUCTIONS:
        raise ConfigError(f"expected heads to be one of {', '.join(REDUCTIONS)}, got {heads!r}")


@dataclass(frozen=True, slots=True)
class Statistic:
    """Something remembered. Subclasses are frozen; equal ones are one statistic."""

    per_slot: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """Unique with its options; names the lane group of its pages."""
        raise NotImplementedError

    def num_slots(self, model: ModelSpec) -> int:
        """Records of a lane, for those that are not per slot."""
        raise NotImplementedError

    def width(self, model: ModelSpec) -> int:
        """float32 numbers of a record."""
        return 1

    def heads_each(self, model: ModelSpec) -> int:
        """Records that a KV head has of each slot: one, or one for each of its query heads."""
        del model
        return 1


@dataclass(frozen=True, slots=True)
class OfWeights(Statistic):
    """One number a slot, made from the attention weights it gets; or one for each query head.

    Attributes:
        heads: how the query heads of a KV head are reduced, in each query's row.
        apart: they are not: a record has a number for each (for signatures).
    """

    heads: str = MEAN
    apart: bool = False

    def __post_init__(self) -> None:
        check_reduction(self.heads)

    @property
    def reduction(self) -> str:
        """What becomes of the query heads of a KV head, in a word."""
        return APART if self.apart else self.heads

    def heads_each(self, model: ModelSpec) -> int:
        return model.num_heads // model.num_kv_heads if self.apart else 1

    def each(self) -> "OfWeights":
        """The same with a number for each query head."""
        return replace(self, heads=MEAN, apart=True)


@dataclass(frozen=True, slots=True)
class AttentionSum(OfWeights):
    """Sum of the weights a slot got from all queries since it was cached, its own among them."""

    @property
    def name(self) -> str:
        return f"attention_sum.{self.reduction}"


@dataclass(frozen=True, slots=True)
class SquareSum(OfWeights):
    """Sum of their squares."""

    @property
    def name(self) -> str:
        return f"square_sum.{self.reduction}"


@dataclass(frozen=True, slots=True)
class LowAttentionCount(OfWeights):
    """Queries that gave a slot less than 1 / (keys that query saw)."""

    @property
    def name(self) -> str:
        return f"low_looks.{self.reduction}"


MOST_SIGNATURE_BITS = 24  # whole numbers that float32 holds exactly


@dataclass(frozen=True, slots=True)
class SignatureBits(Statistic):
    """What the query heads of a KV head said of a token, a bit each; written when tokens leave.

    Bit g of a whole number is that of the group's head g. Slots at positions that `SignedUntil` has
    not passed hold anything.
    """

    @property
    def name(self) -> str:
        return "signature_bits"

    def width(self, model: ModelSpec) -> int:
        group = model.num_heads // model.num_kv_heads
        if group > MOST_SIGNATURE_BITS:
            raise ConfigError(
                f"signatures are kept for {MOST_SIGNATURE_BITS} query heads of a KV head at most, "
                f"got {group}; use signatures=recomputed"
            )
        return 1


@dataclass(frozen=True, slots=True)
class SignedUntil(Statistic):
    """One record a lane: the position before which every token it holds has its `SignatureBits`."""

    per_slot: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return "signed_until"

    def num_slots(self, model: ModelSpec) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class QueryRing(Statistic):
    """The newest queries, after RoPE, for each query head.

    A record: `group * head_dim` numbers of one query (group = query heads of a KV head), then its
    logical position + 1 as a number (0: nothing here yet; float32 is exact below 2 ** 24). The
    query at position p stands in record p % window.

    Attributes:
        window: queries remembered.
    """

    per_slot: ClassVar[bool] = False
    window: int = 32

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ConfigError(f"expected a window of 1 query or more, got {self.window}")

    @property
    def name(self) -> str:
        return f"query_ring.{self.window}"

    def num_slots(self, model: ModelSpec) -> int:
        return self.window

    def width(self, model: ModelSpec) -> int:
        return model.num_heads // model.num_kv_heads * model.head_dim + 1


@dataclass(frozen=True, slots=True)
class QueryMoments(Statistic):
    """Count, sum and sum of outer products of all queries before RoPE, for each query head.

    One record a lane: for each head of the group count (1), sum (head_dim), products
    (head_dim * head_dim), one head behind the other.

    Attributes:
        skip: queries at positions below this do not count (sinks).
    """

    per_slot: ClassVar[bool] = False
    skip: int = 4

    @property
    def name(self) -> str:
        return f"query_moments.{self.skip}"

    def num_slots(self, model: ModelSpec) -> int:
        return 1

    def width(self, model: ModelSpec) -> int:
        group, dim = model.num_heads // model.num_kv_heads, model.head_dim
        return group * (1 + dim + dim * dim)


@dataclass(frozen=True, slots=True)
class ResidualSimilarity(Statistic):
    """How much attention changes the residual stream of a layer: for SqueezeAttention.

    One record for each lane of a layer, all alike: sum over tokens of the cosine between the
    residual stream before and after attention was added, and the number of tokens.
    """

    per_slot: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return "attention_shift"

    def num_slots(self, model: ModelSpec) -> int:
        return 1

    def width(self, model: ModelSpec) -> int:
        return 2
