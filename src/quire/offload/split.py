"""Number of tokens to recompute while the KV of the others is loaded over the link.

    | recomputed | loaded |
    0            l        S                    l = argmin max(recompute(l), load(S - l))

With every token recompute takes longer and the load less time, so `balance` finds l by bisection.
Three questions have this form:

    running requests   l tokens of a layer from their activations X, while the link transfers X and
                       KV of the next layer: T(l) = max(r l + c, w + x l + k (S - l))
    CPU attention      a tokens of a layer on the CPU: max(u a + c, T of the others)
    prefix in a tier   prefill of the first l tokens, load of the others

w and c are `link_s` and `other_s`. So the best split of running requests is near

    l_B = (w + k S - c) / (k - x + r)

`MeasuredRates` measures k, x, r, u and c: it smooths the times of all operations of every step.

Source: KVPR (Jiang et al. 2025).

Differs from the paper: its runtime overlaps nothing with the copy of X of a layer, so its split is
l_A = k S / (k + r) (equation 10). With overlap l_B is up to 1.3 times faster.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

from quire.errors import ConfigError
from quire.layout.model import ModelSpec
from quire.offload.step_log import ATTEND, HOST_ATTEND, KV_IN, LAYER, PROJECT, X_IN, Timed
from quire.plan.fitting import RateEstimator
from quire.plan.rates import PrefillRates


def balance(
    rising: Callable[[int], float], falling: Callable[[int], float], tokens: int, unit: int = 1
) -> int:
    """The number of tokens with the least max(rising, falling); the smallest of equals.

    Args:
        rising: seconds that increase with the number of tokens.
        falling: seconds that decrease with it.
        tokens: the most tokens; they need not be whole units.
        unit: granularity in tokens, such as a page.

    Raises:
        ConfigError: negative tokens, or a unit below 1.
    """
    if tokens < 0 or unit < 1:
        raise ConfigError(
            f"expected tokens of 0 or more in units of 1 or more, got {tokens}, {unit}"
        )

    def at(units: int) -> int:
        return min(units * unit, tokens)

    def crosses(units: int) -> bool:
        return rising(at(units)) >= falling(at(units))

    first = bisect_left(range(-(-tokens // unit)), True, key=crosses)
    return min(
        (at(max(first - 1, 0)), at(first)), key=lambda found: max(rising(found), falling(found))
    )


# ---- running requests ----------------------------------------------------------------------------


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

    @property
    def x_ratio(self) -> float:
        """Xi: transfer time of an activation over that of its KV. Activations pay below 1."""
        return self.x_s / self.kv_s

    @property
    def recompute_ratio(self) -> float:
        """Rho: recompute time of KV over its transfer time."""
        return self.recompute_s / self.kv_s


def pipelined_seconds(rates: OffloadRates, tokens: int | float, x_tokens: int | float) -> float:
    """Time of a layer in the steady state, with link and device in parallel."""
    return max(_device_s(rates, x_tokens), _link_s(rates, tokens, x_tokens))


def _device_s(rates: OffloadRates, x_tokens: int | float) -> float:
    return rates.recompute_s * x_tokens + rates.other_s


def _link_s(rates: OffloadRates, tokens: int | float, x_tokens: int | float) -> float:
    return rates.link_s + rates.x_s * x_tokens + rates.kv_s * (tokens - x_tokens)


def pipelined_split(rates: OffloadRates, tokens: int, unit: int = 1) -> int:
    """Tokens to recompute, in whole units; 0 if activations do not pay.

    Args:
        rates: rates of a layer.
        tokens: tokens of all rows.
        unit: granularity in tokens, such as a page or a sequence.
    """
    if rates.x_s >= rates.kv_s:
        return 0
    return balance(lambda x: _device_s(rates, x), lambda x: _link_s(rates, tokens, x), tokens, unit)


def embedded_step_seconds(
    rates: OffloadRates, tokens: int, x_tokens: int, num_layers: int
) -> float:
    """Time of a step; its first layer overlaps with no other and is recomputed from token ids."""
    first_s = max(rates.recompute_s * x_tokens, rates.kv_s * (tokens - x_tokens)) + rates.other_s
    return first_s + (num_layers - 1) * pipelined_seconds(rates, tokens, x_tokens)


def host_split(rates: OffloadRates, tokens: int, unit: int = 1) -> int:
    """Tokens that the CPU attends to while link and device divide the others; 0 without a rate.

    CPU attention of a layer starts when its queries are there, so `other_s` adds to its time.
    Arguments as for `pipelined_split`.
    """
    if rates.host_s == math.inf:
        return 0

    def others_s(host: int) -> float:
        left = tokens - host
        return pipelined_seconds(rates, left, pipelined_split(rates, left))

    return balance(lambda n: rates.host_s * n + rates.other_s * (n > 0), others_s, tokens, unit)


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


# ---- measured rates ------------------------------------------------------------------------------

COPY = "copy"
"""Operations with one rate for KV and X."""

# An estimate of 0 would stay 0, so coefficients start at no less than these.
_MIN_CALL_S, _MIN_UNIT_S = 1e-6, 1e-12


class MeasuredRates:
    """Rates of the operations of a step: seconds = call_s + bytes or tokens * unit_s.

    They are measured at the start and exponentially smoothed over the operations of every step,
    because concurrent operations slow each other down.

    Args:
        prior: (call_s, unit_s) by kind: COPY, or a name of `quire.offload.step_log`. A kind without
            one starts with the first operation of the kind.
        kv_bytes: KV of a token in a layer.
        x_bytes: activation of a token in a layer.
        weight_bytes: offloaded weights of a mean layer.

    Attributes:
        kv_bytes, x_bytes, weight_bytes: see above.
    """

    def __init__(
        self,
        prior: Mapping[str, tuple[float, float]],
        *,
        kv_bytes: int | float,
        x_bytes: int | float,
        weight_bytes: int | float = 0,
    ) -> None:
        self.kv_bytes, self.x_bytes, self.weight_bytes = kv_bytes, x_bytes, weight_bytes
        self._estimates = {kind: _estimator(*seconds) for kind, seconds in prior.items()}

    def call_and_unit_s(self, kind: str) -> tuple[float, ...]:
        """Current estimates for a kind of operation; 0 before the first one."""
        return self._estimates[kind].coefficients if kind in self._estimates else (0.0, 0.0)

    def learn(self, timed: Sequence[Timed]) -> None:
        """Learn from the operations of a step."""
        for item in timed:
            units, seconds = item.num_bytes or item.tokens, item.end_s - item.start_s
            if not units or seconds <= 0:
                continue
            kind = COPY if item.kind in (KV_IN, X_IN) else item.kind
            if kind not in self._estimates:
                self._estimates[kind] = _estimator(0.0, seconds / units)
            self._estimates[kind].add((1.0, float(units)), seconds)

    def layer(self, tokens: int, *, batches: int = 1, chunks: int = 0) -> OffloadRates:
        """Rates of a layer of one batch.

        Args:
            tokens: tokens of all rows, which the device attends to.
            batches: batches that share the transfer of the layer's weights.
            chunks: copies of X, each followed by a recompute; their fixed times count.
        """
        copy_s, byte_s = self.call_and_unit_s(COPY)
        project_s, token_s = self.call_and_unit_s(PROJECT)
        attend_s, attend_token_s = self.call_and_unit_s(ATTEND)
        return OffloadRates(
            kv_s=self.kv_bytes * byte_s,
            x_s=self.x_bytes * byte_s,
            recompute_s=token_s,
            host_s=self.call_and_unit_s(HOST_ATTEND)[1] or math.inf,
            other_s=attend_s
            + attend_token_s * tokens
            + sum(self.call_and_unit_s(LAYER))
            + chunks * project_s,
            link_s=self.weight_bytes * byte_s / batches + chunks * copy_s,
        )


def _estimator(call_s: float, unit_s: float) -> RateEstimator:
    return RateEstimator((max(call_s, _MIN_CALL_S), max(unit_s, _MIN_UNIT_S)))


# ---- prefixes in a tier --------------------------------------------------------------------------


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
    return balance(
        lambda read: read_seconds(prefill, read),
        lambda read: loading.seconds(tokens - read),
        tokens,
        unit,
    )


# ---- whether activations pay ---------------------------------------------------------------------


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
