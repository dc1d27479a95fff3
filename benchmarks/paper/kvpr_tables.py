"""Paper 003: Tables 1 to 5 of KVPR (Jiang et al. 2025)."""

from collections.abc import Mapping

from benchmarks.common.kvpr import offload_rates
from benchmarks.common.result import Table
from benchmarks.offload.virtual import Load, one_by_one
from benchmarks.paper.item import NOT_COMPARABLE, SCALED, Item, Measured, Ours, Values
from benchmarks.paper.kvpr_cases import (
    BASELINE,
    KVPR,
    LATENCY_ROWS,
    MODELS,
    PIPELINED,
    THROUGHPUT_BATCHES,
    THROUGHPUT_ROWS,
    case,
    latency,
    virtual_differences,
)
from benchmarks.paper.material import Material
from benchmarks.paper.shapes import shape

MIB, GIB = 2**20, 2**30
_LINK_BYTES_PER_S, _PEAK_FLOPS_PER_S = 32 * GIB, 312e12
_VIRTUAL = "virtual clock with the rates of a data sheet"

# ---- table 1 -------------------------------------------------------------------------------------

_OPT = ("OPT-6.7B", "OPT-13B", "OPT-30B")
_COMPUTATION = ", computation"


def _table_1(_material: Material) -> Measured:
    rows = {}
    for model in _OPT:
        spec = shape(MODELS[model])
        tokens = 32 * 1_024
        kv_bytes = tokens * spec.kv_values_per_layer_token * 2
        link_ms = 1e3 * kv_bytes / _LINK_BYTES_PER_S
        rates = offload_rates(
            spec, link_bytes_per_s=_LINK_BYTES_PER_S, flops_per_s=_PEAK_FLOPS_PER_S
        )
        rows[model] = Ours(values=(spec.hidden_size, kv_bytes / MIB, link_ms, None))
        rows[model + _COMPUTATION] = Ours(
            values=(None, None, None, 1e3 * rates.recompute_s * tokens),
            note="the products at the A100's peak; the printed time is that of reading the KV at "
            "1.53 TB/s",
        )
    return Measured(rows=rows)


TABLE_1 = Item(
    id="table-1",
    title="Table 1: PCIe latency and computation latency of a layer's KV",
    setting="A100, PCIe 4 x16 at 32 GB/s, batch 32, 1,024 tokens, FP16",
    columns=("hidden", "KV MiB", "PCIe ms", "computation ms"),
    printed={
        "OPT-6.7B": (4096, 512, 15.6, None),
        "OPT-6.7B, computation": (None, None, None, 0.3509),
        "OPT-13B": (5120, 640, 19.5, None),
        "OPT-13B, computation": (None, None, None, 0.4388),
        "OPT-30B": (7168, 896, 27.3, None),
        "OPT-30B, computation": (None, None, None, 0.6143),
    },
    measure=_table_1,
    status=NOT_COMPARABLE,
    reason="sizes and PCIe times are reproduced; the printed computation is not a recompute",
)

# ---- table 2 -------------------------------------------------------------------------------------

_HIDING: Mapping[int, tuple[float, Values]] = {
    1: (3, (1.761, 1.749, 1.774)),
    2: (6, (3.488, 3.461, 3.586)),
    4: (12, (6.646, 6.766, 6.696)),
    8: (24, (12.826, 12.930, 12.986)),
    16: (48, (23.795, 23.613, 24.557)),
    32: (64, (41.210, 43.462, 43.945)),
}


def _table_2(material: Material) -> Measured:
    found = case(material, "OPT-6.7B", weights_on_device=False)
    spec = shape(MODELS["OPT-6.7B"])
    rows = {}
    for batch in _HIDING:
        load = Load(rows=batch, prompt=256, generated=64)
        rates = tuple(
            found.tokens_per_s(one_by_one(arm, fine=fine), load)
            for arm, fine in ((BASELINE, False), (KVPR, False), (KVPR, True))
        )
        rows[f"batch {batch}, KV"] = Ours(
            values=(batch * 256 * spec.kv_values_per_layer_token * 2 / MIB, None, None, None),
            note="256 tokens of a layer take 4 MiB per row",
        )
        rows[f"batch {batch}"] = Ours(
            values=(None, *rates), differences=virtual_differences(material)
        )
    return Measured(rows=rows)


TABLE_2 = Item(
    id="table-2",
    title="Table 2: hiding the recompute behind the transfer of weights, tokens/s",
    setting="OPT-6.7B, A100, weights and KV offloaded, 256 + 64 tokens",
    columns=("KV MiB", "FlexGen", "KVPR without hiding", "KVPR with hiding"),
    printed={
        f"batch {batch}{label}": values
        for batch, (kv_mb, rates) in _HIDING.items()
        for label, values in ((", KV", (kv_mb, None, None, None)), ("", (None, *rates)))
    },
    measure=_table_2,
    status=SCALED,
    reason="virtual clock with the rates of a data sheet; the printed KV is 3 MB for 256 tokens",
)

# ---- tables 3 and 4 ------------------------------------------------------------------------------

