"""Part `engine`: an engine with too little KV memory, and the cost of storing X during prefill.

off     the offloaded pages are transferred
auto    the split that measured rates select; on a CPU this is mostly the same as `off`
half    half of the offloaded pages is recomputed from X
host    half of the offloaded pages is attended to by CPU attention

Steps are timed by the wall clock, prefill by CPU seconds; variants are interleaved.
"""

import statistics
import time
from collections.abc import Mapping

import torch
from transformers import LlamaConfig

from benchmarks.common.models import random_model
from benchmarks.common.result import Numbers, PartResult, Table
from benchmarks.offload.config import OffloadBenchConfig
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig, OffloadConfig, PrefixCacheConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.models.loader import LoadedModel
from quire.profile.ceilings import random_prompt
from quire.scheduler.schedule_config import ScheduleConfig

ARMS: Mapping[str, Mapping[str, str]] = {
    "off": {"recompute": "off", "cpu_attention": "off"},
    "auto": {},
    "half": {"recompute": "0.5", "cpu_attention": "off"},
    "host": {"recompute": "off", "cpu_attention": "0.5"},
}
_LAYERS, _CHUNK = 6, 64
_MEMORY_SHARE = 0.75  # KV memory over the sequence's KV


def run_engine(config: OffloadBenchConfig) -> PartResult:
    """Run the part."""
    model = random_model(multi_head(), dtype=torch.float32)
    tokens = config.engine_tokens
    prefill = _prefill_times(model, tokens, 2 * config.repeats)
    steps: dict[str, list[Engine]] = {}
    times: dict[str, list[float]] = {name: [] for name in ARMS}
    for _ in range(config.repeats):
        for name in ARMS:
            step_s, engine = offloaded_step_s(model, tokens, config.engine_steps, name)
            times[name].append(step_s)
            steps.setdefault(name, []).append(engine)
    ends = {name: engines[-1] for name, engines in steps.items()}
    claims: Numbers = {
        "prefill_overhead_fraction": statistics.median(
            stored / off for off, stored in zip(prefill["off"], prefill["stored"], strict=True)
        )
        - 1,
        "engine_auto_over_off": statistics.median(times["auto"]) / statistics.median(times["off"]),
        "engine_hosted_bytes": _offloaded_bytes(ends["off"]),
    }
    return PartResult(
        claims=claims,
        tables=(_table(tokens, times, ends),),
        raw={"read_cpu_s": prefill, "step_s": times},
    )


def multi_head() -> LlamaConfig:
    """A shape with as many KV heads as heads, so that X is half of the KV: 6 layers of 512."""
    return LlamaConfig(
        vocab_size=4_000,
        hidden_size=512,
        intermediate_size=1_376,
        num_hidden_layers=_LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=8_192,
        tie_word_embeddings=False,
    )


def _engine(model: LoadedModel, memory: int | str, arm: Mapping[str, str]) -> Engine:
    return Engine(
        model,
        KVConfig(
            memory=memory,
            offload=OffloadConfig(
                kv_memory="1GiB",
                recompute=arm.get("recompute", "auto"),
                cpu_attention=arm.get("cpu_attention", "auto"),
            ),
            prefix_cache=PrefixCacheConfig(enabled=False),
        ),
        ScheduleConfig(chunk_tokens=_CHUNK),
    )


def _prefill_times(model: LoadedModel, tokens: int, rounds: int) -> dict[str, list[float]]:
    """CPU seconds of prefills without and with stored X, in turn, after one warm-up of each."""
    fractions = {"off": "off", "stored": "1"}
    found: dict[str, list[float]] = {name: [] for name in fractions}
    for turn in range(rounds + 1):
        for name in fractions if turn % 2 else reversed(fractions):
            seconds = _prefill_cpu_s(model, tokens, fractions[name])
            if turn:
                found[name].append(seconds)
    return found


def _prefill_cpu_s(model: LoadedModel, tokens: int, recompute: str) -> float:
    """CPU seconds to prefill a prompt that fits, in memory that was written before."""
    engine = _engine(model, "1GiB", {"recompute": recompute, "cpu_attention": "off"})
    elapsed_s = 0.0
    for seed in (1, 2):
        engine.submit(
            GenerationRequest(random_prompt(model, tokens, seed), SamplingParams(max_tokens=1))
        )
        started_s = time.process_time()
        while engine.has_work:
            engine.step()
        elapsed_s = time.process_time() - started_s
        engine.scheduler.sequence_memory.sharing.drop_cached()
    return elapsed_s


def offloaded_step_s(
    model: LoadedModel, tokens: int, count: int, name: str
) -> tuple[float, Engine]:
    """Median decode-step time of a prompt with an offloaded prefix, in seconds.

    Args:
        model: any model.
        tokens: prompt length.
        count: decode steps.
        name: a name in ARMS.
    """
    token_bytes = model.spec.kv_bytes_per_token(model.decoder.dtype.itemsize)
    engine = _engine(model, int(_MEMORY_SHARE * (tokens + count) * token_bytes), ARMS[name])
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    engine.submit(GenerationRequest(random_prompt(model, tokens, 2), params))
    found: list[float] = []
    while engine.has_work:
        before, started_s = engine.num_generated_tokens, time.perf_counter()
        engine.step()
        if before:
            found.append(time.perf_counter() - started_s)
    return statistics.median(found), engine


def _offloaded_bytes(engine: Engine) -> int:
    """Peak bytes of offloaded KV."""
    return 0 if engine.pool.offload is None else engine.pool.offload.prefixes.pool.peak_bytes


def _table(tokens: int, times: Mapping[str, list[float]], ends: Mapping[str, Engine]) -> Table:
    return Table(
        name="offload-engine",
        caption=(
            f"Decode steps of one sequence of {tokens:,} tokens in a KV memory for "
            f"{_MEMORY_SHARE:.0%} of "
            f"its KV; {_LAYERS} layers of 512, 8 heads over 8 KV heads, float32."
        ),
        columns=("arm", "ms", "recomputed", "CPU attention", "why"),
        rows=tuple(
            (
                name,
                1e3 * statistics.median(times[name]),
                ends[name].stats().recomputed_tokens,
                ends[name].stats().cpu_attended_tokens,
                "" if (offload := ends[name].pool.offload) is None else offload.why,
            )
            for name in ARMS
        ),
    )
