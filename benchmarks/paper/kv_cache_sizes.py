"""Paper 001: tables of "KV Cache: The Hidden Memory Giant" that follow from formulas.

The article writes GB for two units: weights are in 10^9 bytes, KV is in 2^30 bytes. Values here use
the unit that the article's own formulas use for the column.
"""

from collections.abc import Iterator, Mapping

from benchmarks.paper.item import NOT_COMPARABLE, REPRODUCED, SCALED, Item, Measured, Ours, Values
from benchmarks.paper.item import no_values as missing
from benchmarks.paper.material import Material
from benchmarks.paper.shapes import shape
from benchmarks.quant.capacity import codes_bytes
from benchmarks.quant.config import CapacityConfig
from quire.layout.model import ModelSpec
from quire.plan.capacity import (
    DEFAULT_HEADROOM_SHARE,
    MemoryLayout,
    assess,
    auto_kv_memory,
    estimate_activation_peak,
)
from quire.plan.roofline import decode_step

GB, GIB = 10**9, 2**30
FP16 = 2
A100_BYTES, A100_READ_BYTES_PER_S = 80 * GB, 2.0e12
TOKENS = 4_096

_STEP_TOKENS, _SAMPLED_ROWS = 2_048, 64
_QUARTER = "the printed KV is a quarter of what the article's formula gives"


def kv_gib(spec: ModelSpec, batch: int, tokens: int = TOKENS, value_bytes: float = FP16) -> float:
    """KV of equal sequences in GiB."""
    return batch * spec.kv_bytes(tokens, value_bytes) / GIB


def memory_of(spec: ModelSpec, devices: int) -> MemoryLayout:
    """Division of the memory of A100s: a tenth as headroom, steps of 2,048 tokens."""
    total_bytes = devices * A100_BYTES
    weights_bytes, peak_bytes = spec.weight_bytes(FP16), activation_bytes(spec)
    headroom_bytes = int(DEFAULT_HEADROOM_SHARE * total_bytes)
    return MemoryLayout(
        total_bytes=total_bytes,
        weights_bytes=weights_bytes,
        activation_peak_bytes=peak_bytes,
        headroom_bytes=headroom_bytes,
        kv_bytes=auto_kv_memory(total_bytes, weights_bytes, peak_bytes, headroom_bytes),
    )


def activation_bytes(spec: ModelSpec) -> int:
    """Estimated peak of a step's activations."""
    return estimate_activation_peak(
        spec,
        max_num_batched_tokens=_STEP_TOKENS,
        sampled_rows=_SAMPLED_ROWS,
        bytes_per_value=FP16,
    )


# ---- sizes ---------------------------------------------------------------------------------------

_SIZES: Mapping[str, tuple[str, int]] = {
    "Llama 3 8B": ("llama-3-8b", 32),
    "Mistral 7B": ("mistral-7b", 32),
    "Llama 3 70B": ("llama-3-70b", 32),
    "Llama 3 70B (batch=64)": ("llama-3-70b", 64),
    "Llama 3 70B (batch=128)": ("llama-3-70b", 128),
    "Llama 3 405B": ("llama-3-405b", 32),
}
_GPT_4 = "GPT-4 class (est.)"


def _model_sizes(_material: Material) -> Measured:
    rows = {}
    for label, (name, batch) in _SIZES.items():
        spec = shape(name)
        weights, kv = spec.weight_bytes(FP16) / GB, kv_gib(spec, batch)
        rows[label] = Ours(values=(weights, kv, 100 * kv / weights), note=_QUARTER)
    kv = 2 * 120 * 16 * 128 * TOKENS * 32 * FP16 / GIB
    rows[_GPT_4] = Ours(values=(None, kv, None), note=f"{_QUARTER}; the model has no shape")
    return Measured(rows=rows)


