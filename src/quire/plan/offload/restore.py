"""Bringing a prefix back from a slow tier: its front is read again while its back is loaded.

    | read again, from the front >      < loaded |
    0                    read_tokens             tokens      l and N of the formulas

Reading l tokens takes alpha l^2 + beta l, loading the others kappa (N - l); they meet where

    alpha l^2 + (beta + kappa) l = kappa N + what loading takes whatever it loads

(Cake). Attention is why the front is what is read: its tokens have the least before them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.errors import ConfigError
from quire.plan.offload.rates import OffloadRates
from quire.plan.offload.split import whole_units
from quire.plan.rates import PrefillRates
from quire.plan.roots import positive_root


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One store on the way from a slow tier to the device.

    Attributes:
        bytes_per_s: that it passes on.
        chunk_bytes: it must have whole before it passes them on.
    """

    bytes_per_s: int | float
    chunk_bytes: int | float


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


def loading_pays_from(prefill: PrefillRates, loading: Loading) -> float:
    """Tokens from which on loading all is faster than reading all.

    Returns:
        0 where it always is, infinity where it never is.
    """
    fixed_s = loading.call_s - prefill.call_s
    linear_s = prefill.token_s - loading.token_s
    if fixed_s <= 0 and (linear_s >= 0 or linear_s**2 + 4 * prefill.square_s * fixed_s < 0):
        return 0.0
    return positive_root(prefill.square_s, linear_s, fixed_s)


def chain_seconds(stages: Sequence[Stage], num_bytes: int | float) -> float:
    """Time through stores one behind the other, chunk by chunk: the slowest, and filling.

    Args:
        stages: from the tier to the device, equal chunks.
        num_bytes: to bring, a chunk or more.

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
    """Time to bring a prefix back from its activations alone, link and device both at work."""
    layer_s = max(rates.x_s, rates.recompute_s) * tokens
    return num_layers * layer_s + min(rates.x_s, rates.recompute_s) * tokens
