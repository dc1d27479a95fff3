"""Prefix load from a slow tier: the first tokens are recomputed while the last are loaded.

    | recomputed, from the start >      < loaded |
    0                    read_tokens             tokens      l and N of the formulas

Recompute of l tokens takes alpha l^2 + beta l, a load of the others kappa (N - l). Both end at the
same time if

    alpha l^2 + (beta + kappa) l = kappa N + fixed cost of a load

(Cake). The first tokens are recomputed because attention to them has the fewest keys.
"""

from dataclasses import dataclass

from quire.plan.cost import positive_root
from quire.plan.offload.split import whole_units
from quire.plan.rates import PrefillRates


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
