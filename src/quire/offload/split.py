"""Number of tokens to recompute from activations while the KV of the others is transferred.

    | X: recomputed    | KV: transferred |
    0               x_tokens          tokens          l and S of the formulas

One layer at a time (the paper, its equation 10): X arrives, then recompute and KV overlap.

    T_A(l) = x l + max(r l, k (S - l))                l_A = k S / (k + r)

Pipelined: during recompute and attention of a layer the link transfers X and KV of the next.

    T_B(l) = max(w + x l + k (S - l), r l + c)        l_B = (w + k S - c) / (k - x + r)

w and c are `link_s` and `other_s`. The first layer overlaps with no other layer. Over L layers with
two slots or more, a step takes exactly T_A(l) + c + (L - 1) T_B(l).

Differs from the paper: it always uses l_A; with overlap l_B is up to 1.3 times faster.
"""

import math
from dataclasses import dataclass, fields, replace
from itertools import pairwise

from quire.errors import ConfigError
from quire.layout.model import ModelSpec
from quire.plan.cost import positive_root
from quire.plan.rates import PrefillRates


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadRates:
    """Rates of one layer; tokens are those of all rows together.

    Attributes:
        kv_s: k, transfer of a token's KV.
        x_s: x, transfer of its activation.
        recompute_s: r, recompute of its KV from the activation.
        host_s: u, CPU attention to it; infinite without CPU attention.
        other_s: c, the device's other work on the layer in one step.
        link_s: other transfers for the layer in one step: weights, and stores if both directions
            share the link.

    Raises:
        ConfigError: a rate below 0, or a `kv_s` or `host_s` of 0.
    """

    kv_s: int | float
    x_s: int | float
    recompute_s: int | float
    host_s: int | float = math.inf
    other_s: int | float = 0.0
    link_s: int | float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value >= 0 or (value == math.inf and field.name != "host_s"):
                raise ConfigError(f"expected {field.name} of 0 seconds or more, got {value}")
        if not self.kv_s or not self.host_s:
            raise ConfigError(f"expected kv_s and host_s above 0, got {self}")

    def with_weights(self, weights_s: int | float, batches: int = 1) -> "OffloadRates":
        """Add a batch's share of the transfer of a layer's weights, which `batches` share."""
        return replace(self, link_s=self.link_s + weights_s / batches)

    @property
    def x_ratio(self) -> float:
        """Xi: transfer time of an activation over that of its KV. Activations pay below 1."""
        return self.x_s / self.kv_s

    @property
    def recompute_ratio(self) -> float:
        """Rho: recompute time of KV over its transfer time."""
        return self.recompute_s / self.kv_s


def pipelined_seconds(rates: OffloadRates, tokens: int | float, x_tokens: int | float) -> float:
    """T_B: time of a layer in the steady state, with link and device in parallel."""
    transfer_s = rates.x_s * x_tokens + rates.kv_s * (tokens - x_tokens)
    return max(rates.link_s + transfer_s, rates.recompute_s * x_tokens + rates.other_s)


def pipelined_split(rates: OffloadRates, tokens: int, unit: int = 1) -> int:
    """l_B, rounded to the best whole unit; 0 if activations do not pay.

    Args:
        rates: rates of a layer.
        tokens: tokens of all rows.
        unit: granularity in tokens, such as a page or a sequence.
    """
    if rates.x_s >= rates.kv_s:
        return 0
    spare_s = rates.link_s + rates.kv_s * tokens - rates.other_s
    best = spare_s / (rates.kv_s - rates.x_s + rates.recompute_s)
    found = whole_units(best, tokens, unit)
    return min(found, key=lambda x: (pipelined_seconds(rates, tokens, x), x))


