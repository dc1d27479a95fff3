"""How the memory of a device is divided: weights, activations, headroom, and the rest for KV.

| weights | activation peak | headroom |            KV             | unassigned |
|<------------------------------- total ------------------------------------->|
"""

from dataclasses import dataclass

from quire.errors import ConfigError
from quire.layout.model import ModelSpec
from quire.layout.sizes import format_size

DEFAULT_HEADROOM_SHARE = 0.1
"""Part of the total left alone by default: the allocator's slack, the runtime, other programs."""

_LOGITS_BYTES = 4  # logits and probabilities are computed in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLayout:
    """Bytes of a device's memory by use.

    Raises:
        ConfigError: the parts exceed the total; the message gives each of them.
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
        """What nobody was given: 0 when the KV memory was chosen automatically."""
        return self.total_bytes - self._overhead_bytes - self.kv_bytes


def auto_kv_memory(
    total_bytes: int, weights_bytes: int, activation_peak_bytes: int, headroom_bytes: int
) -> int:
    """KV memory that uses what is left: total - weights - activation peak - headroom.

    Args:
        total_bytes: memory of the device.
        weights_bytes: the model's weights on it.
        activation_peak_bytes: measured peak of a full step, or `estimate_activation_peak`.
        headroom_bytes: to be left alone.

    Raises:
        ConfigError: nothing remains; the message gives all four numbers.
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
    """Bytes of activations at the worst moment of one step, by arithmetic.

    Two streams of the hidden size (the residual and its norm) live all the time; on top comes the
    largest of three moments, of which only one is alive at once:

        attention   max_num_batched_tokens * (2 * heads + 2 * kv_heads) * head_dim     query, key,
        value, out MLP         max_num_batched_tokens * width * (3 if gated else 2)
        gate, up, product logits      sampled_rows * vocab * (bytes_per_value + 2 * 4 bytes)
            logits, float32 copy, probabilities

    Scratch of the attention kernel, a matrix library's workspace and the runtime itself are not in
    it: they belong to the headroom, or to a measured peak given instead of this estimate.

    Args:
        model: the shape.
        max_num_batched_tokens: tokens of the largest step, decode rows and prefill chunks together.
        sampled_rows: rows of that step whose logits are needed.
        bytes_per_value: of the model's dtype.

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
