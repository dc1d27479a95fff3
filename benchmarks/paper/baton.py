"""Paper 004: Tables 1 and 2 and Figures 5 to 7 of BATON (2024).

The batchers are those of `benchmarks.rebatch`, on the given model: static batches (Benchmark), the
same with separate prefill (PD), vector shaping (BATON) and vector embedding (BATON-PD). The paper
draws its lengths from ranges; Quire ships lengths drawn once from the same ranges.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from benchmarks.common.result import Chart
from benchmarks.paper.item import SCALED, Item, Measured, Ours, Values
from benchmarks.paper.material import Material
from benchmarks.rebatch.arms import Models, run_arm
from benchmarks.rebatch.config import EMBEDDING, SHAPING, STATIC, W1, W2, RebatchConfig
from benchmarks.rebatch.load import Load, workload
from benchmarks.rebatch.run import RebatchRun

_MODEL = "llama-2-7b"
_CONFIG = RebatchConfig()
_ARMS = (STATIC, "pd", SHAPING, EMBEDDING)
_QUICK_QUERIES = 24


def _scale(material: Material, name: str, wanted: float) -> float:
    """Factor on the lengths: the wanted one, or as much as the model's context holds."""
    longest = max(query.final_tokens for query in workload(name, 1.0))
    return min(wanted, material.model.spec.max_positions / longest)


def _load(material: Material, name: str, scale: float) -> Load:
    return workload(name, scale, _QUICK_QUERIES if material.quick else None)


def _run(material: Material, load: Load, arm: str, batch: int) -> RebatchRun:
    models = material.once("dense", lambda: Models(material.dense, material.model))
    return run_arm(models, load, arm, batch, replace(_CONFIG, clock=_clock(material)))


def _clock(material: Material) -> str:
    """A short run on a busy CPU has meaning in CPU seconds only."""
    return "cpu" if material.quick and not material.on_gpu else "wall"


def _differences(material: Material, machine: str, scale: float, load: Load) -> tuple[str, ...]:
    others = (
        f"lengths times {scale:.3g}" if scale != 1 else "",
        f"{len(load)} queries" if material.quick else "",
        "CPU seconds" if _clock(material) == "cpu" else "",
    )
    return material.differences(_MODEL, machine, others)


# ---- table 1 -------------------------------------------------------------------------------------

_CPU_SCALE, _QUICK_SCALE = 0.04, 0.01
_DOUBLED = {4: 2, 8: 1}
"""The paper doubles all lengths at a batch of 4."""


def _table_1(material: Material) -> Measured:
    rows = {}
    for batch, factor in _DOUBLED.items():
        usual = 1.0 if material.on_gpu else _CPU_SCALE
        scale = _scale(material, W1, factor * (_QUICK_SCALE if material.quick else usual))
        load = _load(material, W1, scale)
        runs = [_run(material, load, arm, batch) for arm in _ARMS]
        rows[f"batch {batch}"] = Ours(
            values=tuple(run.total_s if not run.ended else None for run in runs),
            differences=_differences(material, "NVIDIA A6000 (48 GB)", scale / factor, load),
            note="; ".join(_ending(run) for run in runs if run.ended),
        )
    return Measured(rows=rows)


def _ending(run: RebatchRun) -> str:
    return f"{run.arm} stopped after {run.answered:.0%} of the queries: its slab was full"


TABLE_1 = Item(
    id="table-1",
    title="Table 1: completion time of 120 mixed queries, s",
    setting="Llama-2-7b-chat, A6000, 120 queries; lengths are doubled at batch 4",
    columns=("Benchmark", "PD", "BATON", "BATON-PD"),
    printed={
        "batch 4": (21901, 21781, 20549, 11771),
        "batch 8": (6619, 6577, 3424, 2654),
    },
    measure=_table_1,
    status=SCALED,
    reason="lengths drawn from the same ranges; on a CPU they are scaled",
)

# ---- the second workload -------------------------------------------------------------------------

BATCHES = (2, 4, 6, 8, 10)
_W2_CPU_SCALE, _W2_QUICK_SCALE = 0.2, 0.1
_MACHINE = "NVIDIA 4090 (24 GB)"

Pair = tuple[RebatchRun, RebatchRun]


def _pairs(material: Material) -> Mapping[int, Pair]:
    """Static batches and vector embedding at every batch size."""

    def measure() -> dict[int, Pair]:
        load = _w2(material)
        return {
            batch: (
                _run(material, load, STATIC, batch),
                _run(material, load, EMBEDDING, batch),
            )
            for batch in BATCHES
        }

    return material.once("w2", measure)


def _w2_scale(material: Material) -> float:
    usual = 1.0 if material.on_gpu else _W2_CPU_SCALE
    return _scale(material, W2, _W2_QUICK_SCALE if material.quick else usual)


def _w2(material: Material) -> Load:
    return _load(material, W2, _w2_scale(material))


