"""Paper 003: Figures 6 to 10 and 12 to 14 of KVPR (Jiang et al. 2025).

The figures print no values; their rows hold the values that the text states.
"""

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.common.result import Chart
from benchmarks.offload.arms import BY_NAME, Arm
from benchmarks.offload.engine_part import offloaded_step_s
from benchmarks.offload.virtual import Case, Load
from benchmarks.paper.item import NOT_COMPARABLE, SCALED, Item, Measured, Ours, Values, no_values
from benchmarks.paper.kvpr_cases import (
    A100,
    ARMS,
    BASELINE,
    KVPR,
    LATENCY_ROWS,
    THROUGHPUT_BATCHES,
    THROUGHPUT_ROWS,
    case,
    latency,
    virtual_differences,
)
from benchmarks.paper.kvpr_tables import LATENCIES, RUNS, SEQUENCES
from benchmarks.paper.material import Material
from quire.offload.schedule.executor import ScheduleClock
from quire.offload.schedule.planner import combine_devices
from quire.offload.timeline import DEVICE, TaskKind, Timeline

_VIRTUAL = "virtual clock with the rates of a data sheet"
_INT4 = 0.5625  # bytes of an element, in groups of 64 with a scale and a zero of 16 bits

# ---- figure 6 ------------------------------------------------------------------------------------

_HIGHEST = {"OPT-6.7B": 1.151, "OPT-13B": 1.462, "OPT-30B": 1.290}
_BATCHES = (1, 2, 4, 8, 16, 32, 48)


def _figure_6(material: Material) -> Measured:
    rows, lines = {}, {}
    for model in _HIGHEST:
        found = case(material, model, weights_on_device=False)
        by_length = [_rates(found, 32, *lengths) for lengths in _lengths(material)]
        best = max(by_length, key=lambda rates: rates[1] / rates[0])
        rows[f"{model}, highest of all lengths"] = _throughputs(material, best)
        by_batch = {batch: _rates(found, batch, 1_024, 32) for batch in _batches(material)}
        for batch in _BATCHES:
            label = f"{model}, {batch} rows"
            if batch in by_batch:
                rows[label] = _throughputs(material, by_batch[batch])
            else:
                rows[label] = no_values("--quick runs 1, 8 and 32 rows")
        lines[model] = tuple((batch, rates[1] / rates[0]) for batch, rates in by_batch.items())
    chart = Chart(
        name="speedup",
        title="Throughput of the paper's split over FlexGen's schedule, prompts of 1,024",
        x_label="rows of a batch",
        y_label="speed-up",
        lines=lines,
    )
    return Measured(rows=rows, charts=(chart,))


def _lengths(material: Material) -> Sequence[tuple[int, int]]:
    return SEQUENCES[-2:-1] if material.quick else SEQUENCES


def _batches(material: Material) -> tuple[int, ...]:
    return (1, 8, 32) if material.quick else _BATCHES


def _rates(found: Case, rows: int, prompt: int, generated: int) -> tuple[float, float]:
    load = Load(rows=rows, prompt=prompt, generated=generated, batches=THROUGHPUT_BATCHES)
    return found.tokens_per_s(BASELINE, load), found.tokens_per_s(KVPR, load)


def _throughputs(material: Material, rates: tuple[float, float]) -> Ours:
    base, kvpr = rates
    return Ours(values=(base, kvpr, kvpr / base), differences=virtual_differences(material))


FIGURE_6 = Item(
    id="figure-6",
    title="Figure 6: throughput by length, and by batch size",
    setting="A100, weights and KV offloaded, 8 batches of 32 rows; by batch: 1,024 + 32 tokens",
    columns=("FlexGen tokens/s", "KVPR tokens/s", "speed-up"),
    printed={
        label: values
        for model, highest in _HIGHEST.items()
        for label, values in (
            (f"{model}, highest of all lengths", (None, None, highest)),
            *((f"{model}, {batch} rows", (None, None, None)) for batch in _BATCHES),
        )
    },
    measure=_figure_6,
    status=SCALED,
    reason=_VIRTUAL,
)

