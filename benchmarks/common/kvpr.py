"""Formulas of the KVPR paper for one layer: rates from a data sheet, the split, and its speedup.

l_A is the paper's split (equation 10). The engine uses the pipelined split l_B instead; see
`quire.offload.split`, which defines the symbols.
"""

import math

from quire.errors import ConfigError
from quire.layout.model import ModelSpec
from quire.offload.split import OffloadRates, balance


def offload_rates(
    model: ModelSpec,
    *,
    link_bytes_per_s: int | float,
    flops_per_s: int | float,
    kv_value_bytes: int | float = 2,
    x_value_bytes: int | float = 2,
    host_bytes_per_s: int | float = 0.0,
    other_s: int | float = 0.0,
) -> OffloadRates:
    """Rates from a model's shape and a machine's speeds.

    Args:
        model: shape of the model.
        link_bytes_per_s: transfer rate from host to device.
        flops_per_s: compute rate of products as wide as the hidden size.
        kv_value_bytes: bytes of a KV element on the link, with the codec's metadata.
        x_value_bytes: bytes of an activation element on the link, with the codec's metadata.
        host_bytes_per_s: rate at which CPU attention reads KV; 0: no CPU attention.
        other_s: see `OffloadRates`.

    Raises:
        ConfigError: a speed is not above 0.
    """
    if min(link_bytes_per_s, flops_per_s) <= 0:
        raise ConfigError(
            f"expected speeds above 0, got {link_bytes_per_s} B/s and {flops_per_s} FLOP/s"
        )
    kv_bytes = model.kv_values_per_layer_token * kv_value_bytes
    flops = 2 * model.hidden_size * model.kv_values_per_layer_token
    return OffloadRates(
        kv_s=kv_bytes / link_bytes_per_s,
        x_s=model.hidden_size * x_value_bytes / link_bytes_per_s,
        recompute_s=flops / flops_per_s,
        host_s=kv_bytes / host_bytes_per_s if host_bytes_per_s else math.inf,
        other_s=other_s,
    )


def paper_seconds(rates: OffloadRates, tokens: int | float, x_tokens: int | float) -> float:
    """T_A: duration of a layer that transfers its activations before any overlap; equation 10."""
    transferred_s = rates.kv_s * (tokens - x_tokens)
    return rates.x_s * x_tokens + max(rates.recompute_s * x_tokens, transferred_s)


def paper_split(rates: OffloadRates, tokens: int, unit: int = 1) -> int:
    """l_A, the fastest number of recomputed tokens in whole units; 0 if recompute does not pay.

    Args:
        rates: rates of a layer.
        tokens: tokens of all rows.
        unit: tokens of a unit that is not split, such as a page or a sequence.
    """
    if rates.x_s >= rates.kv_s:
        return 0
    return balance(
        lambda x: (rates.x_s + rates.recompute_s) * x,
        lambda x: rates.x_s * x + rates.kv_s * (tokens - x),
        tokens,
        unit,
    )


def paper_gain(rates: OffloadRates) -> float:
    """Speedup of the paper's split over prefetched KV alone: (1 + rho) / (xi + rho)."""
    if rates.x_ratio >= 1:
        return 1.0
    return (1 + rates.recompute_ratio) / (rates.x_ratio + rates.recompute_ratio)


def pipelined_gain(rates: OffloadRates) -> float:
    """Speedup of the pipelined split at c = w = 0: min(1 / xi, 1 + (1 - xi) / rho)."""
    xi, rho = rates.x_ratio, rates.recompute_ratio
    if xi >= 1:
        return 1.0
    return min(1 / xi if xi else math.inf, 1 + (1 - xi) / rho if rho else math.inf)
