"""Whether a model's activations are worth sending in place of its KV."""

from dataclasses import dataclass

from quire.layout.model import ModelSpec


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
