"""Costs of preempting a sequence: swap, recompute, or a hybrid of both.

    | head: recomputed           | tail: swapped            |
    0                     keep_from                      tokens

Swap transfers a sequence's bytes over a link twice. Recompute costs arithmetic that grows faster
than the length. Which one is cheaper depends on rates, so they are arguments (`plan.rates`): stored
or assumed at first, then learned from this run.
"""

import math
from dataclasses import dataclass
from typing import Literal

from quire.errors import ConfigError
from quire.layout.model import ModelSpec
from quire.plan.ceilings import Ceilings, NotUsable
from quire.plan.fitting import RateEstimator
from quire.plan.rates import CopyRate, CopyRates, Costs, PrefillRates, model_key

How = Literal["swap", "recompute", "hybrid"]

# lower than any machine of the last ten years; samples of the run soon replace them
ASSUMED_COPY = CopyRate(bytes_per_s=2e9, call_s=1e-4, piece_s=2e-5)
ASSUMED_FLOPS_PER_S = 5e10


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


@dataclass(frozen=True, slots=True)
class KnownCosts:
    """Initial costs."""

    costs: Costs
    notice: str  # assumed rates, and how to measure them; empty if all are measured


def known_costs(
    found: Ceilings | NotUsable,
    model: ModelSpec,
    *,
    dtype: str,
    device: str,
    chunk_tokens: int,
    weight_codec: str = "auto",
) -> KnownCosts:
    """Costs from stored ceilings where available, and conservative ones for the rest."""
    missing = [found.reason] if isinstance(found, NotUsable) else []
    stored = None if isinstance(found, NotUsable) else found
    copies = stored.copies.get(device) if stored else None
    key = model_key(model, dtype=dtype, device=device, weight_codec=weight_codec)
    prefill = stored.prefill.get(key) if stored else None
    if stored and copies is None:
        missing.append(f"copies with {device} were not measured: run `quire profile`")
    if stored and prefill is None:
        missing.append("prefill of this model was not measured: run `quire profile MODEL`")
    costs = Costs(
        copies=copies or CopyRates(out=ASSUMED_COPY, back=ASSUMED_COPY),
        prefill=prefill
        or assumed_prefill(model, _product_rate(stored, model, dtype, chunk_tokens)),
        chunk_tokens=chunk_tokens,
    )
    notice = f"costs of preemption are assumed at first ({'; '.join(missing)})" if missing else ""
    return KnownCosts(costs, notice)


def assumed_prefill(model: ModelSpec, flops_per_s: int | float) -> PrefillRates:
    """Prefill rates from arithmetic: 2 FLOP for each weight, and attention's two products.

    A token at position p multiplies p keys and p values of each query head: 2 * heads * (key_dim +
    value_dim) * p FLOP a layer, which sums up to heads * (key_dim + value_dim) * (b^2 - a^2) from
    a to b. Latents of a prompt are expanded to keys and values of heads if that is cheaper.
    """
    tables = model.embedding_parameters + model.lookup_parameters
    weights = model.num_active_parameters - tables
    forms = ((heads.values_per_pair, heads.values_per_expanded_pair) for heads in model.heads)
    attention = sum(map(min, forms))
    return PrefillRates(token_s=2 * weights / flops_per_s, square_s=attention / flops_per_s)


def _product_rate(
    stored: Ceilings | None, model: ModelSpec, dtype: str, chunk_tokens: int
) -> float:
    if stored is None:
        return ASSUMED_FLOPS_PER_S
    try:
        return stored.product_rate(
            chunk_tokens, model.hidden_size, model.intermediate_size, dtype=dtype
        )
    except ConfigError:  # no product was measured in this dtype
        return ASSUMED_FLOPS_PER_S


# An estimate of 0 would stay 0, so coefficients start at no less than these.
_MIN_CALL_S = 1e-4
_MIN_PIECE_S = 1e-5
_MIN_SQUARES_OF_A_TOKEN = 1e-5


class LearnedCosts:
    """Current costs of this engine on this machine."""

    def __init__(self, prior: Costs, *, forgetting: float = 0.97) -> None:
        self._chunk_tokens = prior.chunk_tokens
        self._out = _of_copies(prior.copies.out, forgetting)
        self._back = _of_copies(prior.copies.back, forgetting)
        prefill = prior.prefill
        call_s = max(prefill.call_s, _MIN_CALL_S)
        square_s = max(prefill.square_s, prefill.token_s * _MIN_SQUARES_OF_A_TOKEN)
        self._prefill = RateEstimator((call_s, prefill.token_s, square_s), forgetting)

    @property
    def costs(self) -> Costs:
        call_s, token_s, square_s = self._prefill.coefficients
        return Costs(
            copies=CopyRates(out=_rate(self._out), back=_rate(self._back)),
            prefill=PrefillRates(call_s=call_s, token_s=token_s, square_s=square_s),
            chunk_tokens=self._chunk_tokens,
        )

    @property
    def num_samples(self) -> int:
        return sum(e.num_samples for e in (self._out, self._back, self._prefill))

    def copied_out(self, num_bytes: int, seconds: int | float) -> None:
        """Learn from a swap out; it counts as one piece."""
        self._out.add((1, 1, num_bytes), seconds)

    def copied_back(self, num_bytes: int, seconds: int | float) -> None:
        """Learn from a swap in; it counts as one piece."""
        self._back.add((1, 1, num_bytes), seconds)

    def read(self, tokens: int, before: int, seconds: int | float) -> None:
        """Learn from a step with one chunk of a prompt, after `before` tokens."""
        self._prefill.add((1, tokens, (before + tokens) ** 2 - before**2), seconds)


def _of_copies(rate: CopyRate, forgetting: float) -> RateEstimator:
    call_s, piece_s = max(rate.call_s, _MIN_CALL_S), max(rate.piece_s, _MIN_PIECE_S)
    return RateEstimator((call_s, piece_s, 1 / rate.bytes_per_s), forgetting)


def _rate(estimator: RateEstimator) -> CopyRate:
    call_s, piece_s, byte_s = estimator.coefficients
    return CopyRate(bytes_per_s=1 / byte_s, call_s=call_s, piece_s=piece_s)
