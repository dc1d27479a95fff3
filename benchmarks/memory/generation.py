"""Part `cache`: generation with and without a KV cache, by length.

Without a cache, every token costs a prefill of all tokens before it. With a cache, it costs one
decode step. Both are measured at a few lengths, in turn. The time of a whole generation is the sum
over its tokens: times between measured lengths are interpolated linearly, and below the shortest
length its time is used.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.common.models import random_model
from benchmarks.common.result import Chart, Numbers, PartResult, Table
from benchmarks.common.workload import SHAPES
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.models.loader import LoadedModel
from quire.profile.ceilings import kv_memory_for, random_prompt, seconds
from quire.scheduler.schedule_config import ScheduleConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """Configuration of the part.

    Attributes:
        model: a name in SHAPES.
        lengths: numbers of tokens before the next one, ascending.
        steps: decode steps timed at each length.
        repeats: rounds of all lengths, after one warm-up round.
    """

    model: str = "125m"
    lengths: tuple[int, ...] = (16, 256, 512, 1_024, 2_048, 4_096)
    steps: int = 8
    repeats: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTime:
    """Time of the next token after a given number of tokens.

    Attributes:
        tokens: number of tokens before it.
        without_s: time without a KV cache: recompute all tokens.
        with_s: time with a KV cache: a decode step, median of a few.
    """

    tokens: int
    without_s: float
    with_s: float


def measure_generation(
    config: GenerationConfig, model: LoadedModel | None = None
) -> list[TokenTime]:
    """Measure all rounds, length by length.

    Args:
        config: lengths and repeats.
        model: measured model; None: random weights in the shape of `config.model`.
    """
    model = model or random_model(SHAPES[config.model](), dtype=torch.bfloat16)
    longest = max(config.lengths)
    engine = Engine(
        model,
        KVConfig(
            memory=kv_memory_for(model.spec, longest + config.steps + 1),
            prefix_cache=PrefixCacheConfig(enabled=False),
        ),
        ScheduleConfig(max_num_batched_tokens=longest, chunk_tokens=longest),
    )
    times = []
    for i in range(config.repeats + 1):
        for tokens in config.lengths:
            time = _measure_one(engine, random_prompt(model, tokens, i), config.steps)
            times += [time] if i else []
    return times


def _measure_one(engine: Engine, prompt: list[int], steps: int) -> TokenTime:
    options = SamplingParams(max_tokens=steps + 1, temperature=0.0, ignore_eos=True)
    engine.submit(GenerationRequest(prompt, options))
    without_s = seconds(engine.step)  # the whole prompt, and its first token
    decode_s = [seconds(engine.step) for _ in range(steps)]
    return TokenTime(tokens=len(prompt), without_s=without_s, with_s=statistics.median(decode_s))


def total_s(seconds_by_length: Mapping[int, float], tokens: int) -> float:
    """Time to generate `tokens` tokens from an empty prompt.

    Args:
        seconds_by_length: time of the next token, by the number of tokens before it.
        tokens: number of tokens, at most the largest of these lengths.
    """
    lengths = sorted(seconds_by_length)
    known = [seconds_by_length[length] for length in lengths]
    return float(np.interp(np.arange(tokens), lengths, known).sum())


def run_generation(config: GenerationConfig) -> PartResult:
    """Run the part."""
    times = measure_generation(config)
    without, with_cache = medians(times)
    rows = tuple(
        (
            tokens,
            1e3 * without[tokens],
            1e3 * with_cache[tokens],
            without[tokens] / with_cache[tokens],
            total_s(without, tokens),
            total_s(with_cache, tokens),
            total_s(without, tokens) / total_s(with_cache, tokens),
        )
        for tokens in config.lengths
    )
    table = Table(
        name="cache",
        caption=(
            f"Generation with and without a KV cache, random-weight Llama ({config.model}), "
            f"bfloat16, one sequence; medians of {config.repeats}. Totals are sums over all tokens "
            "of times interpolated between these lengths."
        ),
        columns=(
            "tokens",
            "next token, no cache ms",
            "next token, cache ms",
            "speed-up",
            "all tokens, no cache s",
            "all tokens, cache s",
            "speed-up, all tokens",
        ),
        rows=rows,
    )
    chart = Chart(
        name="cache",
        title="The next token, with and without a KV cache",
        x_label="previous tokens",
        y_label="ms",
        lines={
            "without": tuple((tokens, 1e3 * without[tokens]) for tokens in config.lengths),
            "with": tuple((tokens, 1e3 * with_cache[tokens]) for tokens in config.lengths),
        },
        log_x=True,
        log_y=True,
    )
    raw = {"times": [(t.tokens, t.without_s, t.with_s) for t in times]}
    return PartResult(claims=claims(times), tables=(table,), charts=(chart,), raw=raw)


def medians(times: Sequence[TokenTime]) -> tuple[dict[int, float], dict[int, float]]:
    """Median time of the next token by length, without and with a cache."""
    lengths = sorted({time.tokens for time in times})
    found = {length: [t for t in times if t.tokens == length] for length in lengths}
    return (
        {length: statistics.median(t.without_s for t in ts) for length, ts in found.items()},
        {length: statistics.median(t.with_s for t in ts) for length, ts in found.items()},
    )


def claims(times: Sequence[TokenTime]) -> Numbers:
    """Speed-up of whole generations and of their last tokens."""
    without, with_cache = medians(times)
    made: Numbers = {}
    for tokens in without:
        made[f"cache_speedup_{tokens}"] = total_s(without, tokens) / total_s(with_cache, tokens)
        made[f"cache_speedup_last_token_{tokens}"] = without[tokens] / with_cache[tokens]
    return made
