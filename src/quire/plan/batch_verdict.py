"""Recommends whether to evict during prefill, with reasons.

Eviction during prefill gains time only by a larger batch. It has two costs: prefill in chunks is
slower, and tokens are evicted before the whole prompt is known. So it takes more time if the batch
does not grow:

    batch fixed, prompts fit      prefill whole prompts, evict during decode
    prompt within the cap         no token is evicted before decode: both schedules are equal
    memory ample                  the wanted rows fit with all their tokens: evict nothing

Source: Batch-Max (Metel et al. 2025), section 1, which names the first two.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

from quire.errors import ConfigError
from quire.layout.eviction import (
    DECODE,
    PREFILL_AND_DECODE,
    PREFILL_END,
    PRESSURE,
    EvictionSpec,
    parse_policy,
)
from quire.plan.rates import DecodeRates, PrefillRates, StepRates


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStep:
    """Work of one row in a step."""

    new: int  # tokens processed
    before: int  # slots of a lane before them, without evicted ones
    evicted_from: int = 0  # slots that the eviction before the step selected from; 0 without one
    decodes: bool = False

    @property
    def squares(self) -> int:
        """Squared positions that the cost of prefill attention is proportional to."""
        return (self.before + self.new) ** 2 - self.before**2


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSeconds:
    """Time of a static batch."""

    prefill_s: float  # until every row has its first token
    decode_s: float
    new_tokens: int  # of all rows

    @property
    def tokens_per_s(self) -> float:
        return self.new_tokens / (self.prefill_s + self.decode_s)


def row_steps(spec: EvictionSpec, prompt_tokens: int, new_tokens: int) -> Iterator[RowStep]:
    """Generate the steps of one row of a static batch.

    Lanes with unequal caps count as lanes of the common one. `pressure` evicts nothing: a static
    batch fits in memory.
    """
    if min(prompt_tokens, new_tokens) < 1:
        raise ConfigError(
            f"expected a prompt and an output of 1 token or more, got {prompt_tokens} and "
            f"{new_tokens}"
        )
    held = done = 0
    for new in chain(_chunks(spec, prompt_tokens), repeat(1, new_tokens - 1)):
        kept = _kept(spec, held, done - prompt_tokens, new)
        yield RowStep(
            new=new,
            before=kept,
            evicted_from=held if kept < held else 0,
            decodes=done >= prompt_tokens,
        )
        held, done = kept + new, done + new


def _chunks(spec: EvictionSpec, prompt_tokens: int) -> Iterator[int]:
    first = min(prompt_tokens, spec.min_cap) if spec.evicts_during_prefill else prompt_tokens
    yield first
    for start in range(first, prompt_tokens, spec.every):
        yield min(spec.every, prompt_tokens - start)


def _kept(spec: EvictionSpec, held: int, decoded: int, new: int) -> int:
    """Slots retained before `new` tokens; `decoded` counts output tokens, < 0 in prefill."""
    if spec.cap is None or spec.when == PRESSURE or (spec.when == DECODE and decoded < 0):
        return held
    if spec.when == PREFILL_END:
        return min(held, spec.cap) if decoded == 0 else held
    return spec.cap - spec.every if held + new > spec.cap else held


def run_seconds(rates: StepRates, steps: Iterable[RowStep], rows: int) -> RunSeconds:
    """Time of a static batch whose rows all take these steps."""
    if rows < 1:
        raise ConfigError(f"expected 1 row or more, got {rows}")
    prefill_s = decode_s = 0.0
    new_tokens = rows
    for step in steps:
        if step.decodes:
            decode_s += decode_step_seconds(rates, step, rows)
            new_tokens += rows
        else:
            prefill_s += prefill_step_seconds(rates, step, rows)
    return RunSeconds(prefill_s=prefill_s, decode_s=decode_s, new_tokens=new_tokens)


def prefill_step_seconds(rates: StepRates, step: RowStep, rows: int) -> float:
    """Seconds of a prefill step, including the eviction before it."""
    of: PrefillRates = rates.blocks if step.before else rates.whole
    return of.call_s + rows * (of.token_s * step.new + of.square_s * step.squares)


def decode_step_seconds(rates: StepRates, step: RowStep, rows: int) -> float:
    """Seconds of a decode step, including the eviction before it."""
    of: DecodeRates = rates.decode
    products_s = max(of.products_s(rows), rates.whole.token_s * rows)
    slots_s = of.slot_s * rows * (step.before + step.new)
    if step.evicted_from:
        slots_s += rows * (of.evict_row_s + of.evict_slot_s * step.evicted_from)
    return products_s + slots_s


FULL, DECODE_ONLY, EXTREME, BOTH_PHASES = (
    "full",
    "decode",
    "decode_extreme",
    "prefill_and_decode",
)
ARMS = (FULL, DECODE_ONLY, EXTREME, BOTH_PHASES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmBatch:
    """The batch of one variant of eviction."""

    arm: str  # one of ARMS
    rows: int  # that fit in memory at once
    tokens_per_s: float | None = None  # predicted; None if rates were not measured


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockVerdict:
    """The recommendation."""

    pays: bool | None  # None if that depends on unmeasured times
    reasons: tuple[str, ...]  # sentences with the decisive numbers


def judge_blocks(
    arms: Sequence[ArmBatch],
    *,
    cap: int,
    prompt_tokens: int,
    new_tokens: int,
    batch: int | None = None,
) -> BlockVerdict:
    """Decide whether eviction during prefill pays."""
    rows = {found.arm: found.rows for found in arms}
    held = prompt_tokens + new_tokens - 1
    if held <= cap:
        reason = (
            f"a row holds at most {held:,} tokens, within the cap of {cap:,}: nothing is evicted"
        )
        return BlockVerdict(pays=False, reasons=(reason,))
    if prompt_tokens <= cap:
        reason = (
            f"the prompt of {prompt_tokens:,} tokens is within the cap of {cap:,}: nothing is "
            "evicted during prefill; when=decode gives the same result"
        )
        return BlockVerdict(pays=False, reasons=(reason,))
    if batch is not None:
        return _for_fixed(batch, rows)
    whole = max(rows[DECODE_ONLY], rows[EXTREME])
    more = rows[BOTH_PHASES]
    if not whole + more:
        reason = "not one request fits, with or without eviction: it needs more KV memory"
        return BlockVerdict(pays=False, reasons=(reason,))
    ample = "not one request fits with full KV or with eviction in decode only"
    if whole:
        full = f"up to {rows[FULL]:,} rows fit" if rows[FULL] else "not one request fits"
        ample = (
            f"{full} with full KV, and up to {whole:,} rows with eviction in decode only: up to "
            "these batch sizes, do not evict during prefill"
        )
    if more <= whole:
        reason = (
            f"the batch is not larger: {more:,} rows with eviction in prefill, {whole:,} rows "
            "with eviction in decode only"
        )
        return BlockVerdict(pays=False, reasons=(reason, ample))
    larger = (
        f"the batch is larger: {more:,} rows with eviction in prefill, {whole:,} rows with "
        "eviction in decode only"
    )
    pays, compared = _by_time(arms)
    return BlockVerdict(pays=pays, reasons=(larger, compared, ample))


def _for_fixed(batch: int, rows: dict[str, int]) -> BlockVerdict:
    whole = max(rows[DECODE_ONLY], rows[EXTREME])
    if batch <= rows[FULL]:
        reason = f"the memory suffices: {batch:,} rows fit with full KV"
        return BlockVerdict(pays=False, reasons=(reason,))
    if batch <= whole:
        reason = (
            f"the whole prompts of the fixed batch of {batch:,} rows fit: evict during decode "
            "only (when=decode)"
        )
        return BlockVerdict(pays=False, reasons=(reason,))
    if batch <= rows[BOTH_PHASES]:
        reason = f"whole prompts fit for {whole:,} rows only, the batch has {batch:,} rows"
        return BlockVerdict(pays=True, reasons=(reason,))
    reason = f"no variant fits {batch:,} rows: at most {rows[BOTH_PHASES]:,} fit with this cap"
    return BlockVerdict(pays=False, reasons=(reason,))


def _by_time(arms: Sequence[ArmBatch]) -> tuple[bool | None, str]:
    speeds = {found.arm: found.tokens_per_s for found in arms if found.rows}
    own = speeds.pop(BOTH_PHASES)
    others = [speed for speed in speeds.values() if speed is not None]
    if own is None or len(others) < len(speeds):
        return None, "step times of these rules were not measured on this machine"
    if not others:
        return True, "no row fits with the other variants"
    best = max(others)
    return own > best, f"predicted {own:,.0f} tokens/s: {own / best:.2f} x the best other variant"


# ---- batch rules ---------------------------------------------------------------------------------

# The variants of eviction that are compared, each as a value of `--evict`.
#
# arm                    tokens evicted, and when
# full                   none
# decode                 by the rule down to cap - every, after the whole prompt's prefill
# decode_extreme         all but the two newest: no decode-only rule attends to fewer tokens
# prefill_and_decode     by the rule: prompt and output stay within the cap
#
# Source: Batch-Max (Metel et al. 2025), Algorithm 1 (the last) and Algorithm 2 (the third).

DEFAULT_RULE, DEFAULT_CAP = "average", "25%"  # of 3,584 tokens: the 896 of Batch-Max


def with_numbers(evict: str, *, cap: int | str, every: int | str | None, when: str) -> str:
    """Replace the cap and schedule of a rule; its other options are unchanged."""
    parsed = parse_policy(evict)
    numbers = {"cap": str(cap)} | ({} if every is None else {"every": str(every)}) | {"when": when}
    options = ",".join(f"{k}={v}" for k, v in (dict(parsed.options) | numbers).items())
    return f"{parsed.name}:{options}"


def arm_rules(
    evict: str | None = None, *, cap: str | None = None, every: int | None = None
) -> dict[str, str]:
    """The rule of each arm, as text; default: Batch-Max's own, and its fraction of the prompt."""
    parsed = parse_policy(evict or DEFAULT_RULE)
    if parsed.name == FULL:
        raise ConfigError("evict=full retains all tokens: name a rule, such as average:cap=25%")
    found = cap or parsed.options.get("cap", DEFAULT_CAP)
    text = evict or DEFAULT_RULE
    return {
        FULL: FULL,
        DECODE_ONLY: with_numbers(text, cap=found, every=every, when=DECODE),
        EXTREME: f"recent:cap=2,every=1,when={DECODE}",
        BOTH_PHASES: with_numbers(text, cap=found, every=every, when=PREFILL_AND_DECODE),
    }