MODEL_SIZES = Item(
    id="model-sizes",
    title="KV Cache Memory for Popular Models",
    setting="batch 32 unless stated, 4,096 tokens, FP16",
    columns=("weights GB", "KV GiB", "KV/weights %"),
    printed={
        "Llama 3 8B": (16, 4.0, 25),
        "Mistral 7B": (14, 4.0, 29),
        "Llama 3 70B": (140, 10.0, 7),
        "Llama 3 70B (batch=64)": (140, 20.0, 14),
        "Llama 3 70B (batch=128)": (140, 40.0, 29),
        "Llama 3 405B": (810, 15.8, 2),
        _GPT_4: (800, 30.0, 4),
    },
    measure=_model_sizes,
    status=NOT_COMPARABLE,
    reason="weights agree; the printed KV contradicts the article's formula by a factor of 4",
)

_BATCHES = (1, 8, 16, 32, 64, 128, 256)


def _size_by_batch(_material: Material) -> Measured:
    spec = shape("llama-3-70b")
    weights = spec.weight_bytes(FP16) / GB
    rows = {
        str(batch): Ours(values=(kv_gib(spec, batch), weights), note=_QUARTER) for batch in _BATCHES
    }
    return Measured(rows=rows)


SIZE_BY_BATCH = Item(
    id="size-by-batch",
    title="KV Cache Size vs Batch Size (chart)",
    setting="Llama 3 70B, 4,096 tokens, FP16; rows are batch sizes",
    columns=("KV GiB", "weights GB"),
    printed={
        str(batch): (kv, 140)
        for batch, kv in zip(_BATCHES, (0.31, 2.5, 5, 10, 20, 40, 80), strict=True)
    },
    measure=_size_by_batch,
    status=NOT_COMPARABLE,
    reason="weights agree; the printed KV contradicts the article's formula by a factor of 4",
)

# ---- memory layouts ------------------------------------------------------------------------------

_WEIGHTS, _KV, _ACTIVATIONS, _FREE = "weights", "KV cache", "activations, workspace", "free"
_POOL, _PREFIX, _HEADROOM = "KV block pool (INT8)", "prefix cache", "watermark headroom"
_ESTIMATE = (
    f"estimate of Quire's planner for steps of {_STEP_TOKENS:,} tokens, without workspaces; the "
    "article gives no formula",
)


def _memory_layout(_material: Material) -> Measured:
    spec = shape("llama-3-70b")
    weights, kv = spec.weight_bytes(FP16) / GB, kv_gib(spec, 64)
    activations = activation_bytes(spec) / GB
    rest = 4 * A100_BYTES / GB - weights - kv - activations
    rows = {
        _WEIGHTS: Ours(values=(weights,)),
        _KV: Ours(values=(kv,)),
        _ACTIVATIONS: Ours(values=(activations,), differences=_ESTIMATE),
        _FREE: Ours(values=(rest,), differences=_ESTIMATE),
    }
    return Measured(rows=rows)


MEMORY_LAYOUT = Item(
    id="memory-layout",
    title="GPU Memory Layout: Llama 3 70B Serving (figure)",
    setting="4 A100 of 80 GB, batch 64, 4,096 tokens, FP16",
    columns=("GB",),
    printed={_WEIGHTS: (140,), _KV: (80,), _ACTIVATIONS: (20,), _FREE: (80,)},
    measure=_memory_layout,
    status=REPRODUCED,
    reason="weights and KV; activations and the rest are estimates",
)

_REQUESTS, _MEAN_TOKENS = 96, 1_536


def _optimized_layout(_material: Material) -> Measured:
    spec = shape("llama-3-70b")
    vectors = spec.num_layers * spec.num_kv_heads * _REQUESTS * _MEAN_TOKENS
    pool = vectors * codes_bytes(CapacityConfig(head_dim=spec.head_dim), "int8") / GIB
    rows = {
        _WEIGHTS: Ours(values=(spec.weight_bytes(FP16) / GB,)),
        _POOL: Ours(
            values=(pool,),
            note=f"{_REQUESTS} requests of {_MEAN_TOKENS:,} tokens, with scales; the article's "
            "requests have these mean lengths, and its pool holds about twice as many tokens",
        ),
        _PREFIX: missing("the article states no number of cached tokens"),
        _ACTIVATIONS: Ours(values=(activation_bytes(spec) / GB,), differences=_ESTIMATE),
        _HEADROOM: Ours(
            values=(DEFAULT_HEADROOM_SHARE * 4 * A100_BYTES / GB,),
            differences=("Quire's default headroom, a tenth of the memory",),
        ),
    }
    return Measured(rows=rows)