# ---- figure 7 ------------------------------------------------------------------------------------

_STAGED_LAYERS = 2


def _figure_7(material: Material) -> Measured:
    return Measured(rows=dict(_cuts(material)) | dict(_engine_rows(material)))


def _cuts(material: Material) -> Iterator[tuple[str, Ours]]:
    for model in LATENCIES:
        for prompt, generated in RUNS:
            load = Load(rows=LATENCY_ROWS, prompt=prompt, generated=generated)
            found = latency(material, model, load)
            base, kvpr, own = found.seconds
            yield (
                f"{model}, {prompt} + {generated}",
                Ours(
                    values=(base, kvpr, 100 * (1 - kvpr / base)),
                    differences=found.differences,
                    note=f"Quire's split: {100 * (1 - own / base):.1f} % less",
                ),
            )


def _engine_rows(material: Material) -> Iterator[tuple[str, Ours]]:
    """Decode steps of Quire's engine on the given model, with a quarter of its KV offloaded."""
    label = f"engine, {material.model_name}, one step"
    if material.model.spec.num_layers <= _STAGED_LAYERS:
        yield label, no_values("KV offload needs a model of more than two layers")
        return
    tokens = material.context(2_048, 256) - 32
    steps = 6 if material.quick else 24
    base, split = (
        offloaded_step_s(material.model, tokens, steps, arm)[0] for arm in ("off", "auto")
    )
    yield (
        label,
        Ours(
            values=(base, split, 100 * (1 - split / base)),
            differences=(
                f"Quire's engine on {material.machine}: one sequence of {tokens:,} tokens, a "
                "quarter of its KV offloaded, the split that measured rates select",
            ),
        ),
    )


def _printed_cuts() -> dict[str, Values]:
    found: dict[str, Values] = {}
    for model, methods in LATENCIES.items():
        for run, (prompt, generated) in enumerate(RUNS):
            base, kvpr = (float(methods[name][run][2] or 0) for name in ("Accel.", "KVPR"))
            found[f"{model}, {prompt} + {generated}"] = (base, kvpr, 100 * (1 - kvpr / base))
    return found


FIGURE_7 = Item(
    id="figure-7",
    title="Figure 7: decoding latency of one batch; values of Tables 3 and 4",
    setting="A100, batch 64, weights on the GPU; DeepSpeed Inference has no printed values",
    columns=("Accelerate s", "KVPR s", "less latency %"),
    printed=_printed_cuts(),
    measure=_figure_7,
    status=SCALED,
    reason="virtual clock; the engine runs on the given model",
)

# ---- figures 8 and 10 ----------------------------------------------------------------------------


def _timeline(found: Case, arm: Arm, batches: int) -> Timeline:
    tokens = THROUGHPUT_ROWS * 1_040  # in the middle of 1,024 + 32
    return ScheduleClock().run(found.schedule(arm, THROUGHPUT_ROWS, tokens, batches))


def _figure_8(material: Material) -> Measured:
    found = case(material, "OPT-13B", weights_on_device=False)
    rows = {}
    for label, arm in (("FlexGen", BASELINE), ("KVPR", KVPR)):
        timeline = _timeline(found, arm, THROUGHPUT_BATCHES)
        busy_s = sum(span.seconds for span in timeline.of(DEVICE))
        rows[label] = Ours(
            values=(100 * busy_s / timeline.seconds,),
            differences=(
                *virtual_differences(material),
                "OPT-13B, 1,024 + 32 tokens: the paper states neither",
            ),
            note="time in products and attention over the time of a step; a GPU's own utilization "
            "also counts kernels that wait for memory",
        )
    return Measured(rows=rows)


FIGURE_8 = Item(
    id="figure-8",
    title="Figure 8: GPU utilization in the decoding stage",
    setting="A100, weights and KV offloaded; peak memory has no printed values",
    columns=("utilization %",),
    printed={"FlexGen": (85,), "KVPR": (99,)},
    measure=_figure_8,
    status=SCALED,
    reason=f"busy time of the device; {_VIRTUAL}",
)

