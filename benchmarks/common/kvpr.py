"""Formulas of the KVPR paper for one layer: rates from a data sheet, its split, and what it gains.

l_A is the paper's split (equation 10). The engine takes the pipelined split l_B instead; see
`quire.plan.offload.split`, which has the symbols.
"""

import math

from quire.errors import ConfigError
from quire.layout.model import ModelSpec
from quire.plan.offload.rates import OffloadRates
from quire.plan.offload.split import whole_units


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
        model: the shape.
        link_bytes_per_s: from host to device.
        flops_per_s: of products as wide as the hidden size.
        kv_value_bytes: of a number of KV on the link, metadata of its codec counted.
        x_value_bytes: likewise of an activation.
        host_bytes_per_s: at which the host reads KV while it attends; 0: it does not.
        other_s: see `OffloadRates`.

    Raises:
        ConfigError: a speed that is not above 0.
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
    """T_A: a layer whose activations land before anything overlaps; equation 10."""
    carried_s = rates.kv_s * (tokens - x_tokens)
    return rates.x_s * x_tokens + max(rates.recompute_s * x_tokens, carried_s)


def paper_split(rates: OffloadRates, tokens: int, unit: int = 1) -> int:
    """l_A, of whole units the best; 0 where activations do not pay.

    Args:
        rates: of a layer.
        tokens: of all rows.
        unit: tokens that go together, a page or a sequence.
    """
    if rates.x_s >= rates.kv_s:
        return 0
    best = rates.kv_s * tokens / (rates.kv_s + rates.recompute_s)
    return min(whole_units(best, tokens, unit), key=lambda x: (paper_seconds(rates, tokens, x), x))


def paper_gain(rates: OffloadRates) -> float:
    """Prefetched KV alone over the paper's split: (1 + rho) / (xi + rho)."""
    if rates.x_ratio >= 1:
        return 1.0
    return (1 + rates.recompute_ratio) / (rates.x_ratio + rates.recompute_ratio)


def pipelined_gain(rates: OffloadRates) -> float:
    """Prefetched KV alone over the pipelined split, c = w = 0: min(1 / xi, 1 + (1 - xi) / rho)."""
    xi, rho = rates.x_ratio, rates.recompute_ratio
    if xi >= 1:
        return 1.0
    return min(1 / xi if xi else math.inf, 1 + (1 - xi) / rho if rho else math.inf)
