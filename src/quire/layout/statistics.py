"""Attention statistics that eviction policies use, and their sizes in float32 numbers.

Statistics are stored in private pages of the sequence, in the arena, and count in its bytes:

    per slot    one record for each token of a lane, moved, copied and freed with its slot
    per lane    a fixed number of records for each lane, independent of its length

A lane here is one KV head of one layer. Only queries of the request's own tokens count, never
padding. All sums are float32. `quire.kv.statistics` records the statistics.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from quire.errors import ConfigError
from quire.layout.model import HeadShape

MEAN, MAX, SUM = "mean", "max", "sum"
REDUCTIONS = (MEAN, MAX, SUM)
"""Reductions over the query heads that share a KV head, applied per query, before summation."""
APART = "apart"
"""No reduction: one number for each query head."""


def check_reduction(heads: str) -> None:
    """Check the name of a reduction.

    Raises:
        ConfigError: the name is unknown; the message lists the names.
    """
    if heads not in REDUCTIONS:
        raise ConfigError(f"expected heads to be one of {', '.join(REDUCTIONS)}, got {heads!r}")


MIN_CHUNK_TOKENS, MAX_SMALL_CHUNKS = 64, 16
"""Least tokens of each chunk of a scoring pass that has more than `MAX_SMALL_CHUNKS` chunks."""
_EXTRA = 4  # further tokens of a text that is encoded alone, such as a tokenizer's first space


@dataclass(frozen=True, slots=True)
class ScoringPass:
    """Tokens that are computed after a prompt for their attention to it, and then removed.

    The prompt's tokens again, in chunks, each after a text. A chunk attends to the prompt and to
    itself, and its positions continue those of the prompt. Only the queries of these tokens count
    in the statistics of the pass, and they count in no other statistic.

    Attributes:
        name: name of the texts.
        first, later: text before the first chunk, and before the others.
        end: text after the repeated tokens that follow `later`.
        chunk_tokens: tokens of the prompt in a chunk.
        overlap: last tokens of the chunk before, repeated after `later`.
    """

    name: str
    first: str
    later: str
    end: str
    chunk_tokens: int
    overlap: int

    def _text_tokens(self, prompt_tokens: int) -> int:
        """Most tokens before the prompt's tokens in a chunk: a token has at least one byte."""
        later = len(self.later.encode()) + self.overlap + len(self.end.encode()) + _EXTRA
        is_one_chunk = prompt_tokens <= self.chunk_tokens
        return max(len(self.first.encode()), 0 if is_one_chunk else later) + _EXTRA

    def slots(self, prompt_tokens: int) -> int:
        """Slots that the pass of a prompt needs: a bound on the tokens of its longest chunk."""
        return min(prompt_tokens, self.chunk_tokens) + self._text_tokens(prompt_tokens)

    def within(self, prompt_tokens: int, context_tokens: int) -> "ScoringPass":
        """Return the pass of a prompt, with smaller chunks if the context after it needs them.

        Raises:
            ConfigError: it would have many small chunks.
        """
        left, chunk = context_tokens - prompt_tokens, self.chunk_tokens
        least = min(MIN_CHUNK_TOKENS, -(-prompt_tokens // MAX_SMALL_CHUNKS))
        if chunk < least:
            raise ConfigError(
                f"chunk={chunk} divides the scoring pass of {prompt_tokens} prompt tokens into "
                f"{-(-prompt_tokens // chunk)} parts; raise it to {least} or more"
            )
        if self.slots(prompt_tokens) <= left:
            return self
        chunk = min(chunk, left - self._text_tokens(chunk + 1))
        if chunk < least:
            raise ConfigError(
                f"the rule repeats the prompt after it, {least} tokens or more at a time, and "
                f"{prompt_tokens} prompt tokens leave {left} of the context of {context_tokens}; "
                "shorten the prompt, or use a rule without a scoring pass, such as snapkv"
            )
        return replace(self, chunk_tokens=chunk)

    def tokens(self, prompt_tokens: int) -> int:
        """Bound on the tokens of all chunks."""
        chunks = -(-prompt_tokens // self.chunk_tokens)
        return prompt_tokens + chunks * self._text_tokens(prompt_tokens)

    def token_ids(
        self, prompt: Sequence[int], encode: Callable[[str], list[int]]
    ) -> tuple[list[int], ...]:
        """Return the tokens of each chunk.

        Args:
            prompt: token ids of the prompt.
            encode: returns the token ids of a text, without special tokens.

        Raises:
            ConfigError: a text has more tokens than bytes.
        """
        chunks, most = [], self._text_tokens(len(prompt))
        first, later, end = map(encode, (self.first, self.later, self.end))
        for start in range(0, len(prompt), self.chunk_tokens):
            again = prompt[max(0, start - self.overlap) : start]
            before = [*later, *again, *end] if start else first
            if len(before) > most:
                raise ConfigError(
                    f"the tokenizer writes the text of a scoring pass as {len(before)} tokens, "
                    f"expected at most {most}"
                )
            chunks.append([*before, *prompt[start : start + self.chunk_tokens]])
        return tuple(chunks)


@dataclass(frozen=True, slots=True)
class Statistic:
    """Base class of statistics. Subclasses are frozen; equal instances are the same statistic.

    Sizes depend on the heads that a lane serves; its query heads are those of all layers that read
    it.
    """

    per_slot: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """Unique name, options included; part of the name of its lane group."""
        raise NotImplementedError

    @property
    def scoring(self) -> ScoringPass | None:
        """The pass whose queries count; None: all queries of the sequence count."""
        return None

    @property
    def newest(self) -> int | None:
        """Number of newest queries that determine its records; None: all queries do."""
        return None

    def num_slots(self, heads: HeadShape) -> int:
        """Return the number of records of a lane, for statistics that are not per slot."""
        raise NotImplementedError

    def width(self, heads: HeadShape) -> int:
        """Return the float32 numbers of a record."""
        return 1

    def heads_each(self, heads: HeadShape) -> int:
        """Return the records of a KV head per slot: one, or one for each of its query heads."""
        del heads
        return 1


@dataclass(frozen=True, slots=True)
class OfWeights(Statistic):
    """Base class of per-slot statistics of attention weights.

    Attributes:
        heads: reduction over the query heads of a KV head, applied per query.
        apart: no reduction: one number for each query head (for signatures).
    """

    heads: str = MEAN
    apart: bool = False

    def __post_init__(self) -> None:
        check_reduction(self.heads)

    @property
    def reduction(self) -> str:
        """Name of the reduction over query heads, or APART."""
        return APART if self.apart else self.heads

    def heads_each(self, heads: HeadShape) -> int:
        return heads.group if self.apart else 1

    def each(self) -> "OfWeights":
        """Return the same statistic with a number for each query head."""
        return replace(self, heads=MEAN, apart=True)


@dataclass(frozen=True, slots=True)
class AttentionSum(OfWeights):
    """Sum of a slot's attention weights over all queries since it was cached, its own included."""

    @property
    def name(self) -> str:
        return f"attention_sum.{self.reduction}"


@dataclass(frozen=True, slots=True)
class SquareSum(OfWeights):
    """Sum of squares of a slot's attention weights over the same queries."""

    @property
    def name(self) -> str:
        return f"square_sum.{self.reduction}"


@dataclass(frozen=True, slots=True)
class LowAttentionCount(OfWeights):
    """Number of queries whose weight on a slot was below 1 / (keys that the query attended to)."""

    @property
    def name(self) -> str:
        return f"low_attention_count.{self.reduction}"


@dataclass(frozen=True, slots=True)
class AttentionMax(OfWeights):
    """Largest attention weight of a slot from the queries of a scoring pass.

    Attributes:
        of: the pass. Statistics of passes with other chunks have the same name and group.
    """

    heads: str = MAX
    of: ScoringPass = field(kw_only=True)

    @property
    def name(self) -> str:
        return f"attention_max.{self.reduction}.{self.of.name}"

    @property
    def scoring(self) -> ScoringPass:
        return self.of


@dataclass(frozen=True, slots=True)
class QueryRing(Statistic):
    """The newest queries, after RoPE, for each query head.

    A record has `group * head_dim` elements of one query (group = query heads of a KV head), then
    its logical position + 1 (0: empty record; float32 is exact below 2 ** 24). The query at
    position p is in record p % window.

    Attributes:
        window: number of queries stored.
    """

    per_slot: ClassVar[bool] = False
    window: int = 32

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ConfigError(f"expected a window of at least 1 query, got {self.window}")

    @property
    def name(self) -> str:
        return f"query_ring.{self.window}"

    @property
    def newest(self) -> int:
        return self.window

    def num_slots(self, heads: HeadShape) -> int:
        return self.window

    def width(self, heads: HeadShape) -> int:
        return heads.group * heads.query_dim + 1


@dataclass(frozen=True, slots=True)
class QueryMoments(Statistic):
    """Count, sum and sum of outer products of all queries before RoPE, for each query head.

    One record per lane. For each head of the group in order: count (1), sum (head_dim), outer
    products (head_dim * head_dim), or only squares (head_dim).

    Attributes:
        skip: queries at positions below this are not counted (sinks).
        squares: only the squares of the elements instead of outer products.
    """

    per_slot: ClassVar[bool] = False
    skip: int = 4
    squares: bool = False

    @property
    def name(self) -> str:
        return f"query_moments.{self.skip}" + (".squares" if self.squares else "")

    def num_slots(self, heads: HeadShape) -> int:
        return 1

    def width(self, heads: HeadShape) -> int:
        group, dim = heads.group, heads.key_dim
        return group * (1 + dim + (dim if self.squares else dim * dim))


@dataclass(frozen=True, slots=True)
class ResidualSimilarity(Statistic):
    """Cosine similarity of the residual stream before and after attention, for SqueezeAttention.

    One record per lane, equal in all lanes of a layer: sum over tokens of the cosine between the
    residual stream before and after attention is added, and the number of tokens.
    """

    per_slot: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return "residual_similarity"

    def num_slots(self, heads: HeadShape) -> int:
        return 1

    def width(self, heads: HeadShape) -> int:
        return 2
