"""Activations in place of KV: whether their transfer pays, and which of them to store.

| X            | X and KV        | KV             |
0          kv_from             x_until         tokens        l_min and l_max of the formulas
"""

from dataclasses import dataclass

from quire.errors import ConfigError
from quire.layout.model import ModelSpec
from quire.plan.offload.rates import OffloadRates
from quire.plan.offload.split import pipelined_split

# Stored data that allows the split to change: X of the first tokens, KV of the last, both between.


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationRange:
    """Range of splits that the stored data allows.

    Attributes:
        kv_from: l_min: first token with stored KV.
        x_until: l_max: token after the last stored activation.

    Raises:
        ConfigError: some tokens have neither X nor KV.
    """

    kv_from: int
    x_until: int

    def __post_init__(self) -> None:
        if not 0 <= self.kv_from <= self.x_until:
            raise ConfigError(
                f"expected kv_from between 0 and x_until, got kv_from={self.kv_from} and "
                f"x_until={self.x_until}"
            )

    def host_bytes(self, tokens: int, *, kv_bytes: int | float, x_bytes: int | float) -> float:
        """Bytes of CPU memory for one layer of a sequence.

        Args:
            tokens: length of the sequence.
            kv_bytes: bytes of a token's KV.
            x_bytes: bytes of a token's activation.
        """
        kept = max(0, tokens - self.kv_from)
        return kv_bytes * kept + x_bytes * min(self.x_until, tokens)

    def nearest(self, x_tokens: int, tokens: int) -> int:
        """The nearest split that the stored data allows."""
        return min(max(x_tokens, self.kv_from), self.x_until, tokens)


def activation_range(
    rates: OffloadRates, prompt_tokens: int, most_tokens: int, *, margin: float = 0.1
) -> ActivationRange:
    """Data to store for a sequence whose split grows with its length, with a margin for rates.

    Args:
        rates: rates of a layer.
        prompt_tokens: tokens at the start of decode.
        most_tokens: most tokens of the sequence.
        margin: fraction of the split, in both directions.
    """
    low = pipelined_split(rates, prompt_tokens) * (1 - margin)
    high = pipelined_split(rates, most_tokens) * (1 + margin)
    return ActivationRange(kv_from=int(low), x_until=min(most_tokens, -int(-high // 1)))


# ---- gate ----------------------------------------------------------------------------------------

# Whether the transfer of a model's activations pays.


@dataclass(frozen=True, slots=True)
class Gate:
    """Result of the comparison.

    Attributes:
        pays: whether an activation is smaller than the KV computed from it.
        x_ratio: its bytes over those of the KV.
        reason: explanation for messages.
    """

    pays: bool
    x_ratio: float
    reason: str


def activation_gate(
    model: ModelSpec, *, kv_value_bytes: int | float = 2, x_value_bytes: int | float = 2
) -> Gate:
    """Compare bytes: hidden * p_x with 2 * kv_heads * head_dim * p_kv.

    Fewer KV heads than query heads shrink the KV but not the activation, so mostly multi-head
    models gain. `head_dim` may be larger than hidden / heads.

    Args:
        model: its dimensions.
        kv_value_bytes: bytes of a KV element on the link, including codec metadata.
        x_value_bytes: bytes of an activation element, including codec metadata.
    """
    x_bytes = model.hidden_size * x_value_bytes
    ratio = x_bytes / (model.kv_values_per_layer_token * kv_value_bytes)
    words = f"activations are {_shown(ratio)}x the KV of this model"
    if ratio < 1:
        return Gate(True, ratio, f"{words}: part of its KV is recomputed from them")
    return Gate(False, ratio, f"{words}: KV alone is transferred")


def _shown(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio >= 1 else f"{ratio:.2g}"
