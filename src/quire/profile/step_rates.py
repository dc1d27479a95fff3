"""Measures whole steps of static batches under an eviction rule, and fits rates to them.

Short runs cover several shapes: rows, prompts, caps. Each step is timed and paired with its work
according to `row_steps`; the work is checked against the engine's own count of tokens.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import InvariantError
from quire.layout.eviction import DECODE, PREFILL_AND_DECODE, default_every, parse_policy
from quire.models.loader import LoadedModel
from quire.plan.batch_verdict import RowStep, row_steps, with_numbers
from quire.plan.fitting import fit_seconds
from quire.plan.rates import DecodeRates, PrefillRates, StepRates
from quire.policies.base import EvictionPolicy
from quire.policies.eviction import make_eviction
from quire.policies.registry import FULL
from quire.profile.ceilings import ProfileConfig, random_prompt, seconds
from quire.scheduler.schedule_config import ScheduleConfig

_MIN_SECONDS = 1e-12  # a fit may be 0
_STEP_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    """A static batch."""

    rows: int  # number of rows
    prompt_tokens: int
    new_tokens: int
    evict: str  # with its cap and schedule

    @property
    def work_tokens(self) -> int:
        """Estimate of a run's work; reading the weights in a step costs as much as some tokens."""
        return self.rows * self.prompt_tokens + self.new_tokens * (self.rows + _STEP_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """A timed step of a static batch."""

    rows: int
    step: RowStep  # work of each row
    seconds: float  # of the whole step


def static_engine(model: LoadedModel, shape: RunShape, kv_bytes: int | None = None) -> Engine:
    """Create an engine whose rows are prefilled together and decode together."""
    if kv_bytes is None:
        tokens = shape.rows * (shape.prompt_tokens + shape.new_tokens)
        kv_bytes = 3 * tokens * model.spec.kv_bytes_per_token(4) + (64 << 20)
    kv = KVConfig(memory=kv_bytes, evict=shape.evict, prefix_cache=PrefixCacheConfig(enabled=False))
    return Engine(model, kv, static_schedule(shape.rows, shape.prompt_tokens))


def timed_steps(model: LoadedModel, shape: RunShape, engine: Engine) -> Iterator[StepTime]:
    """Run a batch on an idle engine to its end, step by step."""
    rules = engine.pool.rules
    spec = rules.resolve(rules.default, shape.prompt_tokens).spec
    options = SamplingParams(max_tokens=shape.new_tokens, temperature=0.0, ignore_eos=True)
    for row in range(shape.rows):
        engine.submit(GenerationRequest(random_prompt(model, shape.prompt_tokens, row), options))
    for step in row_steps(spec, shape.prompt_tokens, shape.new_tokens):
        done = engine.num_processed_tokens
        taken_s = seconds(engine.step)
        tokens = engine.num_processed_tokens - done
        if tokens != shape.rows * step.new:
            raise InvariantError(
                f"expected {shape.rows} rows to process {step.new} tokens each in a step, the "
                f"engine processed {tokens}"
            )
        yield StepTime(rows=shape.rows, step=step, seconds=taken_s)


def measure_step_rates(
    model: LoadedModel,
    shapes: Sequence[RunShape],
    *,
    repeats: int,
    done: Callable[[RunShape], None] = lambda _: None,
) -> StepRates:
    """Fit rates to the steps of these batches, which share a rule.

    A warm-up precedes each batch: the whole batch for the first two, which may differ in schedule
    only, and short prompts for the others. `done` is called after each batch.
    """
    times: list[StepTime] = []
    for index, shape in enumerate(shapes):
        engine = static_engine(model, shape)
        short = replace(shape, prompt_tokens=min(16, shape.prompt_tokens), new_tokens=2)
        list(timed_steps(model, shape if index < 2 else short, engine))
        for _ in range(repeats):
            times += timed_steps(model, shape, engine)
        done(shape)
    return fit_steps(times)


def fit_steps(times: Sequence[StepTime]) -> StepRates:
    """Fit rates to timed steps; without measured blocks, blocks have the rates of whole prompts."""
    prefill = [time for time in times if not time.step.decodes]
    whole = _prefill([time for time in prefill if not time.step.before])
    blocks = [time for time in prefill if time.step.before]
    decoding = [time for time in times if time.step.decodes]
    batches = sorted({time.rows for time in decoding})
    found = _fit(decoding, lambda time: _decode_amounts(time, batches))
    slot_s, evict_row_s, evict_slot_s = found[len(batches) :]
    return StepRates(
        whole=whole,
        blocks=_prefill(blocks) if blocks else whole,
        decode=DecodeRates(
            batch_s=tuple(
                (rows, max(seconds, _MIN_SECONDS))
                for rows, seconds in zip(batches, found, strict=False)
            ),
            slot_s=slot_s,
            evict_row_s=evict_row_s,
            evict_slot_s=evict_slot_s,
        ),
    )


def _prefill(times: Sequence[StepTime]) -> PrefillRates:
    call_s, token_s, square_s = _fit(times, _prefill_amounts)
    return PrefillRates(call_s=call_s, token_s=max(token_s, _MIN_SECONDS), square_s=square_s)


def _fit(
    times: Sequence[StepTime], amounts: Callable[[StepTime], tuple[int, ...]]
) -> tuple[float, ...]:
    """Fit to the median of steps with equal work: other programs slow down single steps."""
    by_amounts: dict[tuple[int, ...], list[float]] = {}
    for time in times:
        by_amounts.setdefault(amounts(time), []).append(time.seconds)
    medians = [statistics.median(found) for found in by_amounts.values()]
    return fit_seconds(list(by_amounts), medians)


def _prefill_amounts(time: StepTime) -> tuple[int, ...]:
    return 1, time.rows * time.step.new, time.rows * time.step.squares


def _decode_amounts(time: StepTime, batches: Sequence[int]) -> tuple[int, ...]:
    step = time.step
    evicting = time.rows if step.evicted_from else 0
    slots = time.rows * (step.before + step.new)
    of_batch = (int(time.rows == rows) for rows in batches)
    return *of_batch, slots, evicting, evicting * step.evicted_from


def usual_shapes(evict: str, *, context_tokens: int, config: ProfileConfig) -> tuple[RunShape, ...]:
    """Shapes that determine the rates of a rule: few rows and many, short and long prompts.

    A rule that evicts runs in blocks with a cap of half of each prompt, and token by token while
    decoding.
    """
    new_tokens = config.step_new_tokens
    return tuple(
        RunShape(rows=rows, prompt_tokens=prompt, new_tokens=new_tokens, evict=rule)
        for rows, tokens in config.step_sizes
        for prompt in (min(tokens, context_tokens - new_tokens),)
        for rule in _with_caps(evict, prompt // 2)
    )


def _with_caps(evict: str, cap: int) -> Iterator[str]:
    policy = policy_of_rule(evict)
    if policy is None:
        yield evict
        return
    cap = max(cap, policy.min_cap + 1)
    every = max(1, min(default_every(cap), cap - policy.min_cap))
    yield with_numbers(evict, cap=cap, every=every, when=PREFILL_AND_DECODE)
    yield with_numbers(evict, cap=cap, every=1, when=DECODE)


def policy_of_rule(evict: str) -> EvictionPolicy | None:
    """The policy of a rule, independent of its cap; None for full."""
    if parse_policy(evict).name == FULL:
        return make_eviction(evict).policy
    return make_eviction(with_numbers(evict, cap=1 << 30, every=1, when=DECODE)).policy


# The schedule of a static batch: its rows are prefilled together and decode together.


def static_schedule(rows: int, prompt_tokens: int) -> ScheduleConfig:
    """A schedule under which rows submitted together are prefilled and decoded together.

    Reserved admission: an admitted request has memory to its end, so none is preempted.
    """
    return ScheduleConfig(
        max_num_seqs=rows,
        max_num_batched_tokens=max(2_048, rows * prompt_tokens),
        chunk_tokens=max(2_048, prompt_tokens),
        admission="reserved",
        low_watermark=1.0,
        async_scheduling=False,
    )
