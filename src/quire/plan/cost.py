"""Costs of preempting a sequence: swap, recompute, or a hybrid of both.

    | head: recomputed           | tail: swapped            |
    0                     keep_from                      tokens

Swap transfers a sequence's bytes over a link twice. Recompute costs arithmetic that grows faster
than the length. Which one is cheaper depends on rates, so they are arguments (`plan.rates`).
"""

import math
from dataclasses import dataclass
from typing import Literal

from quire.errors import ConfigError
from quire.plan.rates import Costs

How = Literal["swap", "recompute", "hybrid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """The state of a sequence that preemption costs depend on.

    Raises:
        ConfigError: a negative number, or more cached tokens than tokens.
    """

    tokens: int  # computed
    kv_bytes: int  # to swap
    cached_tokens: int = 0  # leading tokens that the prefix cache retains, which cost nothing
    page_tokens: int = 0  # granularity of splits; 0 if the sequence cannot be split

    def __post_init__(self) -> None:
        if min(self.tokens, self.kv_bytes, self.cached_tokens, self.page_tokens) < 0:
            raise ConfigError(f"expected numbers of 0 or more, got {self}")
        if self.cached_tokens > self.tokens:
            raise ConfigError(
                f"expected at most {self.tokens} cached tokens, the length of the sequence, got "
                f"{self.cached_tokens}"
            )

    def tail_bytes(self, keep_from: int) -> int:
        pages = -(-self.tokens // self.page_tokens)
        return self.kv_bytes - self.kv_bytes * (keep_from // self.page_tokens) // pages


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionChoice:
    """Method of a preemption, with its predicted time."""

    how: How  # swap, recompute or hybrid
    seconds: int | float  # predicted, of preemption and resumption
    keep_from: int = 0  # first token that a hybrid swaps; else 0
    reason: str = ""


def swap_seconds(costs: Costs, num_bytes: int | float, *, pieces: int = 1) -> float:
    """Time to swap KV out and in; `pieces` are its extents in host memory."""
    copies = costs.copies
    return copies.out.seconds(num_bytes, pieces) + copies.back.seconds(num_bytes, pieces)


def recompute_seconds(costs: Costs, tokens: int, cached: int = 0) -> float:
    """Time to recompute `tokens` tokens without the first `cached`.

    A chunk shares its step with other requests, so it is charged by its size: a chunk of a quarter
    of `chunk_tokens` costs a quarter of `call_s`.
    """
    prefill = costs.prefill
    per_token_s = prefill.token_s + prefill.call_s / costs.chunk_tokens
    return per_token_s * (tokens - cached) + prefill.square_s * (tokens**2 - cached**2)


def hybrid_seconds(costs: Costs, holding: Holding, keep_from: int) -> float:
    """Time to swap the tail from `keep_from` on and to recompute the head.

    Both run one after the other: the tail is appended to a complete head. Differs from loading a
    prefix from a slow tier (Cake), where both overlap and the longer time counts.
    """
    head_s = recompute_seconds(costs, keep_from, min(holding.cached_tokens, keep_from))
    return head_s + swap_seconds(costs, holding.tail_bytes(keep_from))


def best_split(costs: Costs, holding: Holding, host_bytes: int) -> int | None:
    """The page boundary with the cheapest hybrid, of those whose tail fits in host memory.

    A swap of a token's KV out and in takes k seconds, prefill of l tokens t * l + a * l^2 seconds.
    The sum t * l + a * l^2 + k * (tokens - l) is lowest at l = (k - t) / (2 a).
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
    splits = {min(max(near + step, low), high) for step in (0, page)}
    return min(splits, key=lambda split: hybrid_seconds(costs, holding, split))


def choose(costs: Costs, holding: Holding, host_bytes: int) -> PreemptionChoice:
    """Choose the cheapest method to preempt a sequence.

    Swap wins ties: only swap restores identical bytes.
    """
    recompute_s = recompute_seconds(costs, holding.tokens, holding.cached_tokens)
    choices = [PreemptionChoice(how="recompute", seconds=recompute_s)]
    if holding.kv_bytes <= host_bytes:
        swap_s = swap_seconds(costs, holding.kv_bytes)
        choices.insert(0, PreemptionChoice(how="swap", seconds=swap_s))
    split = best_split(costs, holding, host_bytes)
    if split is not None:
        split_s = hybrid_seconds(costs, holding, split)
        choices.append(PreemptionChoice(how="hybrid", seconds=split_s, keep_from=split))
    best = min(choices, key=lambda choice: choice.seconds)
    return PreemptionChoice(
        how=best.how,
        seconds=best.seconds,
        keep_from=best.keep_from,
        reason=_reason(choices, holding, host_bytes),
    )


def _reason(choices: list[PreemptionChoice], holding: Holding, host_bytes: int) -> str:
    parts = [f"{choice.how} {choice.seconds * 1e3:.2f} ms" for choice in choices]
    if choices[0].how != "swap":
        parts.append(f"{holding.kv_bytes:,} B exceed the {host_bytes:,} B free in the host pool")
    return ", ".join(parts)
