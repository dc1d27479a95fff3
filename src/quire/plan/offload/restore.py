"""Bringing a prefix back from a slow tier: its front is read again while its back is loaded.

    | read again, from the front >      < loaded |
    0                    read_tokens             tokens      l and N of the formulas

Reading l tokens takes alpha l^2 + beta l, loading the others kappa (N - l); they meet where

    alpha l^2 + (beta + kappa) l = kappa N + what loading takes whatever it loads

(Cake). Attention is why the front is what is read: its tokens have the least before them.
"""

from dataclasses import dataclass

from quire.plan.cost import positive_root
from quire.plan.offload.split import whole_units
from quire.plan.rates import PrefillRates


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """Bringing tokens from where they are stored to the device.

    Attributes:
        token_s: kappa, of a token of all layers.
        call_s: of a load, whatever it loads.
    """

    token_s: int | float
    call_s: int | float = 0.0

    def seconds(self, tokens: int | float) -> float:
        """Time of so many tokens; none take none."""
        return self.call_s + self.token_s * tokens if tokens else 0.0


def read_seconds(prefill: PrefillRates, tokens: int | float) -> float:
    """Time to read so many tokens from the beginning; none take none."""
    if not tokens:
        return 0.0
    return prefill.call_s + prefill.token_s * tokens + prefill.square_s * tokens**2


def restore_seconds(
    prefill: PrefillRates, loading: Loading, tokens: int, read_tokens: int
) -> float:
    """Time of both at once, the front read and the rest loaded."""
    loaded_s = loading.seconds(tokens - read_tokens)
    return max(read_seconds(prefill, read_tokens), loaded_s)


def restore_split(prefill: PrefillRates, loading: Loading, tokens: int, unit: int = 1) -> int:
    """Tokens of the front to read again; 0 loads all, `tokens` reads all.

    Args:
        prefill: of the model.
        loading: from the tier.
        tokens: of the prefix.
        unit: tokens that go together.
    """
    constant_s = loading.token_s * tokens + loading.call_s - prefill.call_s
    best = 0.0
    if constant_s > 0:
        best = positive_root(prefill.square_s, prefill.token_s + loading.token_s, constant_s)
    found = (0, tokens, *whole_units(best, tokens, unit))
    return min(found, key=lambda x: (restore_seconds(prefill, loading, tokens, x), x))
