"""Formulas of KV offload that no engine evaluates: tests compare splits with them."""

from quire.errors import ConfigError
from quire.offload.split import OffloadRates, pipelined_seconds


def serial_seconds(rates: OffloadRates, tokens: int | float, x_tokens: int | float) -> float:
    """Recompute, then transfer (ALISA): nothing overlaps within a layer."""
    transfer_s = rates.x_s * x_tokens + rates.kv_s * (tokens - x_tokens)
    return rates.link_s + transfer_s + rates.recompute_s * x_tokens + rates.other_s


def step_seconds(
    rates: OffloadRates,
    tokens: int | float,
    x_tokens: int | float,
    num_layers: int,
    chunks: int = 1,
) -> float:
    """A step through all layers with nothing but KV and X on the wire: the first, then steady ones.

    Args:
        tokens, x_tokens: of each layer, and of these, recomputed.
        chunks: equal segments of X; the KV of each is recomputed when it is loaded.

    Raises:
        ConfigError: `link_s` is not 0: its place in the transfer order is unknown.
    """
    if rates.link_s:
        raise ConfigError(f"expected nothing else on the link, got link_s={rates.link_s}")
    landed_s, made_s = rates.x_s * x_tokens, rates.recompute_s * x_tokens
    recomputed_s = max(landed_s / chunks + made_s, landed_s + made_s / chunks)
    first_s = max(recomputed_s, landed_s + rates.kv_s * (tokens - x_tokens)) + rates.other_s
    return first_s + (num_layers - 1) * pipelined_seconds(rates, tokens, x_tokens)
