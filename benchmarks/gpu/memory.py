"""Batches in a fixed KV memory: Batch-Max, swapping, and re-batching of uneven outputs."""

import time
from collections.abc import Sequence

import torch

from benchmarks.batch_max.config import batch_max, full_kv
from benchmarks.common.decoding import generate_all
from benchmarks.common.models import SHAPES, random_weights
from benchmarks.common.result import Cell, Numbers, PartResult, Table
from benchmarks.common.transformers_runs import greedy
from benchmarks.gpu.bench import GpuBench
from benchmarks.gpu.others import FAILURES, PAGE_TOKENS, batching_options
from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine

_LONG_EVERY = 8  # one output of eight is long


def run_batch_max(bench: GpuBench) -> PartResult:
    """Run the part.

    batch_max_speedup: tokens/s of Batch-Max over those of full KV in the same bytes.
    batch_max_rows: its peak number of requests over that of full KV.
    """
    config = bench.config
    rows: list[tuple[Cell, ...]] = []
    rates, peaks = [], []
    for variant in (full_kv(), batch_max(config.cap, config.every)):
        model = bench.model_of(SHAPES[config.small_model]())
        kv_bytes = bench.kv_bytes(model, config.pool_rows, _tokens(bench))
        engine = bench.engine(model, kv_bytes, config.prompts, evict=variant.evict)
        found = generate_all(engine, _prompts(bench, model.spec.vocab_size), config.new_tokens)
        rates.append(found.tokens_per_s)
        peaks.append(found.rows_peak)
        rows.append((variant.label, found.rows_peak, found.total_s, found.tokens_per_s))
        del engine, model
        bench.free()
    return PartResult(
        claims={"batch_max_speedup": rates[1] / rates[0], "batch_max_rows": peaks[1] / peaks[0]},
        tables=(
            Table(
                name="gpu-batch-max",
                caption=(
                    f"{bench.where} {config.prompts} prompts of {config.prompt_tokens:,} tokens "
                    f"with {config.new_tokens} output tokens in the KV memory of "
                    f"{config.pool_rows} rows of full KV."
                ),
                columns=("KV", "requests at once", "s", "tokens/s"),
                rows=tuple(rows),
            ),
        ),
    )


def run_offload(bench: GpuBench) -> PartResult:
    """Run the part: swapping against Transformers' offload.

    swap_speedup: tokens/s of Quire with a swap space over those of Transformers' continuous
    batching with KV offload, in the same device memory.
    """
    own, their, note = _swapping(bench), None, None
    try:
        their = _continuous_offload(bench)
    except FAILURES as error:
        note = f"failed: {error}"[:80]
    claims: Numbers = {} if their is None else {"swap_speedup": own / their}
    return PartResult(
        claims=claims,
        tables=(
            Table(
                name="gpu-swap",
                caption=(
                    f"{bench.where} The requests of part batch_max with full KV and a swap space "
                    "in CPU memory for all of them."
                ),
                columns=("engine", "tokens/s", "remark"),
                rows=(
                    ("Quire, --swap-space", own, None),
                    ("Transformers, continuous batching, cpu_offload_space", their, note),
                ),
            ),
        ),
    )


def run_rebatch(bench: GpuBench) -> PartResult:
    """Run the part.

    rebatch_speedup: tokens/s of continuous batching over those of static batches, for outputs of
    which every eighth is eight times longer.
    """
    config = bench.config
    rows: list[tuple[Cell, ...]] = []
    rates = []
    for batcher in ("static", "continuous"):
        model = bench.model_of(SHAPES[config.small_model]())
        kv_bytes = bench.kv_bytes(model, config.prompts, _tokens(bench))
        engine = bench.engine(model, kv_bytes, max(2, config.prompts // 4), batcher=batcher)
        prompts = _prompts(bench, model.spec.vocab_size)
        total_s, tokens = _run_uneven(engine, prompts, config.new_tokens)
        rates.append(tokens / total_s)
        rows.append((batcher, total_s, tokens / total_s))
        del engine, model
        bench.free()
    return PartResult(
        claims={"rebatch_speedup": rates[1] / rates[0]},
        tables=(
            Table(
                name="gpu-rebatch",
                caption=(
                    f"{bench.where} {config.prompts} prompts of {config.prompt_tokens:,} tokens in "
                    f"batches of {max(2, config.prompts // 4)}; one of {_LONG_EVERY} outputs has "
                    f"{config.new_tokens} tokens, the others an eighth of them."
                ),
                columns=("batches", "s", "tokens/s"),
                rows=tuple(rows),
            ),
        ),
    )


def _tokens(bench: GpuBench) -> int:
    return bench.config.prompt_tokens + bench.config.new_tokens


def _prompts(bench: GpuBench, vocab_size: int) -> list[list[int]]:
    return bench.prompts(bench.config.prompts, bench.config.prompt_tokens, vocab_size)


def _run_uneven(
    engine: Engine, prompts: Sequence[Sequence[int]], new_tokens: int
) -> tuple[float, int]:
    """Seconds and tokens of outputs of two lengths."""
    started_s, total = time.perf_counter(), 0
    for number, prompt in enumerate(prompts):
        count = new_tokens if number % _LONG_EVERY == 0 else max(1, new_tokens // _LONG_EVERY)
        options = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        engine.submit(GenerationRequest(prompt, options))
    while engine.has_work:
        total += sum(len(delta.token_ids) for delta in engine.step())
    return time.perf_counter() - started_s, total


def _swapping(bench: GpuBench) -> float:
    """Tokens/s of Quire in the KV memory of part batch_max, with a swap space."""
    config = bench.config
    model = bench.model_of(SHAPES[config.small_model]())
    kv_bytes = bench.kv_bytes(model, config.pool_rows, _tokens(bench))
    host_bytes = bench.kv_bytes(model, config.prompts, _tokens(bench))
    engine = bench.engine(model, kv_bytes, config.prompts, swap_space=host_bytes)
    prompts = _prompts(bench, model.spec.vocab_size)
    tokens_per_s = generate_all(engine, prompts, config.new_tokens).tokens_per_s
    del engine, model
    bench.free()  # Transformers runs next
    return tokens_per_s


def _continuous_offload(bench: GpuBench) -> float:
    """Tokens/s of Transformers' continuous batching with as many bytes of KV, and CPU memory."""
    config = bench.config
    shape = SHAPES[config.small_model]()
    model = random_weights(shape, dtype=bench.dtype, device=bench.target.device)
    pages = -(-_tokens(bench) // PAGE_TOKENS) + 1
    options = {
        "num_blocks": config.pool_rows * pages,
        "max_batch_tokens": max(512, config.prompt_tokens),
        "allow_block_sharing": False,
        "cpu_offload_space": 16.0 if bench.target.on_gpu else 0.0,
    }
    started_s = time.perf_counter()
    with torch.no_grad():  # a thread of Transformers overwrites what is allocated here
        found = model.generate_batch(  # type: ignore[operator]
            inputs=_prompts(bench, shape.vocab_size),
            generation_config=greedy(config.new_tokens),
            continuous_batching_config=batching_options(options),
            progress_bar=False,
            warmup=bench.target.on_gpu,
        )
    total_s = time.perf_counter() - started_s
    return sum(len(output.generated_tokens) for output in found.values()) / total_s
