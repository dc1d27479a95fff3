"""Activations in place of KV: whether they are worth sending, and which of them the host keeps.

| X            | X and KV        | KV             |
0          kv_from             x_until         tokens        l_min and l_max of the formulas
"""

from dataclasses import dataclass

from quire.errors import ConfigError
from quire.layout.model import ModelSpec
from quire.plan.offload.rates import OffloadRates
from quire.plan.offload.split import pipelined_split

# What the host keeps so that a split may move: X of the front, KV of the back, both between.


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationRange:
    """Where a split may stand.

    Attributes:
        kv_from: l_min: KV is kept from here on.
        x_until: l_max: activations are kept up to here.

    Raises:
        ConfigError: they leave tokens that nothing is kept of.
    """

    kv_from: int
    x_until: int

    def __post_init__(self) -> None:
        if not 0 <= self.kv_from <= self.x_until:
            raise ConfigError(
                f"expected KV from a token up to where activations end, got {self.kv_from} and "
                f"{self.x_until}"
            )

    def host_bytes(self, tokens: int, *, kv_bytes: int | float, x_bytes: int | float) -> float:
        """Bytes on the host for one layer of so many tokens.

        Args:
            tokens: of the sequence.
            kv_bytes: of a token's KV.
            x_bytes: of its activation.
        """
        kept = max(0, tokens - self.kv_from)
        return kv_bytes * kept + x_bytes * min(self.x_until, tokens)

    def nearest(self, x_tokens: int, tokens: int) -> int:
        """The nearest split that what is kept allows."""
        return min(max(x_tokens, self.kv_from), self.x_until, tokens)


def activation_range(
    rates: OffloadRates, prompt_tokens: int, most_tokens: int, *, margin: float = 0.1
) -> ActivationRange:
    """What to keep for a sequence whose split rises with its length, and for rates that are off.

    Args:
        rates: of a layer.
        prompt_tokens: where the sequence begins to decode.
        most_tokens: it may reach.
        margin: of the split, both ways.
    """
    low = pipelined_split(rates, prompt_tokens) * (1 - margin)
    high = pipelined_split(rates, most_tokens) * (1 + margin)
    return ActivationRange(kv_from=int(low), x_until=min(most_tokens, -int(-high // 1)))


# ---- gate ----------------------------------------------------------------------------------------

# Whether a model's activations are worth sending in place of its KV.


@dataclass(frozen=True, slots=True)
class Gate:
    """The answer.

    Attributes:
        pays: an activation is smaller than the KV made from it.
        x_ratio: its bytes over those of the KV.
        reason: for people.
    """

    pays: bool
    x_ratio: float
    reason: str


def activation_gate(
    model: ModelSpec, *, kv_value_bytes: int | float = 2, x_value_bytes: int | float = 2
) -> Gate:
    """Compare bytes: hidden * p_x with 2 * kv_heads * head_dim * p_kv.

    With fewer KV heads than query heads the KV shrinks and the activation does not, so it is
    mostly multi-head models that gain. Heads wider than hidden / heads count for what they are.

    Args:
        model: the shape.
        kv_value_bytes: of a number of KV on the link, metadata of its codec counted.
        x_value_bytes: likewise of an activation.
    """
    x_bytes = model.hidden_size * x_value_bytes
    ratio = x_bytes / (model.kv_values_per_layer_token * kv_value_bytes)
    words = f"activations are {_shown(ratio)}x the KV of this model"
    if ratio < 1:
        return Gate(True, ratio, f"{words}: part of its KV is recomputed from them")
    return Gate(False, ratio, f"{words}: KV alone is transferred")


def _shown(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio >= 1 else f"{ratio:.2g}"
