"""Formulas of KV offload that no engine evaluates: tests compare schedules and plans with them."""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.errors import ConfigError
from quire.plan.cost import Costs, positive_root
from quire.plan.offload.resident import LayerWeights
from quire.plan.offload.split import Loading, OffloadRates, pipelined_seconds
from quire.plan.rates import CopyRate, PrefillRates


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


def first_layer_seconds(
    rates: OffloadRates,
    weights: LayerWeights,
    tokens: int | float,
    x_tokens: int | float,
    *,
    fine: bool,
) -> float:
    """Time of a layer without prefetch, for two orders of its weights on the link.

    coarse   W_K W_V W_Q W_O | X | KV | MLP      recomputing waits for all of attention's weights
    fine     W_K W_V | X | KV | W_Q W_O | MLP    recomputing runs while W_Q and W_O arrive

    Args:
        rates: `other_s` comes behind everything, `link_s` is left out.
        weights: of the layer.
        tokens: of the batch.
        x_tokens: of these, recomputed.
        fine: which of the two.
    """
    before_s = weights.kv_s if fine else weights.kv_s + weights.qo_s
    x_s, transfer_s = rates.x_s * x_tokens, rates.kv_s * (tokens - x_tokens)
    recomputed_s = before_s + x_s + rates.recompute_s * x_tokens
    attention_s = max(recomputed_s, weights.kv_s + weights.qo_s + x_s + transfer_s)
    return max(attention_s, weights.total_s + x_s + transfer_s) + rates.other_s


def effective_bytes_per_s(rate: CopyRate, num_bytes: int | float) -> float:
    """Rate of copies of this size: B * m / (m + m_half), where m_half = call_s * B.

    Raises:
        ConfigError: nothing is copied.
    """
    if num_bytes <= 0:
        raise ConfigError(f"expected bytes to copy, got {num_bytes}")
    return num_bytes / rate.seconds(num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One store on the way from a slow tier to the device.

    Attributes:
        bytes_per_s: that it passes on.
        chunk_bytes: it must have whole before it passes them on.
    """

    bytes_per_s: int | float
    chunk_bytes: int | float


def chain_seconds(stages: Sequence[Stage], num_bytes: int | float) -> float:
    """Time through stores one behind the other, chunk by chunk: the slowest, and filling.

    Args:
        stages: from the tier to the device, equal chunks.
        num_bytes: to transfer, at least one chunk.

    Raises:
        ConfigError: no stage, or chunks that differ.
    """
    chunks = {stage.chunk_bytes for stage in stages}
    if len(chunks) != 1:
        raise ConfigError(f"expected stages with equal chunks, got {sorted(chunks)}")
    (chunk,) = chunks
    fill_s = sum(chunk / stage.bytes_per_s for stage in stages)
    slowest = min(stage.bytes_per_s for stage in stages)
    return fill_s + max(0.0, num_bytes - chunk) / slowest


def x_restore_seconds(rates: OffloadRates, tokens: int | float, num_layers: int) -> float:
    """Time to load a prefix from its activations alone, link and device in parallel."""
    layer_s = max(rates.x_s, rates.recompute_s) * tokens
    return num_layers * layer_s + min(rates.x_s, rates.recompute_s) * tokens


def loading_pays_from(prefill: PrefillRates, loading: Loading) -> float:
    """Tokens from which on loading all is faster than recomputing all.

    Returns:
        0 if it always is, infinity if it never is.
    """
    fixed_s = loading.call_s - prefill.call_s
    linear_s = prefill.token_s - loading.token_s
    if fixed_s <= 0 and (linear_s >= 0 or linear_s**2 + 4 * prefill.square_s * fixed_s < 0):
        return 0.0
    return positive_root(prefill.square_s, linear_s, fixed_s)


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
