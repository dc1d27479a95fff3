"""A static batch under an eviction rule: the steps of each row, and their time.

All rows start together, have equal lengths and run to their end in parallel. A prompt is prefilled
whole, or up to the cap and then in chunks of `every` tokens, each after an eviction. The last
prefill step yields the first new token, so n new tokens take n - 1 decode steps.

With R rows, t tokens of each in a step, h slots of KV before them (tokens of one row and lane), and
the measured seconds of `StepRates`:

    prefill    call_s + token_s * R * t + square_s * R * ((h + t)^2 - h^2)
    decode     max(batch_s(R), token_s * R) + slot_s * R * (h + 1)
    eviction   (evict_row_s + evict_slot_s * held) * R       before a decode step

Prefill without earlier tokens (h = 0) and prefill in chunks have separate rates: chunks are smaller
and each reads the cache. The time of a decode step's products is not linear in the rows, because
libraries use other kernels for few rows than for many. So `batch_s` is measured at several numbers
of rows; no batch is faster than prefill (token_s).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, repeat

from quire.errors import ConfigError
from quire.layout.eviction import DECODE, PREFILL_END, PRESSURE, EvictionSpec
from quire.plan.rates import DecodeRates, PrefillRates, StepRates


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStep:
    """Work of one row in a step.

    Attributes:
        new: tokens processed.
        before: slots of a lane before them, without evicted ones.
        evicted_from: slots that the eviction before the step selected from; 0 without one.
        decodes: whether the step is a decode step.
    """

    new: int
    before: int
    evicted_from: int = 0
    decodes: bool = False

    @property
    def squares(self) -> int:
        """Squared positions that the cost of prefill attention is proportional to."""
        return (self.before + self.new) ** 2 - self.before**2


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSeconds:
    """Time of a static batch.

    Attributes:
        prefill_s: until every row has its first token.
        decode_s: the rest.
        new_tokens: generated tokens of all rows.
    """

    prefill_s: float
    decode_s: float
    new_tokens: int

    @property
    def tokens_per_s(self) -> float:
        """New tokens over the whole time, prefill included."""
        return self.new_tokens / (self.prefill_s + self.decode_s)


def row_steps(spec: EvictionSpec, prompt_tokens: int, new_tokens: int) -> Iterator[RowStep]:
    """Generate the steps of one row of a static batch.

    Lanes with unequal caps count as lanes of the common one. `pressure` evicts nothing: a static
    batch fits in memory.

    Args:
        spec: cap and schedule.
        prompt_tokens: length of the prompt.
        new_tokens: length of the output; its last token is not processed.

    Raises:
        ConfigError: no prompt, or no tokens to generate.
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
    first = min(prompt_tokens, spec.least_cap) if spec.evicts_during_prefill else prompt_tokens
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
    """Time of a static batch whose rows all take these steps.

    Args:
        rates: rates of steps under the eviction rule.
        steps: steps of one row, from `row_steps`.
        rows: number of rows.

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