RUNS = ((128, 32), (128, 128), (256, 32), (256, 128), (512, 32), (512, 128))
LATENCIES: Mapping[str, Mapping[str, tuple[Values, ...]]] = {
    "OPT-6.7B": {
        "Accel.": (
            (5.0, 14.427, 8.905, 222.788),
            (8.0, 14.708, 71.327, 113.954),
            (9.0, 16.337, 26.825, 73.961),
            (12.0, 16.618, 88.354, 91.993),
            (17.0, 20.154, 24.390, 81.344),
            (20.0, 20.576, 110.277, 73.705),
        ),
        "KVPR": (
            (5.0, 14.364, 6.651, 298.284),
            (8.0, 14.645, 45.766, 177.598),
            (9.0, 16.212, 19.138, 103.666),
            (12.0, 16.493, 61.597, 131.955),
            (17.0, 19.904, 20.349, 97.501),
            (20.0, 20.951, 93.932, 86.531),
        ),
    },
    "OPT-13B": {
        "Accel.": (
            (7.812, 26.083, 11.409, 173.891),
            (12.500, 26.434, 73.896, 109.993),
            (14.062, 28.087, 19.381, 102.368),
            (18.750, 28.439, 104.115, 78.068),
            (26.562, 32.851, 35.066, 56.579),
            (31.250, 34.146, 168.155, 48.336),
        ),
        "KVPR": (
            (7.812, 26.005, 9.148, 216.867),
            (12.500, 26.356, 66.119, 122.929),
            (14.062, 27.931, 16.654, 119.127),
            (18.750, 28.337, 88.492, 91.850),
            (26.562, 33.203, 29.215, 67.911),
            (31.250, 34.615, 138.377, 58.738),
        ),
    },
}


def _latencies(material: Material, model: str) -> Measured:
    rows, gains = {}, []
    for run, (prompt, generated) in enumerate(RUNS):
        load = Load(rows=LATENCY_ROWS, prompt=prompt, generated=generated)
        found = latency(material, model, load)
        kv_bytes = load.rows * (prompt + generated) * shape(MODELS[model]).kv_bytes_per_token(2)
        for arm, method in enumerate(("Accel.", "KVPR")):
            rows[_run_label(method, run)] = Ours(
                values=(
                    kv_bytes / GIB,
                    None,
                    found.seconds[arm],
                    found.tokens_per_s(arm, generated - 1),
                ),
                differences=found.differences,
                note="the peak of the GPU's memory is not measured",
            )
        base, kvpr, own = found.seconds
        printed = [LATENCIES[model][method][run][2] for method in ("Accel.", "KVPR")]
        ratio = float(printed[0] or 0) / float(printed[1] or 1)
        gains.append((prompt, generated, ratio, base / kvpr, base / own))
    table = Table(
        name="gains",
        caption=f"Latency of transferring all KV over the latency of a split, {model}.",
        columns=("prompt", "generated", "paper", "the paper's split", "Quire's split"),
        rows=tuple(gains),
    )
    return Measured(rows=rows, tables=(table,))


def _run_label(method: str, run: int) -> str:
    prompt, generated = RUNS[run]
    return f"{method} {prompt} + {generated}"


def _latency_item(number: int, model: str) -> Item:
    return Item(
        id=f"table-{number}",
        title=f"Table {number}: latency of {model} with all KV offloaded",
        setting=f"{model}, A100 40 GB, batch {LATENCY_ROWS}, weights on the GPU",
        columns=("KV GiB", "GPU peak GB", "decode s", "decode tokens/s"),
        printed={
            _run_label(method, run): values
            for method, runs in LATENCIES[model].items()
            for run, values in enumerate(runs)
        },
        measure=lambda material: _latencies(material, model),
        status=SCALED,
        reason=f"{_VIRTUAL}; sizes are computed",
    )


TABLE_3, TABLE_4 = _latency_item(3, "OPT-6.7B"), _latency_item(4, "OPT-13B")

# ---- table 5 -------------------------------------------------------------------------------------

SEQUENCES = ((256, 32), (256, 128), (512, 32), (512, 128), (1_024, 32), (1_024, 128))
_LOW_END: Mapping[str, Values] = {
    "256/32": (50.057, 53.976),
    "256/128": (46.779, 49.860),
    "512/32": (29.614, 33.666),
    "512/128": (28.650, 32.277),
    "1024/32": (15.778, 18.285),
    "1024/128": (16.194, 18.108),
}


def _table_5(material: Material) -> Measured:
    found = case(material, "OPT-6.7B", weights_on_device=False, machine="rtx5000")
    rows = {}
    for prompt, generated in SEQUENCES:
        load = Load(
            rows=THROUGHPUT_ROWS,
            prompt=prompt,
            generated=generated,
            batches=THROUGHPUT_BATCHES,
        )
        base, kvpr, own = (found.tokens_per_s(arm, load) for arm in (BASELINE, KVPR, PIPELINED))
        rows[f"{prompt}/{generated}"] = Ours(
            values=(base, kvpr),
            differences=virtual_differences(material, "rtx5000"),
            note=f"Quire's split: {own / base:.3f} times the baseline",
        )
    return Measured(rows=rows)


TABLE_5 = Item(
    id="table-5",
    title="Table 5: throughput on a low-end GPU, tokens/s",
    setting="OPT-6.7B, Quadro RTX 5000, PCIe 4 x8, 8 batches of 32 rows, weights offloaded",
    columns=("FlexGen", "KVPR"),
    printed=_LOW_END,
    measure=_table_5,
    status=SCALED,
    reason="virtual clock with the rates of a data sheet",
)
