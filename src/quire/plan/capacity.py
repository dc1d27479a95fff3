"""Division of a device's memory, and the number of sequences that fit in its KV memory.

Pages are the engine's: one page holds `page_tokens` tokens of one layer, all its KV heads. A window
layer frees a page once its last token has left the window. So while decoding it holds at most the
pages that W tokens can touch.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from quire.errors import ConfigError
from quire.layout.model import ModelSpec
from quire.layout.pages import CacheLayout
from quire.layout.sizes import format_size

# Capacity: pages of a sequence, sequences in a pool, the longest sequence, and the limit.

Limit = Literal["memory", "context", "none"]
WEIGHT_BITS = {"int8": 8, "int4": 4}
SCALE_GROUP = 128  # inputs that share a scale of an int4 weight


def sequence_bytes(layout: CacheLayout, tokens: int) -> int:
    """Bytes of one sequence of `tokens` tokens while it decodes, in whole pages of every layer."""
    return sum(group.bytes_at_most(tokens, 1) for group in layout.groups)


def token_bytes(layout: CacheLayout) -> Fraction:
    """Bytes that one more token adds in all layers, before windows are full.

    Includes codec metadata, and the token's share of per-page metadata. Excludes page padding and
    per-sequence constants.
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
    """Average bytes of one element over keys, values and layers."""
    return float(token_bytes(layout) / model.kv_values_per_token)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The capacity of a KV memory.

    Attributes:
        page_tokens: tokens of a page.
        page_bytes: bytes of a page: keys and values of all heads of one layer.
        pool_pages: whole pages of the KV memory.
        sequence_tokens: sequence length of the question.
        pages_per_sequence: pages of one sequence of that length in all layers.
        sequences: number of such sequences that fit; 0 if the model's context is shorter.
        longest_tokens: length of the longest single sequence.
        longest_limit: limit of that length: the memory or the model's context.
        limit: limit of a batch of the wanted size; "none" if it fits.
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
    """Compute the capacity of `kv_bytes` of KV memory.

    Args:
        model: its dimensions.
        kv_bytes: size of the pool.
        layout: lane groups, from `quire.layout.layout.layout_for`.
        sequence_tokens: sequence length.
        batch: number of sequences wanted at once.

    Raises:
        ConfigError: a length or batch below 1, or a pool too small for one token.
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
            f"a KV memory of {kv_bytes:,} B does not hold one sequence: its first token needs a"
            f" page of {page.page_bytes:,} B in each of {model.num_layers} layers"
            f" = {layout.smallest_sequence_bytes:,} B; raise --kv-memory or lower --block-size"
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


# ---- memory --------------------------------------------------------------------------------------

# Division of a device's memory: weights, activations, headroom, and the rest for KV.
#
# | weights | activation peak | headroom |            KV             | unassigned |
# |<------------------------------- total ------------------------------------->|

DEFAULT_HEADROOM_SHARE = 0.1
"""Default fraction of the total left free for the allocator, the runtime and other programs."""

_LOGITS_BYTES = 4  # logits and probabilities are computed in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLayout:
    """Bytes of a device's memory by use.

    Raises:
        ConfigError: the sizes exceed the total; the message lists them.
    """

    total_bytes: int
    weights_bytes: int
    activation_peak_bytes: int
    headroom_bytes: int
    kv_bytes: int

    def __post_init__(self) -> None:
        if self.unassigned_bytes < 0:
            raise ConfigError(
                f"kv_memory={format_size(self.kv_bytes)} does not fit: "
                f"{_sum(self.total_bytes, self._overhead_bytes)} remain of"
                f" {format_size(self.total_bytes)} after weights"
                f" {format_size(self.weights_bytes)}, activations"
                f" {format_size(self.activation_peak_bytes)} and headroom"
                f" {format_size(self.headroom_bytes)}; lower kv_memory or the headroom"
            )

    @property
    def _overhead_bytes(self) -> int:
        return self.weights_bytes + self.activation_peak_bytes + self.headroom_bytes

    @property
    def unassigned_bytes(self) -> int:
        """Bytes without a use: 0 if the size of KV memory was chosen automatically."""
        return self.total_bytes - self._overhead_bytes - self.kv_bytes


def coded_weight_bytes(model: ModelSpec, codec: str, bytes_per_value: int | float) -> int:
    """Return the bytes of all weights with quantized linear layers.

    Args:
        model: its dimensions.
        codec: int8, with one scale for each output of a layer, or int4, with one for each output
            and SCALE_GROUP inputs. The output head is always int8.
        bytes_per_value: bytes of the other weights: an embedding that no head shares, positions.
    """
    scale_bytes = {8: 4 / model.hidden_size, 4: 4 / SCALE_GROUP}
    bits, head = WEIGHT_BITS[codec], model.embedding_parameters
    plain = model.num_parameters - model.layer_parameters - head
    return math.ceil(
        model.layer_parameters * (bits / 8 + scale_bytes[bits])
        + head * (1 + scale_bytes[8])
        + plain * bytes_per_value
    )


def auto_kv_memory(
    total_bytes: int, weights_bytes: int, activation_peak_bytes: int, headroom_bytes: int
) -> int:
    """Size of KV memory that uses the rest: total - weights - activation peak - headroom.

    Args:
        total_bytes: memory of the device.
        weights_bytes: the model's weights on it.
        activation_peak_bytes: measured peak of a full step, or `estimate_activation_peak`.
        headroom_bytes: memory to leave free.

    Raises:
        ConfigError: no memory is left; the message lists all four sizes.
    """
    kv_bytes = total_bytes - weights_bytes - activation_peak_bytes - headroom_bytes
    if kv_bytes <= 0:
        raise ConfigError(
            f"no memory is left for KV: total {total_bytes:,} B - weights {weights_bytes:,} B"
            f" - activation peak {activation_peak_bytes:,} B - headroom {headroom_bytes:,} B"
            f" = {kv_bytes:,} B; take a smaller model or dtype, fewer tokens per step, less"
            " headroom, or more memory"
        )
    return kv_bytes


def estimate_activation_peak(
    model: ModelSpec, *, max_num_batched_tokens: int, sampled_rows: int, bytes_per_value: int
) -> int:
    """Estimate the peak bytes of activations in one step.

    Two tensors of the hidden size (the residual and its norm) are always live. The largest of three
    other sets is added, of which one is live at a time:

        attention   max_num_batched_tokens * (2 * heads + 2 * kv_heads) * head_dim
                    query, key, value, output
        MLP         max_num_batched_tokens * width * (3 if gated else 2)
                    gate, up, product
        logits      sampled_rows * vocab * (bytes_per_value + 2 * 4 bytes)
                    logits, float32 copy, probabilities

    Scratch of the attention kernel, workspaces of matrix libraries and the runtime itself are not
    included. They belong to the headroom, or to a measured peak used instead of this estimate.

    Args:
        model: its dimensions.
        max_num_batched_tokens: tokens of the largest step, decode rows and prefill chunks together.
        sampled_rows: rows of that step with logits.
        bytes_per_value: bytes of an element in the model's dtype.

    Raises:
        ConfigError: a negative count.
    """
    if max_num_batched_tokens < 0 or sampled_rows < 0:
        raise ConfigError(
            f"max_num_batched_tokens={max_num_batched_tokens}, sampled_rows={sampled_rows}: "
            "expected 0 or more"
        )
    width = model.intermediate_size
    if model.mixture is not None:
        experts = model.mixture.experts_per_token * model.mixture.expert_size
        width = max(width, experts + model.mixture.shared_size)
    attention = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    mlp = (3 if model.gated_mlp else 2) * width
    logits_bytes = sampled_rows * model.vocab_size * (bytes_per_value + 2 * _LOGITS_BYTES)
    layer_bytes = max_num_batched_tokens * max(attention, mlp) * bytes_per_value
    streams_bytes = 2 * max_num_batched_tokens * model.hidden_size * bytes_per_value
    return streams_bytes + max(layer_bytes, logits_bytes)


def _sum(total_bytes: int, overhead_bytes: int) -> str:
    return format_size(max(total_bytes - overhead_bytes, 0))
