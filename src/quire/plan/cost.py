"""What it costs to preempt a sequence: swap it, read it again, or keep its tail and read its head.

    | head: read again           | tail: on the host        |
    0                     keep_from                      tokens

Swapping takes a sequence's bytes over a link twice; reading it again takes arithmetic, which grows
faster than the length. What is cheaper depends on rates, so these are arguments (`plan.rates`).
"""

import math
from dataclasses import dataclass
from typing import Literal

from quire.errors import ConfigError
from quire.plan.rates import Costs

How = Literal["swap", "recompute", "hybrid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What a sequence holds, as far as preempting it goes.

    Attributes:
        tokens: computed ones.
        kv_bytes: that would be swapped.
        cached_tokens: from its beginning, that a prefix cache will give it again for nothing.
        page_tokens: where it may be split; 0 where it may not.

    Raises:
        ConfigError: a negative number, or more cached tokens than there are.
    """

    tokens: int
    kv_bytes: int
    cached_tokens: int = 0
    page_tokens: int = 0

    def __post_init__(self) -> None:
        if min(self.tokens, self.kv_bytes, self.cached_tokens, self.page_tokens) < 0:
            raise ConfigError(f"expected numbers of 0 or more, got {self}")
        if self.cached_tokens > self.tokens:
            raise ConfigError(f"{self.cached_tokens} cached tokens of {self.tokens}")

    def tail_bytes(self, keep_from: int) -> int:
        """Bytes of the pages from this token on, a border of pages."""
        pages = -(-self.tokens // self.page_tokens)
        return self.kv_bytes - self.kv_bytes * (keep_from // self.page_tokens) // pages


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How to preempt.

    Attributes:
        how: swap, recompute or hybrid.
        seconds: that out and back will take.
        keep_from: of a hybrid, the token from which on the KV is kept; else 0.
        reason: for people.
    """

    how: How
    seconds: int | float
    keep_from: int = 0
    reason: str = ""


def swap_seconds(costs: Costs, num_bytes: int | float, *, pieces: int = 1) -> float:
    """Time to copy KV out and back.

    Args:
        costs: rates.
        num_bytes: of the KV.
        pieces: extents it lies in on the host.
    """
    copies = costs.copies
    return copies.out.seconds(num_bytes, pieces) + copies.back.seconds(num_bytes, pieces)


def recompute_seconds(costs: Costs, tokens: int, cached: int = 0) -> float:
    """Time to read `tokens` tokens again, of which the first `cached` are still there.

    A chunk shares its step with other requests, so it is charged by how full it is: a chunk of a
    quarter of `chunk_tokens` costs a quarter of `call_s`.
    """
    prefill = costs.prefill
    per_token_s = prefill.token_s + prefill.call_s / costs.chunk_tokens
    return per_token_s * (tokens - cached) + prefill.square_s * (tokens**2 - cached**2)


def hybrid_seconds(costs: Costs, holding: Holding, keep_from: int) -> float:
    """Time to swap the tail from `keep_from` on, and to read what is before it again.

    One after the other: the tail is put behind a head that is there. Differs from restoring a
    prefix from a slow tier (Cake), where reading and loading overlap and the longer one counts.
    """
    head_s = recompute_seconds(costs, keep_from, min(holding.cached_tokens, keep_from))
    return head_s + swap_seconds(costs, holding.tail_bytes(keep_from))


def best_split(costs: Costs, holding: Holding, host_bytes: int) -> int | None:
    """The border of pages at which a hybrid costs least, of those whose tail the host holds.

    With k seconds to move a token's KV out and back, t to read a token and a for its square, the
    time is t * l + a * l^2 + k * (tokens - l) and a constant: lowest at l = (k - t) / (2 * a).

    Returns:
        The token from which on to keep; None where no border lies inside the sequence and behind
        what is cached, or no page of a tail fits.
    """
    page, prefill = holding.page_tokens, costs.prefill
    if not page or not holding.tokens:
        return None
    pages = -(-holding.tokens // page)
    page_bytes = holding.kv_bytes / pages
    kept_at_most = int(host_bytes // page_bytes) if page_bytes else pages
    low = max(1, -(-holding.cached_tokens // page), pages - kept_at_most) * page
    high = (pages - 1) * page
    if low > high:
        return None
    copies = costs.copies
    move_s = page_bytes / page * (1 / copies.out.bytes_per_s + 1 / copies.back.bytes_per_s)
    gain_s = move_s - prefill.token_s - prefill.call_s / costs.chunk_tokens
    best = gain_s / (2 * prefill.square_s) if prefill.square_s else math.copysign(math.inf, gain_s)
    near = int(min(max(best, low), high)) // page * page
    borders = {min(max(near + step, low), high) for step in (0, page)}
    return min(borders, key=lambda border: hybrid_seconds(costs, holding, border))


def choose(costs: Costs, holding: Holding, host_bytes: int) -> Choice:
    """The cheapest way to preempt a sequence.

    Where two cost the same, swapping comes first: it alone brings the very bytes back.

    Args:
        costs: rates.
        holding: what the sequence holds.
        host_bytes: free in the host pool; 0 where there is none.
    """
    recompute_s = recompute_seconds(costs, holding.tokens, holding.cached_tokens)
    choices = [Choice(how="recompute", seconds=recompute_s)]
    if holding.kv_bytes <= host_bytes:
        swap_s = swap_seconds(costs, holding.kv_bytes)
        choices.insert(0, Choice(how="swap", seconds=swap_s))
    split = best_split(costs, holding, host_bytes)
    if split is not None:
        split_s = hybrid_seconds(costs, holding, split)
        choices.append(Choice(how="hybrid", seconds=split_s, keep_from=split))
    best = min(choices, key=lambda choice: choice.seconds)
    return Choice(
        how=best.how,
        seconds=best.seconds,
        keep_from=best.keep_from,
        reason=_reason(choices, holding, host_bytes),
    )


def _reason(choices: list[Choice], holding: Holding, host_bytes: int) -> str:
    parts = [f"{choice.how} {choice.seconds * 1e3:.2f} ms" for choice in choices]
    if choices[0].how != "swap":
        parts.append(f"{holding.kv_bytes:,} B do not fit the {host_bytes:,} B of the host pool")
    return ", ".join(parts)


# ---- roots ---------------------------------------------------------------------------------------

# Where a quadratic cost meets a linear one.


def positive_root(square: int | float, linear: int | float, constant: int | float) -> float:
    """The largest root of square * n^2 + linear * n = constant.

    In the form that loses no digits where `square` is small.

    Args:
        square: 0 or more.
        linear: any.
        constant: 0 or more; less where there is a root all the same.

    Returns:
        Infinity where the left side never reaches the constant.
    """
    if not square:
        return constant / linear if linear > 0 else math.inf
    root = math.sqrt(linear**2 + 4 * square * constant)
    if linear > 0:
        return 2 * constant / (linear + root)
    return (root - linear) / (2 * square)
