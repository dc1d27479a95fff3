"""A decode step of a large model, against the time to read its weights and KV once."""

import statistics
from collections.abc import Mapping

from benchmarks.common.result import Cell, Numbers, PartResult, Table
from benchmarks.gpu.bench import GpuBench, decode_times, new_tokens_of
from benchmarks.gpu.others import OTHERS
from quire.plan.roofline import weights_read_bytes

VARIANTS: dict[str, dict[str, bool]] = {
    "Quire": {},
    "Quire, --no-async-scheduling": {"async_scheduling": False},
    "Quire, --no-cuda-graphs": {"cuda_graphs": False},
}


def run_step(bench: GpuBench) -> PartResult:
    """Run the part.

    step_over_floor: time of a decode step over the time of reading weights and KV at the bandwidth
    of a measured copy. graphs_gain: time without CUDA graphs over that with them, if they ran.
    async_gain: time without asynchronous scheduling over that with it, if it ran.
    """
    rows: list[tuple[Cell, ...]] = []
    found = {}
    for name, options in VARIANTS.items():
        step_s, floor_s, replayed = _quire(bench, options)
        found[name] = step_s
        rows.append((name, 1e3 * step_s, bench.config.rows / step_s, step_s / floor_s, replayed))
        bench.free()
    own_s, waiting_s, launched_s = found.values()
    claims: Numbers = {
        "step_over_floor": own_s / floor_s,
        "async_gain": waiting_s / own_s,
        "graphs_gain": launched_s / own_s,
    }
    for name in bench.config.others:
        other = OTHERS[name](bench)
        ms = None if other.step_s is None else 1e3 * other.step_s
        rate = None if other.step_s is None else bench.config.rows / other.step_s
        over = None if other.step_s is None else other.step_s / floor_s
        rows.append((other.label, ms, rate, over, other.note))
        if other.step_s is not None:
            claims[f"{name}_step_over_quire"] = other.step_s / own_s
        bench.free()
    return PartResult(
        claims=claims,
        tables=(
            Table(
                name="gpu-step",
                caption=(
                    f"{bench.where} A decode step of {bench.config.model} in {bench.config.dtype} "
                    f"with random weights, {bench.config.rows} rows of at least "
                    f"{bench.config.step_context:,} tokens; medians of {bench.config.steps} steps. "
                    f"Weights and KV can be read in {1e3 * floor_s:.3f} ms. Last column: steps "
                    "that a CUDA graph ran, or a remark."
                ),
                columns=("engine", "ms", "tokens/s", "over floor", "graphs"),
                rows=tuple(rows),
            ),
        ),
    )


def _quire(bench: GpuBench, options: Mapping[str, bool]) -> tuple[float, float, int]:
    """Median seconds of a step, the floor in seconds, and steps that a graph ran."""
    config = bench.config
    most = new_tokens_of(config.rows, config.step_context, config.warm_steps + config.steps)
    total = config.step_context + most
    model = bench.large_model(total)
    kv_bytes = bench.kv_bytes(model, config.rows, total)
    bench.target.require(kv_bytes, "the KV memory", "lower rows or step_context")
    engine = bench.engine(
        model,
        kv_bytes,
        config.rows,
        cuda_graphs=options.get("cuda_graphs"),
        async_scheduling=options.get("async_scheduling"),
    )
    prompts = bench.prompts(config.rows, config.step_context, model.spec.vocab_size)
    times_s = decode_times(engine, prompts, warm_steps=config.warm_steps, steps=config.steps)
    stats = engine.stats().graphs
    return statistics.median(times_s), floor_seconds(bench), 0 if stats is None else stats.replayed


def floor_seconds(bench: GpuBench) -> float:
    """Seconds to read all weights, and the KV that every row has at the least, at the copy's rate.

    Rows have generated some tokens more, so that the floor is a little too low.
    """
    config, value_bytes = bench.config, bench.dtype.itemsize
    kv_bytes = config.rows * config.spec.kv_bytes(config.step_context, value_bytes)
    weight_bytes = weights_read_bytes(config.spec, config.rows, value_bytes)
    return float(weight_bytes + kv_bytes) / bench.copy_bytes_per_s