_BREAKDOWN: Mapping[str, Values] = {
    "FlexGen": (58, 0, 2.3),
    "KVPR": (38, 8, 13.3),
}
_MLP = 2  # part of the weights that the MLP needs


def _figure_10(material: Material) -> Measured:
    found = case(material, "OPT-6.7B", weights_on_device=False)
    rows = {}
    for label, arm in (("FlexGen", BASELINE), ("KVPR", KVPR)):
        seconds = _attention_seconds(_timeline(found, arm, 1))
        total_s = sum(seconds.values())
        compute_s = seconds.get(TaskKind.PROJECT, 0.0) + seconds.get(TaskKind.ATTEND, 0.0)
        parts = (seconds.get(TaskKind.KV_IN, 0.0), seconds.get(TaskKind.X_IN, 0.0), compute_s)
        rows[label] = Ours(
            values=tuple(100 * part / total_s for part in parts),
            differences=(
                *virtual_differences(material),
                "OPT-6.7B, one batch of 32, 1,024 tokens: the paper does not state them",
            ),
            note="fractions of the sum of all operations of the attention blocks, weights included",
        )
    return Measured(rows=rows)


def _attention_seconds(timeline: Timeline) -> dict[TaskKind, float]:
    """Seconds by kind of operation, without the MLP and its weights."""
    found: dict[TaskKind, float] = {}
    for span in timeline.spans:
        kind, part = span.operation.kind, span.operation.part
        if kind != TaskKind.LAYER and not (kind == TaskKind.WEIGHTS_IN and part == _MLP):
            found[kind] = found.get(kind, 0.0) + float(span.seconds)
    return found


FIGURE_10 = Item(
    id="figure-10",
    title="Figure 10: runtime breakdown of an MHA block",
    setting="A100, weights and KV offloaded",
    columns=("KV transfer %", "activation transfer %", "GPU computation %"),
    printed=_BREAKDOWN,
    measure=_figure_10,
    status=SCALED,
    reason=_VIRTUAL,
)

# ---- figure 9 ------------------------------------------------------------------------------------


_WIDTHS: Mapping[str, tuple[float, float]] = {
    "16-bit KV": (2, 2),
    "4-bit KV": (_INT4, 2),
    "4-bit KV and activations": (_INT4, _INT4),
}


def _figure_9(material: Material) -> Measured:
    rows = {}
    for label, (kv_bytes, x_bytes) in _WIDTHS.items():
        found = case(
            material,
            "OPT-13B",
            weights_on_device=False,
            kv_value_bytes=kv_bytes,
            x_value_bytes=x_bytes,
        )
        base, kvpr = _rates(found, THROUGHPUT_ROWS, 1_024, 32)
        rows[label] = Ours(
            values=(base, kvpr, kvpr / base),
            differences=virtual_differences(material),
            note="16-bit activations are larger than 4-bit KV, so recompute does not pay"
            if x_bytes > 2 * kv_bytes
            else "",
        )
    return Measured(rows=rows)


FIGURE_9 = Item(
    id="figure-9",
    title="Figure 9: throughput with 4-bit KV on the link",
    setting="OPT-13B, A100, group-wise 4-bit quantization",
    columns=("FlexGen tokens/s", "KVPR tokens/s", "speed-up"),
    printed={"16-bit KV": (None, None, None), "4-bit KV": (None, None, None)},
    measure=_figure_9,
    status=SCALED,
    reason=f"{_VIRTUAL}; the paper prints no values",
)

# ---- figure 12 -----------------------------------------------------------------------------------


