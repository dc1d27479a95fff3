"""Paper 001: waste, page sizes, watermarks and preemption.

Waste and watermarks come from the simulated engine: the real scheduler and memory with a timing
model. Its trace is the Azure conversation trace that ships with Quire.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from benchmarks.common.result import Chart
from benchmarks.memory.page_sizes import table_fraction
from benchmarks.memory.simulated import SimulatedConfig
from benchmarks.memory.swapping import SwapConfig, measure_swap
from benchmarks.memory.waste import STORE, StoreRun, WasteConfig, measure_waste_of_stores
from benchmarks.memory.watermarks import WatermarkConfig, measure_watermarks
from benchmarks.paper.item import (
    NOT_COMPARABLE,
    REPRODUCED,
    SCALED,
    Item,
    Measured,
    Ours,
    Values,
    no_values,
)
from benchmarks.paper.kv_cache_sizes import FP16, GB
from benchmarks.paper.material import Material
from benchmarks.paper.shapes import shape
from quire.config.kv_config import KVConfig
from quire.plan.preemption_costs import assumed_prefill
from quire.sim.machine import PEAKS, MachineConfig, Rates
from quire.sim.run import SimConfig, simulate

_TRACE = "the Azure conversation trace; the article's workload is not stated"
_QUICK_REQUESTS = 150
_DEVICES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class FourA100(SimulatedConfig):
    """Llama 3 70B on four simulated A100 without costs of communication."""

    def run_config(self) -> SimConfig:
        """See `SimulatedConfig`."""
        one = MachineConfig(name="a100").rates()
        rates = Rates(
            read_bytes_per_s=_DEVICES * one.read_bytes_per_s,
            flops_per_s=_DEVICES * one.flops_per_s,
            copy_bytes_per_s=_DEVICES * one.copy_bytes_per_s,
            overhead_s=one.overhead_s,
        )
        return SimConfig(model=shape("llama-3-70b"), rates=rates, kv=KVConfig(memory=self.memory))


def _simulated(material: Material, memory: str = "160GiB") -> FourA100:
    requests = _QUICK_REQUESTS if material.quick else None
    return FourA100(requests=requests, model="llama-3-70b", memory=memory)


def _simulation_differences(material: Material, first: str) -> tuple[str, ...]:
    few = (f"{_QUICK_REQUESTS} requests",) if material.quick else ()
    return (first, *few)


# ---- waste ---------------------------------------------------------------------------------------

_WORKLOADS: Mapping[str, tuple[int, int]] = {
    "ShareGPT (chat)": (830, 4_096),
    "Alpaca (instruction)": (380, 2_048),
    "Code generation": (1_200, 4_096),
    "Summarization": (2_800, 4_096),
}
_AVERAGE = "Weighted average"


def _waste(material: Material) -> Measured:
    rows = {label: _used(mean, most) for label, (mean, most) in _WORKLOADS.items()}
    used = [100 * mean / most for mean, most in _WORKLOADS.values()]
    mean_used = sum(used) / len(used)
    rows[_AVERAGE] = Ours(
        values=(mean_used, 100 - mean_used),
        note="mean over the four workloads: the article states no weights",
    )
    for run in _store_runs(material):
        if run.workload == "real" and run.store == STORE:
            wasted = 100 * run.waste_fraction
            rows[f"Azure conversations, lanes of {run.reserved_tokens:,}"] = Ours(
                values=(100 - wasted, wasted),
                differences=_simulation_differences(material, "simulated, mean over time"),
            )
    return Measured(rows=rows)


def _used(mean: int, most: int) -> Ours:
    used = 100 * mean / most
    return Ours(values=(used, 100 - used), note="mean length over maximum length")


def _store_runs(material: Material) -> list[StoreRun]:
    return material.once(
        "stores", lambda: list(measure_waste_of_stores(WasteConfig(), _simulated(material)))
    )


WASTE = Item(
    id="waste",
    title="Memory Waste in Contiguous Allocation",
    setting="mean and maximum lengths of four workloads",
    columns=("used %", "wasted %"),
    printed={
        "ShareGPT (chat)": (20, 80),
        "Alpaca (instruction)": (19, 81),
        "Code generation": (29, 71),
        "Summarization": (68, 32),
        _AVERAGE: (32, 68),
    },
    measure=_waste,
    status=REPRODUCED,
    reason="from the printed lengths; a simulated trace is added",
)

# ---- utilization ---------------------------------------------------------------------------------

_STORES = {
    "Contiguous (max_len)": STORE,
    "PagedAttention (block=16)": "paged",
}
_ONE = "PagedAttention (block=1)"


def _utilization(material: Material) -> Measured:
    differences = _simulation_differences(material, f"simulated Llama 3 70B: {_TRACE}")
    rows = {}
    for label, store in _STORES.items():
        runs = [
            run
            for run in _store_runs(material)
            if run.store == store and run.workload != "window" and run.reserved in (None, "4096")
        ]
        used = [100 * (1 - run.waste_fraction) for run in runs]
        note = "lowest and highest of the trace's lengths and of a quarter of them"
        rows[label] = Ours(values=(min(used), max(used)), differences=differences, note=note)
    rows["Contiguous (growing)"] = no_values("not measured: Quire has no store that doubles lanes")
    rows[_ONE] = Ours(
        values=(100.0, 100.0),
        note="by definition, not measured: no slot of a page of one token is empty",
    )
    return Measured(rows=rows)


UTILIZATION = Item(
    id="utilization",
    title="Memory Utilization: Contiguous vs PagedAttention",
    setting="no model and no workload are stated; ranges",
    columns=("utilization %, low", "utilization %, high"),
    printed={
        "Contiguous (max_len)": (20, 40),
        "Contiguous (growing)": (60, 70),
        "PagedAttention (block=16)": (96, 99),
        _ONE: (100, 100),
    },
    measure=_utilization,
    status=SCALED,
    reason="simulated on another trace",
)

# ---- page sizes ----------------------------------------------------------------------------------

_SIZES = (1, 4, 8, 16, 32, 64, 128)
_PAGE_REQUESTS, _TABLE_SEQUENCES = 1_000, 16


def _block_size(material: Material) -> Measured:
    simulated = _simulated(material)
    trace, on = simulated.conversations(), simulated.run_config()
    trace = replace(trace, requests=trace.requests[:_PAGE_REQUESTS])
    rows, lines = {}, {}
    for size in _SIZES:
        run = simulate(trace, replace(on, kv=replace(on.kv, page_tokens=size)))
        wasted = 100 * run.gauges.waste_fraction
        tables = 100 * table_fraction(on.model, trace, size, _TABLE_SEQUENCES)
        lines[size] = wasted + tables
        rows[str(size)] = Ours(
            values=(wasted, tables, wasted + tables),
            differences=(
                f"simulated: {_TRACE}",
                f"{len(trace.requests):,} requests",
            ),
            note="table overhead is bytes of page tables over allocated bytes",
        )
    chart = Chart(
        name="overhead",
        title="Overhead by page size",
        x_label="tokens per page",
        y_label="% of allocated bytes",
        lines={"waste and tables": tuple(lines.items())},
        log_x=True,
    )
    return Measured(rows=rows, charts=(chart,))


BLOCK_SIZE = Item(
    id="block-size",
    title="Block Size Tradeoff (chart)",
    setting="Llama 3 70B, mixed workload; rows are tokens per block",
    columns=("internal fragmentation %", "page tables %", "total %"),
    printed={
        str(size): values
        for size, values in zip(
            _SIZES,
            (
                (0, 8, 8),
                (0.5, 3.5, 4),
                (1, 1.8, 2.8),
                (1.8, 1, 2.8),
                (3.2, 0.6, 3.8),
                (5.5, 0.3, 5.8),
                (9, 0.2, 9.2),
            ),
            strict=True,
        )
    },
    measure=_block_size,
    status=SCALED,
    reason="simulated on another trace; the article does not say how it measures table overhead",
)

# ---- watermarks ----------------------------------------------------------------------------------

_WATERMARKS: Mapping[int, Values] = {
    70: (42, 580, 0, 120),
    85: (54, 720, 0.2, 135),
    90: (58, 760, 1.5, 180),
    95: (61, 780, 8.0, 450),
    98: (63, 790, 25.0, 1200),
}
_WATERMARK_MEMORY = "30GiB"  # 64 requests of the article's 1,536 tokens


def _watermark(material: Material) -> Measured:
    config = WatermarkConfig(per_cents=tuple(_WATERMARKS), memory=_WATERMARK_MEMORY)
    runs = measure_watermarks(config, _simulated(material, _WATERMARK_MEMORY))
    rows = {
        f"{run.per_cent}%": Ours(
            values=(
                run.largest_batch,
                run.tokens_per_s,
                run.preemptions_per_minute,
                1e3 * run.numbers.get("tpot_p99_s", 0.0),
            ),
            differences=_simulation_differences(
                material, f"4 simulated A100, {_WATERMARK_MEMORY} of KV: {_TRACE}"
            ),
            note="latency is the p99 over requests of the mean time between two tokens",
        )
        for run in runs
        if not run.preempts
    }
    return Measured(rows=rows)


WATERMARK = Item(
    id="watermark",
    title="Watermark Tuning Impact",
    setting="Llama 3 70B, mixed workload; rows are watermarks",
    columns=("largest batch", "tokens/s", "preemptions/min", "p99 latency ms"),
    printed={f"{percent}%": values for percent, values in _WATERMARKS.items()},
    measure=_watermark,
    status=SCALED,
    reason="simulated on another trace; the article states neither its load nor its latency",
)

# ---- swap or recompute ---------------------------------------------------------------------------

_LINK_BYTES_PER_S = 25e9
_SWAPS: Mapping[int, Values] = {
    128: (0.005, 0.2, 15, "swap"),
    512: (0.02, 0.8, 55, "swap"),
    2_048: (0.08, 3.2, 210, "swap"),
    8_192: (0.31, 12.4, 830, "swap"),
    32_768: (1.25, 50.0, 3300, "swap"),
}


def _swap_or_recompute(material: Material) -> Measured:
    return Measured(rows=dict(_computed_swaps()) | dict(_measured_swaps(material)))


def _computed_swaps() -> Iterator[tuple[str, Ours]]:
    spec = shape("llama-3-70b")
    rates = assumed_prefill(spec, _DEVICES * PEAKS["a100"].flops_per_s)
    for tokens in _SWAPS:
        kv_bytes = spec.kv_bytes(tokens, FP16)
        swap_ms = 1e3 * kv_bytes / _LINK_BYTES_PER_S
        recompute_ms = 1e3 * (rates.token_s * tokens + rates.square_s * tokens**2)
        yield (
            f"{tokens:,} tokens",
            Ours(
                values=(kv_bytes / GB, swap_ms, recompute_ms, _faster(swap_ms, recompute_ms)),
                note="the printed sizes are an eighth of the article's formula; recompute at the "
                "peak of 4 A100",
            ),
        )


def _faster(swap_ms: float, recompute_ms: float) -> str:
    return "swap" if swap_ms < recompute_ms else "recompute"


def _measured_swaps(material: Material) -> Iterator[tuple[str, Ours]]:
    lengths = [n for n in (128, 512, 2_048) if n + 2 <= material.model.spec.max_positions]
    lengths = lengths[: 1 if material.quick else None]
    config = SwapConfig(lengths=tuple(lengths), repeats=1 if material.quick else 5)
    for time in measure_swap(material.model, config):
        swap_ms, recompute_ms = 1e3 * time.swap_s, 1e3 * time.recompute_s
        yield (
            f"measured, {material.model_name}, {time.tokens:,} tokens",
            Ours(
                values=(
                    time.kv_bytes / GB,
                    swap_ms,
                    recompute_ms,
                    _faster(swap_ms, recompute_ms),
                ),
                differences=(f"{material.machine}; swap is out and in",),
            ),
        )


SWAP_OR_RECOMPUTE = Item(
    id="swap-or-recompute",
    title="Swap vs Recompute Breakeven",
    setting="Llama 3 70B, PCIe 4 x16 at 25 GB/s",
    columns=("KV GB", "swap ms", "recompute ms", "faster"),
    printed={f"{tokens:,} tokens": values for tokens, values in _SWAPS.items()},
    measure=_swap_or_recompute,
    status=NOT_COMPARABLE,
    reason="the printed sizes contradict the article's formula by a factor of 8; the faster way is "
    "the same in every row",
)