def _w2_rows(
    material: Material, values: Callable[[RebatchRun, RebatchRun], Values], note: str = ""
) -> dict[str, Ours]:
    differences = _differences(material, _MACHINE, _w2_scale(material), _w2(material))
    return {
        f"batch {batch}": Ours(values=values(*pair), differences=differences, note=note)
        for batch, pair in _pairs(material).items()
    }


def _table_2(material: Material) -> Measured:
    return Measured(
        rows=_w2_rows(
            material,
            lambda static, baton: (
                static.total_s,
                baton.total_s,
                static.total_s / baton.total_s,
            ),
            "BATON with prefill and decode separated, as the paper's setup says",
        )
    )


TABLE_2 = Item(
    id="table-2",
    title="Table 2: completion time of 30 short queries",
    setting="Llama-2-7b-chat, NVIDIA 4090, 30 queries of short inputs and outputs",
    columns=("Benchmark s", "BATON s", "speed-up"),
    printed={
        "batch 2": (161.77, 83.43, 1.94),
        "batch 4": (92.68, 49.61, 1.89),
        "batch 6": (61.70, 37.25, 1.66),
        "batch 8": (50.07, 31.08, 1.61),
        "batch 10": (40.45, 30.99, 1.31),
    },
    measure=_table_2,
    status=SCALED,
    reason="lengths drawn from the same ranges; on a CPU they are scaled",
)


# ---- figures -------------------------------------------------------------------------------------


def _half_s(times_s: Sequence[float]) -> float:
    """Time by which half of the events have happened."""
    return float(np.median(times_s)) if times_s else 0.0


def _ends_s(run: RebatchRun) -> list[float]:
    return [times[-1] for times in run.times_s if times]


def _tokens_s(run: RebatchRun) -> list[float]:
    return [when for times in run.times_s for when in times]


def _chart(
    material: Material,
    name: str,
    label: str,
    curve: Callable[[RebatchRun], tuple[tuple[float, float], ...]],
) -> Chart:
    lines = {
        f"{arm}, {batch} rows": curve(run)
        for batch, pair in _pairs(material).items()
        if batch in (min(BATCHES), max(BATCHES))
        for arm, run in zip(("Benchmark", "BATON"), pair, strict=True)
    }
    return Chart(
        name=name,
        title=f"{label} over time",
        x_label="seconds",
        y_label=label,
        lines=lines,
    )


def _half_times(
    material: Material, times_s: Callable[[RebatchRun], Sequence[float]]
) -> dict[str, Ours]:
    def values(static: RebatchRun, baton: RebatchRun) -> Values:
        halves = [_half_s(times_s(run)) for run in (static, baton)]
        return (*halves, halves[0] / halves[1] if halves[1] else None)

    return _w2_rows(material, values)


def _figure_5(material: Material) -> Measured:
    chart = _chart(material, "queries", "queries answered", RebatchRun.answered_curve)
    return Measured(rows=_half_times(material, _ends_s), charts=(chart,))


def _figure_6(material: Material) -> Measured:
    chart = _chart(material, "tokens", "tokens generated", RebatchRun.token_curve)
    return Measured(rows=_half_times(material, _tokens_s), charts=(chart,))


def _figure_7(material: Material) -> Measured:
    def values(static: RebatchRun, baton: RebatchRun) -> Values:
        peaks = [run.kv_peak_bytes / 2**20 for run in (static, baton)]
        return (*peaks, *(_mean_over_peak(run) for run in (static, baton)))

    chart = _chart(material, "kv", "MiB of KV", RebatchRun.kv_curve)
    return Measured(rows=_w2_rows(material, values), charts=(chart,))


def _mean_over_peak(run: RebatchRun) -> float:
    """KV bytes over time, as a fraction of the highest."""
    if len(run.kv_bytes) < 2:
        return 1.0
    times_s, held = np.array(run.kv_bytes, dtype=float).T
    mean = float(np.sum(np.diff(times_s) * held[:-1]) / (times_s[-1] - times_s[0]))
    return mean / float(held.max())


def _figure(
    number: int,
    title: str,
    columns: tuple[str, ...],
    measure: Callable[[Material], Measured],
) -> Item:
    return Item(
        id=f"figure-{number}",
        title=f"Figure {number}: {title}",
        setting=TABLE_2.setting,
        columns=columns,
        printed={f"batch {batch}": (None,) * len(columns) for batch in BATCHES},
        measure=measure,
        status=SCALED,
        reason="curves of the same runs as Table 2; the paper prints no values",
    )


ITEMS = (
    TABLE_1,
    TABLE_2,
    _figure(
        5,
        "cumulative completed queries",
        ("Benchmark, half of the queries s", "BATON, half of the queries s", "speed-up"),
        _figure_5,
    ),
    _figure(
        6,
        "cumulative output tokens",
        ("Benchmark, half of the tokens s", "BATON, half of the tokens s", "speed-up"),
        _figure_6,
    ),
    _figure(
        7,
        "GPU memory of the KV cache",
        (
            "Benchmark peak MiB",
            "BATON peak MiB",
            "Benchmark mean over peak",
            "BATON mean over peak",
        ),
        _figure_7,
    ),
)
