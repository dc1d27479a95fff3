"""M8: CPU attention on offloaded KV: its memory rate, and the gain of a step."""

import torch

from benchmarks.common.host_bytes import require_host
from benchmarks.common.result import Cell, Numbers, PartResult, Table
from benchmarks.common.target import Target
from benchmarks.device.bench import DeviceBench
from benchmarks.device.step_harness import StepHarness, median_ms
from benchmarks.offload.arms import BY_NAME, Layout
from benchmarks.offload.arms_part import ratio
from benchmarks.offload.simulated_machine import MeasuredStep
from quire.profile.ceilings import AttentionBench

ARMS = ("prefetch", "host_share", "all_host")
_BACKENDS = ("sdpa", "native")
_CPU = Target(torch.device("cpu"))


def run_host(bench: DeviceBench) -> PartResult:
    """Run the part."""
    rates = host_rates(bench)
    harness = bench.harness(bench.config.grouped, host=True)
    layouts = {name: harness.layout(BY_NAME[name]) for name in ARMS}
    steps = harness.rounds(layouts, bench.config.repeats)
    return PartResult(
        claims=_claims(harness, layouts, steps) | rates,
        tables=(_rate_table(bench, harness, rates), _table(bench, harness, layouts, steps)),
        raw={"seconds": {name: [s.seconds for s in found] for name, found in steps.items()}},
    )


def host_rates(bench: DeviceBench) -> Numbers:
    """host_attention_*_gb_per_s: KV rate of one layer's decode attention on all threads."""
    shape = bench.config.host_attention
    require_host(4 * shape.kv_bytes, "CPU attention", "omit the part host")
    found = AttentionBench(shape)
    backends = {name: call for name, call in found.variants().items() if name in _BACKENDS}
    return {
        f"host_attention_{name}_gb_per_s": shape.kv_bytes
        / _CPU.median(call, bench.config.repeats)
        / 1e9
        for name, call in backends.items()
    }


def _claims(
    harness: StepHarness, layouts: dict[str, Layout], steps: dict[str, list[MeasuredStep]]
) -> Numbers:
    """Claims of the step.

    host_gain: prefetching over link and CPU attention together; host_gain_formula: 1 + k / u.
    host_all_gain: prefetching over CPU attention for all tokens.
    host_share: fraction of the tokens with CPU attention.
    host_step_gb_per_s: KV rate of CPU attention in a step.

    """
    rates = layouts["prefetch"].rates
    return {
        "host_gain": ratio(steps, "prefetch", "host_share"),
        "host_gain_formula": 1 + rates.kv_s / rates.host_s,
        "host_all_gain": ratio(steps, "prefetch", "all_host"),
        "host_share": layouts["host_share"].batch.host / harness.case.tokens,
        "host_step_gb_per_s": harness.sizes.kv_bytes / rates.host_s / 1e9,
        "host_output_error": max(s.error for found in steps.values() for s in found),
    }


def _rate_table(bench: DeviceBench, harness: StepHarness, rates: Numbers) -> Table:
    """Table of the gain that each rate allows: 1 + k / u = 1 + CPU rate / link rate."""
    link = harness.speeds.inward.bytes_per_s / 1e9
    shape = bench.config.host_attention
    return Table(
        name="device-host-rates",
        caption=(
            f"CPU attention of one layer on {torch.get_num_threads()} threads, "
            f"{shape.batch} x {shape.tokens:,} tokens in bfloat16, and its possible gain over "
            f"prefetching on a link of {link:.1f} GB/s. Expected on 16 cores: 60 to 150 GB/s."
        ),
        columns=("backend", "GB/s", "possible gain"),
        rows=tuple(
            (name.removeprefix("host_attention_").removesuffix("_gb_per_s"), gb, 1 + gb / link)
            for name, gb in rates.items()
        ),
    )


def _table(
    bench: DeviceBench,
    harness: StepHarness,
    layouts: dict[str, Layout],
    steps: dict[str, list[MeasuredStep]],
) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (
            BY_NAME[name].label,
            layouts[name].batch.host // harness.case.context,
            median_ms(steps[name]),
            1e3 * steps[name][0].predicted_s,
            ratio(steps, "prefetch", name),
        )
        for name in ARMS
    ]
    return Table(
        name="device-host",
        caption=(
            f"{bench.where} {harness.case.label}, for which recompute does not pay: rows with CPU "
            "attention. Expected for Llama-3-8B with an H200: 2 to 3.5 times "
            "prefetching."
        ),
        columns=("arm", "CPU attention rows", "ms", "predicted, ms", "gain"),
        rows=tuple(rows),
    )
