"""Prefill of one prompt, against the measured rate of a matrix product."""

import statistics
import time

from benchmarks.common.result import PartResult, Table
from benchmarks.gpu.bench import GpuBench
from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.layout.model import ModelSpec


def run_prefill(bench: GpuBench) -> PartResult:
    """Run the part.

    prefill_share: FLOP/s of a prefill over the FLOP/s of a large product.
    """
    config = bench.config
    model = bench.large_model(config.prefill_tokens + 64)
    engine = bench.engine(model, bench.kv_bytes(model, 2, config.prefill_tokens), 2)
    options = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    times_s = []
    for prompt in bench.prompts(config.repeats + 1, config.prefill_tokens, model.spec.vocab_size):
        started_s = time.perf_counter()
        engine.submit(GenerationRequest(prompt, options))
        while engine.has_work:
            engine.step()
        times_s.append(time.perf_counter() - started_s)
    prefill_s = statistics.median(times_s[1:])
    rate = prefill_flops(config.spec, config.prefill_tokens) / prefill_s
    share = rate / bench.product_flops_per_s
    return PartResult(
        claims={"prefill_share": share},
        tables=(
            Table(
                name="gpu-prefill",
                caption=(
                    f"{bench.where} Prefill of {config.prefill_tokens:,} tokens of {config.model} "
                    f"in {config.dtype}; median of {config.repeats}. Product: "
                    f"{' x '.join(f'{size:,}' for size in config.product)}."
                ),
                columns=("tokens", "s", "TFLOP/s", "product, TFLOP/s", "share"),
                rows=(
                    (
                        config.prefill_tokens,
                        prefill_s,
                        rate / 1e12,
                        bench.product_flops_per_s / 1e12,
                        share,
                    ),
                ),
            ),
        ),
        raw={"seconds": times_s},
    )


def prefill_flops(spec: ModelSpec, tokens: int) -> int:
    """FLOPs of a prefill: products with all layers' weights, causal attention, one head row."""
    attention = spec.hidden_size * (2 * spec.num_heads * spec.head_dim)
    attention += spec.hidden_size * spec.kv_values_per_layer_token
    mlp = (3 if spec.gated_mlp else 2) * spec.hidden_size * spec.intermediate_size
    products = 2 * tokens * spec.num_layers * (attention + mlp)
    scores = 2 * spec.num_layers * tokens**2 * spec.num_heads * spec.head_dim  # half of 4 n^2 d
    return products + scores + 2 * spec.hidden_size * spec.vocab_size
