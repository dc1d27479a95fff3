"""How much fits: pages of a sequence, sequences in a pool, the longest sequence, and what limits.

Pages are those of the engine: one page holds `page_tokens` tokens of one layer, all its KV heads.
A window layer gives a page back once its last token has left the window, so while decoding it holds
at most the pages that W tokens can touch.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from quire.errors import ConfigError
from quire.layout.model import ModelSpec
from quire.layout.pages import CacheLayout

Limit = Literal["memory", "context", "none"]


def sequence_bytes(layout: CacheLayout, tokens: int) -> int:
    """Bytes of one sequence of `tokens` tokens while it decodes, in whole pages of every layer."""
    return sum(group.bytes_at_most(tokens, 1) for group in layout.groups)


def token_bytes(layout: CacheLayout) -> Fraction:
    """Bytes that one more token adds in all layers, windows not yet full.

    All that decodes it is counted, its part of what a page has once among it; padding of pages is
    not, nor what a sequence has once however long it is.
    """
    return sum(
        (
            Fraction(page.key_bytes + page.value_bytes, page.tokens) * group.num_lanes
            for group in layout.groups
            if not group.private
            for page in [group.page_class]
        ),
        start=Fraction(0),
    )


def bytes_per_value(model: ModelSpec, layout: CacheLayout) -> float:
    """The same for one number: the mean of keys, values and layers."""
    return float(token_bytes(layout) / model.kv_values_per_token)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What a KV memory holds.

    Attributes:
        page_tokens: tokens in a page.
        page_bytes: bytes of a page, keys and values of all heads of one layer.
        pool_pages: whole pages of the KV memory.
        sequence_tokens: the length asked about.
        pages_per_sequence: pages of one sequence of that length, all layers.
        sequences: how many of them fit; 0 where the model's context is shorter.
        longest_tokens: the longest single sequence.
        longest_limit: what ends it: the memory or the model's context.
        limit: what keeps a batch of the wanted size from running: "none" where it runs.
    """

    page_tokens: int
    page_bytes: int
    pool_pages: int
    sequence_tokens: int
    pages_per_sequence: int
    sequences: int
    longest_tokens: int
    longest_limit: Limit
    limit: Limit


def capacity(
    model: ModelSpec, kv_bytes: int, *, layout: CacheLayout, sequence_tokens: int, batch: int
) -> Capacity:
    """What fits into `kv_bytes`.

    Args:
        model: the shape.
        kv_bytes: size of the pool.
        layout: of `quire.layout.layout.layout_for`.
        sequence_tokens: length of the sequences asked about.
        batch: how many of them are wanted at once.

    Raises:
        ConfigError: a length or batch below 1, or a pool that does not hold one token.
    """
    if sequence_tokens < 1 or batch < 1:
        raise ConfigError(
            f"sequence_tokens={sequence_tokens}, batch={batch}: expected 1 or more of each"
        )
    page = layout.groups[0].page_class
    pool_pages = kv_bytes // page.page_bytes
    usable_bytes = pool_pages * page.page_bytes
    if usable_bytes < layout.smallest_sequence_bytes:
        raise ConfigError(
            f"kv_memory={kv_bytes:,} B does not hold one sequence: its first token needs a page of"
            f" {page.page_bytes:,} B in each of {model.num_layers} layers"
            f" = {layout.smallest_sequence_bytes:,} B; raise kv_memory or lower page_tokens"
        )
    needed_bytes = sequence_bytes(layout, sequence_tokens)
    too_long = sequence_tokens > model.max_positions
    sequences = 0 if too_long else usable_bytes // needed_bytes
    longest = _longest(layout, usable_bytes, model.max_positions)
    return Capacity(
        page_tokens=page.tokens,
        page_bytes=page.page_bytes,
        pool_pages=pool_pages,
        sequence_tokens=sequence_tokens,
        pages_per_sequence=needed_bytes // page.page_bytes,
        sequences=sequences,
        longest_tokens=longest,
        longest_limit="context" if longest == model.max_positions else "memory",
        limit="context" if too_long else "memory" if sequences < batch else "none",
    )


def _longest(layout: CacheLayout, pool_bytes: int, max_positions: int) -> int:
    fits, too_long = 0, max_positions + 1
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if sequence_bytes(layout, middle) <= pool_bytes:
            fits = middle
        else:
            too_long = middle
    return fits
