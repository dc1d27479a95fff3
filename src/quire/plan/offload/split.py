"""How many tokens to recompute from activations while the KV of the others is on the wire.

    | X: recomputed    | KV: transferred |
    0               x_tokens          tokens          l and S of the formulas

One layer at a time (the paper, its equation 10): X lands, then recomputing and KV overlap.

    T_A(l) = x l + max(r l, k (S - l))                l_A = k S / (k + r)

Pipelined: while a layer is recomputed and attended to, the link brings the next one's X and KV.

    T_B(l) = max(w + x l + k (S - l), r l + c)        l_B = (w + k S - c) / (k - x + r)

w and c are `link_s` and `other_s`. A first layer has nothing to hide behind: over L layers, with
two slots or more, a step takes T_A(l) + c + (L - 1) T_B(l), exactly.

Differs from the paper: it takes l_A, whatever its runtime overlaps; l_B is up to 1.3 times faster.
"""

import math

from quire.errors import ConfigError
from quire.plan.offload.rates import OffloadRates


def paper_seconds(rates: OffloadRates, tokens: int | float, x_tokens: int | float) -> float:
    """T_A: a layer whose activations land before anything overlaps; equation 10."""
    carried_s = rates.kv_s * (tokens - x_tokens)
    return rates.x_s * x_tokens + max(rates.recompute_s * x_tokens, carried_s)


def pipelined_seconds(rates: OffloadRates, tokens: int | float, x_tokens: int | float) -> float:
    """T_B: a layer in the steady state, link and device both at work."""
    carried_s = rates.x_s * x_tokens + rates.kv_s * (tokens - x_tokens)
    return max(rates.link_s + carried_s, rates.recompute_s * x_tokens + rates.other_s)


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


def pipelined_split(rates: OffloadRates, tokens: int, unit: int = 1) -> int:
    """l_B, of whole units the best; 0 where activations do not pay. See `paper_split`."""
    if rates.x_s >= rates.kv_s:
        return 0
    spare_s = rates.link_s + rates.kv_s * tokens - rates.other_s
    best = spare_s / (rates.kv_s - rates.x_s + rates.recompute_s)
    found = whole_units(best, tokens, unit)
    return min(found, key=lambda x: (pipelined_seconds(rates, tokens, x), x))


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


def whole_units(best: float, tokens: int, unit: int) -> tuple[int, int]:
    """The whole units around a split, at most all tokens.

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
    """Divide activation tokens over rows in whole pages from each front; only the sum costs.

    Rows get equal shares of their lengths; what rounding leaves goes to the longest rests. Rows
    that are taken whole need not end on a page's border.

    Args:
        tokens: of each row.
        x_tokens: of all rows together.
        page_tokens: of a page.

    Returns:
        Tokens of each row; they sum to at most `x_tokens`, and miss less than a page of it unless
        only parts of pages are left.
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
