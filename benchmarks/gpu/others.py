"""Decode steps of other engines on the same device: Transformers and vLLM."""

import importlib.util
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from transformers import (
    ContinuousBatchingConfig,
    PreTrainedModel,
    StoppingCriteriaList,
)

from benchmarks.common.models import llama_of, random_weights
from benchmarks.common.transformers_runs import StepClock, greedy, median_gap
from benchmarks.gpu.bench import GpuBench

FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, ImportError, LookupError)
"""Errors of other engines that become remarks in the table."""

PAGE_TOKENS = 256
_WARM = 4


@dataclass(frozen=True, slots=True)
class OtherStep:
    """A decode step of another engine.

    Attributes:
        label: name of the engine.
        step_s: median seconds of a step; None if it did not run.
        note: why it did not run, or a remark.
    """

    label: str
    step_s: float | None
    note: str | None = None


def step_clock(bench: GpuBench) -> StepClock:
    """A clock that waits for the device."""

    def now() -> float:
        bench.target.wait()
        return time.perf_counter()

    return StepClock(now)


def static_cache(bench: GpuBench) -> OtherStep:
    """Transformers' `generate` with a static cache, compiled where Transformers does so."""
    label = "Transformers, static cache"
    return _guarded(label, lambda: _generate(bench, "static"))


def continuous(bench: GpuBench) -> OtherStep:
    """Transformers' continuous batching."""
    label = "Transformers, continuous batching"
    return _guarded(label, lambda: _generate_batch(bench))


def vllm(bench: GpuBench) -> OtherStep:
    """VLLM with random weights, if it is installed."""
    if importlib.util.find_spec("vllm") is None:
        return OtherStep("vLLM", None, "not installed")
    return _guarded("vLLM", lambda: _vllm(bench))


OTHERS: Mapping[str, Callable[[GpuBench], OtherStep]] = {
    "static": static_cache,
    "continuous": continuous,
    "vllm": vllm,
}


def batching_options(options: Mapping[str, object]) -> ContinuousBatchingConfig:
    """Options of continuous batching; those that this version of Transformers lacks are left out.

    Pages have the same size in all versions.
    """
    known = {field.name for field in fields(ContinuousBatchingConfig)}
    pages = "page_size" if "page_size" in known else "block_size"
    found = {name: value for name, value in options.items() if name in known}
    return ContinuousBatchingConfig(**found | {pages: PAGE_TOKENS})  # type: ignore[arg-type]


def model_of(bench: GpuBench, context: int) -> PreTrainedModel:
    """A model of the large shape for Transformers."""
    config = llama_of(bench.config.spec, context)
    model = random_weights(config, dtype=bench.dtype, device=bench.target.device)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = None
    return model


def _guarded(label: str, run: Callable[[], float]) -> OtherStep:
    try:
        return OtherStep(label, run())
    except FAILURES as error:
        return OtherStep(label, None, f"failed: {error}"[:80])


def _generate(bench: GpuBench, cache: str) -> float:
    config = bench.config
    new_tokens = config.warm_steps + config.steps + _WARM
    model = model_of(bench, config.step_context + new_tokens)
    prompts = bench.prompts(config.rows, config.step_context, config.spec.vocab_size)
    clock = step_clock(bench)
    ids = torch.tensor(prompts, device=bench.target.device)
    with torch.inference_mode():
        model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=greedy(new_tokens, cache_implementation=cache),
            stopping_criteria=StoppingCriteriaList([clock]),
        )
    return median_gap(clock.times_s[-config.steps - 1 :])


def _generate_batch(bench: GpuBench) -> float:
    config = bench.config
    new_tokens = config.warm_steps + config.steps + _WARM
    model = model_of(bench, config.step_context + new_tokens)
    prompts = bench.prompts(config.rows, config.step_context, config.spec.vocab_size)
    pages = -(-(config.step_context + new_tokens) // PAGE_TOKENS) + 1
    options = {
        "num_blocks": config.rows * pages,
        "max_batch_tokens": max(512, config.step_context),
        "allow_block_sharing": False,
    }
    with torch.no_grad():  # a thread of Transformers overwrites what is allocated here
        found = model.generate_batch(  # type: ignore[operator]
            inputs=prompts,
            generation_config=greedy(new_tokens + config.rows),
            continuous_batching_config=batching_options(options),
            record_timestamps=True,
            progress_bar=False,
            warmup=bench.target.on_gpu,
        )
    failed = next((o for o in found.values() if not o.timestamps), None)
    if failed is not None or not found:
        raise RuntimeError(getattr(failed, "error", None) or "an output has no timestamps")
    # the last prompt to start decodes together with all others
    last = max(found.values(), key=lambda output: output.timestamps[0])
    return median_gap(last.timestamps[:new_tokens][-config.steps - 1 :])


def _vllm(bench: GpuBench) -> float:
    """Seconds of a step from the outputs' times: vLLM measures them in its engine."""
    from vllm import LLM, SamplingParams

    config = bench.config
    new_tokens = config.warm_steps + config.steps + _WARM
    total = config.step_context + new_tokens
    with tempfile.TemporaryDirectory() as folder:
        shape = llama_of(config.spec, total).to_dict() | {"architectures": ["LlamaForCausalLM"]}
        Path(folder, "config.json").write_text(json.dumps(shape, default=str))
        llm = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=config.dtype,
            max_model_len=total + 8,
            max_num_seqs=config.rows,
            enable_prefix_caching=False,
        )
        prompts = bench.prompts(config.rows, config.step_context, config.spec.vocab_size)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        times_s = []
        for count in (1, 1, new_tokens):  # the first run warms up
            options = SamplingParams(
                temperature=0, max_tokens=count, ignore_eos=True, detokenize=False
            )
            started_s = time.perf_counter()
            llm.generate(inputs, options, use_tqdm=False)
            times_s.append(time.perf_counter() - started_s)
    return float(times_s[2] - times_s[1]) / (new_tokens - 1)