OPTIMIZED_LAYOUT = Item(
    id="optimized-layout",
    title="Optimized GPU Memory Layout: Llama 3 70B Serving (figure)",
    setting="4 A100 of 80 GB, paged INT8 KV, 96 or more requests",
    columns=("GB",),
    printed={
        _WEIGHTS: (140,),
        _POOL: (48,),
        _PREFIX: (10,),
        _ACTIVATIONS: (12,),
        _HEADROOM: (10,),
    },
    measure=_optimized_layout,
    status=SCALED,
    reason="weights agree; the article does not state the lengths behind its pool and its prefixes",
)

# ---- bandwidth -----------------------------------------------------------------------------------

_READ_BATCHES: Mapping[int, Values] = {
    1: (140, 0.6, 140.6, 0.4, 70),
    8: (140, 5.0, 145.0, 3.4, 73),
    32: (140, 20.0, 160.0, 12.5, 80),
    64: (140, 40.0, 180.0, 22.2, 90),
    128: (140, 80.0, 220.0, 36.4, 110),
    256: (140, 160.0, 300.0, 53.3, 150),
}


def _bandwidth(_material: Material) -> Measured:
    spec = shape("llama-3-70b")
    rows = {}
    for batch in _READ_BATCHES:
        step = decode_step(spec, batch=batch, tokens=2_048)
        weights, kv = step.weights_read_bytes / GB, step.kv_read_bytes / GIB
        total = weights + kv
        seconds = GB * total / A100_READ_BYTES_PER_S
        rows[str(batch)] = Ours(
            values=(weights, kv, total, 100 * kv / total, 1e3 * seconds),
            note="weights in 10^9 and KV in 2^30 bytes, as printed; embeddings are not read",
        )
    return Measured(rows=rows)


BANDWIDTH = Item(
    id="bandwidth",
    title="Memory Bandwidth Breakdown per Decode Step",
    setting="Llama 3 70B, 2,048 tokens, FP16, 2 TB/s; rows are batch sizes",
    columns=("weights GB", "KV GiB", "total", "KV %", "A100 ms"),
    printed={str(batch): values for batch, values in _READ_BATCHES.items()},
    measure=_bandwidth,
    status=REPRODUCED,
    reason="formula; one memory of 2 TB/s, as in the article",
)

# ---- when KV management matters ------------------------------------------------------------------

_SCENARIOS: Mapping[str, tuple[str, tuple[int, int, int]]] = {
    "Short chat": ("llama-3-8b", (256, 255, 31)),
    "Small model API": ("llama-3.2-1b", (2_048, 2_047, 63)),
    "Classification": ("llama-3-8b", (2_038, 9, 256)),
    "Long-form generation": ("llama-3-8b", (2_049, 513, 33)),
    "Multi-turn chat": ("llama-3-8b", (4_097, 256, 65)),
    "RAG with long context": ("llama-3-8b", (8_193, 257, 17)),
}


def _when_it_matters(_material: Material) -> Measured:
    return Measured(rows=dict(_impacts()))


def _impacts() -> Iterator[tuple[str, Ours]]:
    from quire.sim.models import model_shape

    for label, (name, (given, new, batch)) in _SCENARIOS.items():
        spec = model_shape(name)
        verdict = assess(spec, memory_of(spec, 1), given, new, batch)
        yield (
            label,
            Ours(
                values=(verdict.impact,),
                note=f"{name} on one A100, {given:,} + {new:,} tokens, batch {batch}: just inside "
                f"the printed ranges; {verdict.reasons[0]}",
            ),
        )


WHEN_IT_MATTERS = Item(
    id="when-it-matters",
    title="When KV Cache Optimization Matters Most",
    setting="ranges of lengths and batches; no model is stated",
    columns=("impact",),
    printed={
        "Short chat": ("low",),
        "Small model API": ("low-medium",),
        "Classification": ("low",),
        "Long-form generation": ("high",),
        "Multi-turn chat": ("very high",),
        "RAG with long context": ("critical",),
    },
    measure=_when_it_matters,
    status=REPRODUCED,
    reason="verdicts of `quire plan`, whose thresholds come from this table, at one point of each "
    "printed range",
)
