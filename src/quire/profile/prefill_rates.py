"""Measures a model's prefill time of a chunk, by its length and the tokens before it."""

import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import ConfigError
from quire.layout.model import ModelSpec
from quire.models.loader import LoadedModel
from quire.offload.swap.host_store import device_name
from quire.plan.fitting import fit_seconds
from quire.plan.rates import PrefillRates, model_key
from quire.profile.timing import seconds
from quire.scheduler.schedule_config import ScheduleConfig

CHUNKS = (64, 128, 256, 512)
_LEAST_SECONDS_PER_TOKEN = 1e-12  # a fit may be 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTime:
    """One prefill step of a chunk.

    Attributes:
        tokens: length of the chunk.
        before: tokens of the prompt before the chunk.
        seconds: duration of the step.
    """

    tokens: int
    before: int
    seconds: float

    @property
    def amounts(self) -> tuple[int, int, int]:
        """Numbers of calls, tokens and squares in the formula of `PrefillRates`."""
        return 1, self.tokens, (self.before + self.tokens) ** 2 - self.before**2


def random_prompt(model: LoadedModel, tokens: int, seed: int) -> list[int]:
    """Random tokens that differ for each seed, so that no prefix of them is cached."""
    rng = random.Random(seed)
    return [rng.randrange(model.spec.vocab_size) for _ in range(tokens)]


def kv_memory_for(spec: ModelSpec, tokens: int) -> int:
    """Return the bytes of a KV memory for two sequences of this length, in slabs of any size."""
    return 2 * spec.kv_bytes(tokens, 4) + (64 << 20)


def measure_chunks(
    model: LoadedModel, *, chunks: Sequence[int], prompt_tokens: int, repeats: int
) -> Iterator[ChunkTime]:
    """Prefill prompts in chunks of each length; yield every step except those of a first prompt.

    Args:
        model: loaded.
        chunks: lengths.
        prompt_tokens: length of each prompt; at most the model's context minus one.
        repeats: measured prompts for each length, after a warm-up.

    Raises:
        ConfigError: a prompt that fills the context, so that no output fits.
    """
    if not 1 <= prompt_tokens < model.spec.max_positions:
        raise ConfigError(
            f"expected prompts of 1 to {model.spec.max_positions - 1} tokens, got {prompt_tokens}"
        )
    seeds = itertools.count()
    memory = kv_memory_for(model.spec, prompt_tokens + 1)
    for chunk in chunks:
        schedule = ScheduleConfig(max_num_batched_tokens=chunk, async_scheduling=False)
        engine = Engine(
            model, KVConfig(memory=memory, prefix_cache=PrefixCacheConfig(enabled=False)), schedule
        )
        for repeat in range(repeats + 1):
            prompt = random_prompt(model, prompt_tokens, next(seeds))
            steps = list(_steps(engine, prompt, chunk))
            yield from steps if repeat else ()


def _steps(engine: Engine, prompt: list[int], chunk: int) -> Iterator[ChunkTime]:
    engine.submit(GenerationRequest(prompt, SamplingParams(max_tokens=1, ignore_eos=True)))
    before = 0
    while engine.has_work:
        done = engine.num_processed_tokens
        taken_s = seconds(engine.step)
        tokens = engine.num_processed_tokens - done
        if tokens:
            yield ChunkTime(tokens=tokens, before=before, seconds=taken_s)
        before += tokens


def prefill_rates(times: Sequence[ChunkTime]) -> PrefillRates:
    """Fit rates to the steps.

    Raises:
        ConfigError: `times` is empty.
    """
    fitted = fit_seconds([time.amounts for time in times], [time.seconds for time in times])
    call_s, token_s, square_s = fitted
    return PrefillRates(
        call_s=call_s, token_s=max(token_s, _LEAST_SECONDS_PER_TOKEN), square_s=square_s
    )


def measure_prefill_rates(
    model: LoadedModel,
    *,
    chunks: Sequence[int],
    prompt_tokens: int,
    repeats: int,
    progress: Callable[[str], None],
) -> dict[str, PrefillRates]:
    """Prefill rates of a model, by its `model_key`.

    Args:
        model: loaded.
        chunks: lengths.
        prompt_tokens: length of each prompt; limited to the model's context minus one.
        repeats: measured prompts for each length.
        progress: called with a line for each length and for the fitted rates.
    """
    tokens = min(prompt_tokens, model.spec.max_positions - 1)
    times = list(measure_chunks(model, chunks=chunks, prompt_tokens=tokens, repeats=repeats))
    for chunk in chunks:
        whole = [time for time in times if time.tokens == chunk]
        if whole:
            median_s = statistics.median(time.seconds for time in whole)
            progress(f"prefill in chunks of {chunk} tokens: {chunk / median_s:,.0f} tokens/s")
    rates = prefill_rates(times)
    progress(
        f"prefill: {rates.token_s * 1e6:.1f} us per token, {rates.call_s * 1e3:.2f} ms per step"
    )
    decoder = model.decoder
    dtype = str(decoder.dtype).removeprefix("torch.")
    device = device_name(decoder.device)
    key = model_key(model.spec, dtype=dtype, device=device, weight_codec=model.weight_codec)
    return {key: rates}