def _figure_12(material: Material) -> Measured:
    found = case(material, "OPT-6.7B")
    rows, lines = {}, {}
    for arm in ARMS[1:]:
        lines[arm.label] = tuple(
            (generated, _split(found, arm, 128 + generated)) for generated in range(1, 33)
        )
    for generated in (1, 32):
        splits = [_split(found, arm, 128 + generated) for arm in ARMS[1:]]
        rows[f"generation length {generated}"] = Ours(
            values=(splits[0],),
            differences=virtual_differences(material),
            note=f"Quire's split: {splits[1]:.0f}; 182 of 129 tokens is not possible",
        )
    chart = Chart(
        name="split",
        title="Recomputed tokens of a row over a generation",
        x_label="generated tokens",
        y_label="recomputed tokens",
        lines=lines,
    )
    return Measured(rows=rows, charts=(chart,))


def _split(found: Case, arm: Arm, tokens: int) -> float:
    return found.layout(arm, LATENCY_ROWS, LATENCY_ROWS * tokens).batch.x / LATENCY_ROWS


FIGURE_12 = Item(
    id="figure-12",
    title="Figure 12: optimal KV split points over the generation",
    setting="OPT-6.7B, A100, batch 64, prompt 128, 32 tokens",
    columns=("recomputed tokens of a row",),
    printed={"generation length 1": (182,), "generation length 32": (128,)},
    measure=_figure_12,
    status=NOT_COMPARABLE,
    reason=f"{_VIRTUAL}; the printed 182 exceeds the 129 tokens of a row",
)

# ---- figure 13 -----------------------------------------------------------------------------------


def _figure_13(material: Material) -> Measured:
    rows = {}
    for model in ("LLaMa2-7B", "LLaMa2-13B"):
        for prompt, generated in RUNS:
            load = Load(rows=LATENCY_ROWS, prompt=prompt, generated=generated)
            found = latency(material, model, load)
            base, kvpr = (found.tokens_per_s(arm, generated - 1) for arm in (0, 1))
            rows[f"{model}, {prompt} + {generated}"] = Ours(
                values=(base, kvpr, kvpr / base), differences=found.differences
            )
    return Measured(rows=rows)


FIGURE_13 = Item(
    id="figure-13",
    title="Figure 13: decoding throughput of LLaMa2 models",
    setting="LLaMa2-7B and 13B, A100, batch 64, weights on the GPU",
    columns=("Accelerate tokens/s", "KVPR tokens/s", "speed-up"),
    printed={
        f"{model}, {prompt} + {generated}": (None, None, None)
        for model in ("LLaMa2-7B", "LLaMa2-13B")
        for prompt, generated in RUNS
    },
    measure=_figure_13,
    status=SCALED,
    reason="virtual clock; the paper prints no values",
)

# ---- figure 14 -----------------------------------------------------------------------------------

_PROCESSES = (1, 2, 4, 8)


def _figure_14(material: Material) -> Measured:
    found = case(material, "OPT-6.7B")
    tokens = LATENCY_ROWS * 512
    rows = {}
    for processes in _PROCESSES:
        rates = []
        for arm in (BY_NAME["all_host"], KVPR):
            schedule = found.schedule(arm, LATENCY_ROWS, tokens)
            seconds = ScheduleClock().run(combine_devices([schedule] * processes)).seconds
            rates.append(LATENCY_ROWS / seconds)
        rows[f"{processes} processes"] = Ours(
            values=tuple(rates),
            differences=(
                *virtual_differences(material),
                f"the CPU reads KV at {A100.host_bytes_per_s / 1e9:g} GB/s for all processes",
                "OPT-6.7B, 64 rows of 512 tokens: the paper does not state them",
            ),
        )
    return Measured(rows=rows)


FIGURE_14 = Item(
    id="figure-14",
    title="Figure 14: KVPR and CPU attention (FastDecode) by number of GPU processes",
    setting="8 A100 and one CPU of 64 cores; one process per GPU",
    columns=("FastDecode tokens/s per process", "KVPR tokens/s per process"),
    printed={f"{processes} processes": (None, None) for processes in _PROCESSES},
    measure=_figure_14,
    status=SCALED,
    reason=f"{_VIRTUAL}; the paper prints no values",
)