def whole_units(best: float, tokens: int, unit: int) -> tuple[int, int]:
    """The whole units below and above a split, at most all tokens.

    Raises:
        ConfigError: negative tokens, or a unit below 1.
    """
    if tokens < 0 or unit < 1:
        raise ConfigError(
            f"expected tokens of 0 or more in units of 1 or more, got {tokens}, {unit}"
        )
    below = math.floor(min(max(best, 0.0), tokens) / unit) * unit
    return below, min(below + unit, tokens)


def share_rows(tokens: tuple[int, ...], x_tokens: int, page_tokens: int = 1) -> tuple[int, ...]:
    """Divide recomputed tokens over rows in whole pages from each start; only the sum has a cost.

    Rows get equal fractions of their lengths; the remainder after rounding goes to the rows with
    most tokens left. Rows that are taken whole need not end at a page boundary.

    Args:
        tokens: tokens of each row.
        x_tokens: recomputed tokens of all rows together.
        page_tokens: tokens of a page.

    Returns:
        Tokens of each row. Their sum is at most `x_tokens`, and less than a page below it unless
        only partial pages are left.
    """
    total = sum(tokens)
    if not 0 <= x_tokens <= total:
        raise ConfigError(f"expected 0 to {total} tokens to divide, got {x_tokens}")
    found = [n * x_tokens // total // page_tokens * page_tokens if total else 0 for n in tokens]
    left = x_tokens - sum(found)
    for row in sorted(range(len(tokens)), key=lambda i: (found[i] - tokens[i], i)):
        rest = tokens[row] - found[row]
        more = rest if rest <= left else left // page_tokens * page_tokens
        found[row] += more
        left -= more
    return tuple(found)


# Three resources in parallel: the link transfers KV and X, the device recomputes, the CPU attends.
#
# Least T with  x l + k t <= T,  r l + c <= T,  u a (+ c) <= T,  l + t + a = S - g,  all 0 or more.
#
# In a time T the three cover tokens(T), a piecewise linear function; T is where it reaches S - g.
# With x >= k no token is recomputed and T = (S - g) / (1 / k + 1 / u) for c = 0: rates add up.
#
# Differs from the usual formula: CPU attention of a layer needs that layer's queries. So `waits`
# adds the device's other work to its time, unless another batch hides it.


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Tokens by resource, before rounding.

    Attributes:
        x_tokens: l, recomputed.
        kv_tokens: t, transferred.
        host_tokens: a, attended to on the CPU.
        seconds: T, of the layer.
    """

    x_tokens: float
    kv_tokens: float
    host_tokens: float
    seconds: float


def best_shares(
    rates: OffloadRates, tokens: int | float, resident: int | float = 0, *, waits: bool = True
) -> Shares:
    """Divide a layer's tokens over link, device and CPU.

    Args:
        rates: an infinite `host_s` excludes the CPU; `link_s` is unavailable to KV and X.
        tokens: S.
        resident: g, on the device already.
        waits: whether CPU attention starts when the layer before is done.

    Raises:
        ConfigError: more resident tokens than tokens.
    """
    if not 0 <= resident <= tokens:
        raise ConfigError(f"expected 0 to {tokens} resident tokens, got {resident}")
    requested = float(tokens - resident)
    corners = sorted({0.0, *_corners(rates)})
    for left, right in pairwise(corners):
        if _covered(rates, right, waits=waits) >= requested:
            return _at(
                rates, _between(rates, left, right, requested, waits=waits), requested, waits=waits
            )
    low = corners[-1]
    high = low + 1.0 + requested * rates.kv_s
    return _at(rates, _between(rates, low, high, requested, waits=waits), requested, waits=waits)


def _corners(rates: OffloadRates) -> tuple[float, ...]:
    """Times at which the slope of `_covered` changes: a resource starts, or X fills the link."""
    found = [float(rates.other_s), float(rates.link_s)]
    if rates.x_s > rates.recompute_s:  # r l + c = T and w + x l = T
        gap_s = rates.x_s * rates.other_s - rates.recompute_s * rates.link_s
        found.append(gap_s / (rates.x_s - rates.recompute_s))
    elif rates.x_s < rates.recompute_s:
        gap_s = rates.recompute_s * rates.link_s - rates.x_s * rates.other_s
        found.append(gap_s / (rates.recompute_s - rates.x_s))
    return tuple(corner for corner in found if corner > 0)


def _covered(rates: OffloadRates, seconds: float, *, waits: bool) -> float:
    return sum(_most(rates, seconds, waits=waits))


def _most(rates: OffloadRates, seconds: float, *, waits: bool) -> tuple[float, float, float]:
    """Most tokens of X, KV and CPU attention in this time; X first, since X is smaller than KV."""
    link_s = max(0.0, seconds - rates.link_s)
    device_s = max(0.0, seconds - rates.other_s)
    x_tokens = 0.0
    if rates.x_s < rates.kv_s:
        by_link = link_s / rates.x_s if rates.x_s else math.inf
        by_device = device_s / rates.recompute_s if rates.recompute_s else math.inf
        x_tokens = min(by_link, by_device)
    if x_tokens == math.inf:
        return x_tokens, 0.0, 0.0
    kv_tokens = max(0.0, link_s - rates.x_s * x_tokens) / rates.kv_s
    return x_tokens, kv_tokens, (device_s if waits else seconds) / rates.host_s


def _between(
    rates: OffloadRates, left: float, right: float, requested: float, *, waits: bool
) -> float:
    """The time in a linear segment at which the requested tokens are covered."""
    low, high = (_covered(rates, at, waits=waits) for at in (left, right))
    if low >= requested:
        return left
    return left + (right - left) * (requested - low) / (high - low) if high < math.inf else left


def _at(rates: OffloadRates, seconds: float, requested: float, *, waits: bool) -> Shares:
    """Tokens by resource in this time: CPU attention first, then X, then KV."""
    x_most, _, host_most = _most(rates, seconds, waits=waits)
    host_tokens = min(host_most, requested)
    x_tokens = min(x_most, requested - host_tokens)
    min_s = max(seconds, float(rates.other_s), float(rates.link_s))
    return Shares(
        x_tokens=x_tokens,
        kv_tokens=max(0.0, requested - host_tokens - x_tokens),
        host_tokens=host_tokens,
        seconds=min_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """Rate of loading tokens from a tier to the device.

    Attributes:
        token_s: kappa, seconds of one token in all layers.
        call_s: fixed cost of a load.
    """

    token_s: int | float
    call_s: int | float = 0.0

    def seconds(self, tokens: int | float) -> float:
        """Time to load tokens; 0 for 0 tokens."""
        return self.call_s + self.token_s * tokens if tokens else 0.0


def read_seconds(prefill: PrefillRates, tokens: int | float) -> float:
    """Time to prefill tokens from the start; 0 for 0 tokens."""
    if not tokens:
        return 0.0
    return prefill.call_s + prefill.token_s * tokens + prefill.square_s * tokens**2


def restore_seconds(
    prefill: PrefillRates, loading: Loading, tokens: int, read_tokens: int
) -> float:
    """Time to recompute the first tokens and load the rest concurrently."""
    loaded_s = loading.seconds(tokens - read_tokens)
    return max(read_seconds(prefill, read_tokens), loaded_s)


def restore_split(prefill: PrefillRates, loading: Loading, tokens: int, unit: int = 1) -> int:
    """Number of first tokens to recompute; 0 loads all, `tokens` recomputes all.

    Args:
        prefill: prefill rates of the model.
        loading: rate of loads from the tier.
        tokens: tokens of the prefix.
        unit: granularity of the split in tokens.
    """
    constant_s = loading.token_s * tokens + loading.call_s - prefill.call_s
    best = 0.0
    if constant_s > 0:
        best = positive_root(prefill.square_s, prefill.token_s + loading.token_s, constant_s)
    found = (0, tokens, *whole_units(best, tokens, unit))
    return min(found, key=lambda x: (restore_seconds(prefill, loading, tokens, x), x))


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
