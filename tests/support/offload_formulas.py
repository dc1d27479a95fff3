"""Formulas of KV offload that no engine evaluates: tests compare schedules and plans with them."""

from quire.errors import ConfigError
from quire.offload.split import OffloadRates, pipelined_seconds
from quire.plan.cost import Costs, positive_root
from quire.plan.rates import CopyRate


def row_seconds(rates: OffloadRates, tokens: int | float, x_tokens: int | float) -> float:
    """Equation 10 without its first term: the paper's row-by-row, X on the device already."""
    return max(rates.recompute_s * x_tokens, rates.kv_s * (tokens - x_tokens))


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
        rates: without `link_s`.
        tokens: of each layer.
        x_tokens: of these, recomputed.
        num_layers: 1 or more.
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


def effective_bytes_per_s(rate: CopyRate, num_bytes: int | float) -> float:
    """Rate of copies of this size: B * m / (m + m_half), where m_half = call_s * B.

    Raises:
        ConfigError: nothing is copied.
    """
    if num_bytes <= 0:
        raise ConfigError(f"expected bytes to copy, got {num_bytes}")
    return num_bytes / rate.seconds(num_bytes)


def breakeven_tokens(costs: Costs, bytes_per_token: int | float) -> float:
    """The length from which on swapping a sequence is cheaper than recomputing it.

    Swapping costs f + k * n, recomputing t * n + a * n^2: the positive root of
    a * n^2 + (t - k) * n - f.

    Args:
        costs: rates.
        bytes_per_token: of KV.

    Returns:
        Tokens; 0 if swapping is always cheaper, infinity if it never is.
    """
    copies, prefill = costs.copies, costs.prefill
    fixed_s = sum(rate.call_s + rate.piece_s for rate in (copies.out, copies.back))
    move_s = bytes_per_token * (1 / copies.out.bytes_per_s + 1 / copies.back.bytes_per_s)
    linear_s = prefill.token_s + prefill.call_s / costs.chunk_tokens - move_s
    return positive_root(prefill.square_s, linear_s, fixed_s)
