"""A static batch under an eviction: what each row does step by step, and the seconds it takes.

All rows start together, have equal lengths and run to their end side by side. A prompt is read
whole, or up to the cap and then in blocks of `every` tokens, each behind an eviction. Its last step
gives the first new token, so n new tokens take n - 1 decode steps.

With R rows, t tokens of each in a step, h slots of KV ahead of them (tokens of one row and lane),
and the measured seconds of `StepRates`:

    reading    call_s + token_s * R * t + square_s * R * ((h + t)^2 - h^2)
    decoding   max(batch_s(R), token_s * R) + slot_s * R * (h + 1)
    evicting   (evict_row_s + evict_slot_s * held) * R       before a decode step

Reading from nothing (h = 0) and in blocks have rates of their own: blocks are smaller and each
reads the cache again. How a decode step's products take longer with more rows is no straight line:
libraries have other ways for few rows than for many. So `batch_s` is measured at some numbers of
rows; no batch is faster than prompts are read (token_s).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, repeat

from quire.errors import ConfigError
from quire.layout.eviction import DECODE, PREFILL_END, PRESSURE, EvictionSpec
from quire.plan.rates import DecodeRates, PrefillRates, StepRates


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStep:
    """What one row does in a step.

    Attributes:
        new: tokens processed.
        before: slots of a lane ahead of them, what left is gone.
        evicted_from: slots an eviction before the step chose among; 0 where there was none.
        decodes: whether the token is one of the answer.
    """

    new: int
    before: int
    evicted_from: int = 0
    decodes: bool = False

    @property
    def squares(self) -> int:
        """What attention is charged by when a prompt is read."""
        return (self.before + self.new) ** 2 - self.before**2


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSeconds:
    """Time of a static batch.

    Attributes:
        prefill_s: until every row has its first token.
        decode_s: the rest.
        new_tokens: of all rows.
    """

    prefill_s: float
    decode_s: float
    new_tokens: int

    @property
    def tokens_per_s(self) -> float:
        """New tokens over the whole time, prefill counted."""
        return self.new_tokens / (self.prefill_s + self.decode_s)


def row_steps(spec: EvictionSpec, prompt_tokens: int, new_tokens: int) -> Iterator[RowStep]:
    """The steps of one row of a static batch.

    Lanes of unequal caps count as lanes of the common one. Under `pressure` nothing leaves: a
    static batch is one that fits.

    Args:
        spec: cap and schedule.
        prompt_tokens: read first.
        new_tokens: generated; the last one is not processed.

    Raises:
        ConfigError: no prompt, or nothing to generate.
    """
    if min(prompt_tokens, new_tokens) < 1:
        raise ConfigError(
            f"expected a prompt and an answer of 1 token or more, got {prompt_tokens} and "
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
    first = min(prompt_tokens, spec.least_cap) if spec.prefills_in_blocks else prompt_tokens
    yield first
    for start in range(first, prompt_tokens, spec.every):
        yield min(spec.every, prompt_tokens - start)


def _kept(spec: EvictionSpec, held: int, answered: int, new: int) -> int:
    """Slots that stay before `new` tokens; `answered` is below 0 while the prompt is read."""
    if spec.cap is None or spec.when == PRESSURE or (spec.when == DECODE and answered < 0):
        return held
    if spec.when == PREFILL_END:
        return min(held, spec.cap) if answered == 0 else held
    return spec.cap - spec.every if held + new > spec.cap else held


def run_seconds(rates: StepRates, steps: Iterable[RowStep], rows: int) -> RunSeconds:
    """Time of a static batch whose rows all take these steps.

    Args:
        rates: of the rule they are evicted by.
        steps: of one row, as `row_steps` gives them.
        rows: that run side by side.

    Raises:
        ConfigError: no rows.
    """
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
    """Seconds of a step that reads prompts, an eviction before it counted in."""
    of: PrefillRates = rates.blocks if step.before else rates.whole
    return of.call_s + rows * (of.token_s * step.new + of.square_s * step.squares)


def decode_step_seconds(rates: StepRates, step: RowStep, rows: int) -> float:
    """Seconds of a decode step, with the eviction before it."""
    of: DecodeRates = rates.decode
    products_s = max(of.products_s(rows), rates.whole.token_s * rows)
    slots_s = of.slot_s * rows * (step.before + step.new)
    if step.evicted_from:
        slots_s += rows * (of.evict_row_s + of.evict_slot_s * step.evicted_from)
    return products_s + slots_s
