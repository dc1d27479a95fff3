"""Paper 001: decode throughput by batch and codec, and all optimizations together."""

import statistics
from collections.abc import Mapping
from dataclasses import replace

from benchmarks.common.result import Chart, Table
from benchmarks.common.target import Target
from benchmarks.paper.item import SCALED, Item, Measured, Ours, Values, no_values
from benchmarks.paper.kv_cache_sizes import A100_READ_BYTES_PER_S
from benchmarks.paper.material import Material
from benchmarks.paper.shapes import shape
from benchmarks.quant.bandwidth import DecodeSteps
from benchmarks.quant.config import PLAIN
from benchmarks.stack.arms import ARMS, StackRun, run_arm
from benchmarks.stack.load import StackLoad
from quire.models.device_memory import free_device_bytes
from quire.plan.roofline import decode_step

# ---- throughput by batch -------------------------------------------------------------------------

_CODECS: Mapping[str, float] = {PLAIN: 2, "int8": 1, "int4": 0.5}
_BATCHES = (1, 8, 32, 64, 128, 256)
_TOKENS = 2_048
_MEMORY_SHARE = 0.4  # fraction of the free memory that one codec's KV may take


def _decode_throughput(material: Material) -> Measured:
    tokens = material.context(_TOKENS, 128) - 32
    repeats = 2 if material.quick else 5
    most = 8 if material.quick else max(_BATCHES)
    rows = {}
    for batch in _BATCHES:
        if batch > most:
            rows[str(batch)] = no_values("--quick runs batches up to 8")
        elif not _fits(material, batch, tokens):
            rows[str(batch)] = no_values(
                f"the KV of {batch} sequences of {tokens:,} tokens does not fit in free memory"
            )
        else:
            rows[str(batch)] = Ours(
                values=_rates(material, batch, tokens, repeats),
                differences=material.differences(
                    "llama-3-70b", "A100 (80 GB)", (f"sequences of {tokens:,} tokens",)
                ),
            )
    return Measured(rows=rows, tables=(_bound(),))


def _fits(material: Material, batch: int, tokens: int) -> bool:
    model = material.model
    kv_bytes = batch * model.spec.kv_bytes(tokens + 32, model.decoder.dtype.itemsize)
    return kv_bytes < _MEMORY_SHARE * free_device_bytes(model.decoder.device)


def _rates(material: Material, batch: int, tokens: int, repeats: int) -> Values:
    target = Target(material.model.decoder.device)
    found = []
    for codec in _CODECS:
        step = DecodeSteps(material.model, codec, batch, tokens, repeats + 1)
        found.append(batch / target.median(step, repeats))
    return tuple(found)


def _bound() -> Table:
    """Most tokens/s of the article's model by memory reads alone."""
    spec = shape("llama-3-70b")
    rows = []
    for batch in _BATCHES:
        steps = [
            decode_step(spec, batch=batch, tokens=_TOKENS, kv_bytes_per_value=value_bytes)
            for value_bytes in _CODECS.values()
        ]
        rows.append((batch, *(step.tokens_per_s(A100_READ_BYTES_PER_S) for step in steps)))
    return Table(
        name="bound",
        caption=(
            f"Most tokens/s of Llama 3 70B by memory reads at 2 TB/s, sequences of {_TOKENS:,} "
            "tokens: the article's bandwidth table as rates. Its text says that 256 sequences take "
            "150 ms, which are 1,707 tokens/s; its chart has 1,050."
        ),
        columns=("batch", "FP16", "INT8", "INT4"),
        rows=tuple(rows),
    )


DECODE_THROUGHPUT = Item(
    id="decode-throughput",
    title="Decode Throughput vs Batch Size (chart)",
    setting="Llama 3 70B, A100 80 GB; rows are batch sizes",
    columns=("FP16 tokens/s", "INT8 tokens/s", "INT4 tokens/s"),
    printed={
        "1": (14, 14, 14),
        "8": (100, 105, 107),
        "32": (350, 370, 385),
        "64": (580, 640, 670),
        "128": (850, 980, 1050),
        "256": (1050, 1320, 1500),
    },
    measure=_decode_throughput,
    status=SCALED,
    reason="measured steps of the given model; the article's 140 GB of weights exceed its one A100",
)

# ---- all optimizations ---------------------------------------------------------------------------

_LABELS = (
    "Contiguous FP16",
    "Paged FP16",
    "Paged INT8",
    "Paged INT8 + prefix cache",
    "Paged INT4 + prefix cache",
)
_PRINTED: tuple[Values, ...] = (
    (24, 420, 85, 350, 55),
    (58, 780, 72, 180, 82),
    (96, 1050, 65, 160, 88),
    (96, 1180, 55, 145, 90),
    (140, 1420, 52, 155, 91),
)
_DIVISOR = 8  # of the article's lengths, on a CPU


def _load(material: Material) -> StackLoad:
    """The article's load on a GPU, and an eighth of its lengths on a CPU."""
    if material.quick:
        return StackLoad(
            model="tiny",
            requests=12,
            system_tokens=16,
            question_tokens=8,
            answer_tokens=8,
            longest_tokens=64,
            contiguous_rows=2,
        )
    if material.model.decoder.device.type != "cuda":
        return StackLoad(model="tiny")
    whole = StackLoad(model="tiny", requests=192, longest_tokens=8_192, contiguous_rows=24)
    return replace(whole, system_tokens=512, question_tokens=512, answer_tokens=512)


def _runs(material: Material) -> list[list[StackRun]]:
    """Rounds of all arms; the prompts' ids are below 500, which every vocabulary has."""
    load, rounds = _load(material), 1 if material.quick else 3
    few = replace(load, requests=2)
    for arm in ARMS:
        run_arm(material.model, few, arm)
    return [[run_arm(material.model, load, arm) for arm in ARMS] for _ in range(rounds)]


def _medians(material: Material) -> list[dict[str, float]]:
    rounds = material.once("stack", lambda: _runs(material))
    found = []
    for arm in range(len(ARMS)):
        runs = [runs[arm] for runs in rounds]
        shown = [run.to_json() for run in runs]
        names = ("max_batch", "token_p50_s", "token_p99_s")
        values = {name: statistics.median(float(one[name]) for one in shown) for name in names}
        rate = statistics.median(run.tokens_per_s for run in runs)
        found.append(values | {"tokens_per_s": rate})
    return found


def _differences(material: Material) -> tuple[str, ...]:
    load = _load(material)
    whole = load.longest_tokens == 8_192
    lengths = f"{load.requests} requests of {load.mean_tokens} tokens on average, lanes of "
    lengths += f"{load.longest_tokens:,}, instead of 1,536 and 8,192"
    return material.differences("llama-3-70b", "4 A100 (80 GB)", ("" if whole else lengths,))


def _end_to_end(material: Material) -> Measured:
    rows = {
        label: Ours(
            values=(
                int(one["max_batch"]),
                one["tokens_per_s"],
                1e3 * one["token_p50_s"],
                1e3 * one["token_p99_s"],
                None,
            ),
            differences=_differences(material),
            note="latency is the time between two tokens; utilization of a GPU is not measured",
        )
        for label, one in zip(_LABELS, _medians(material), strict=True)
    }
    return Measured(rows=rows)


END_TO_END = Item(
    id="end-to-end",
    title="End-to-End Serving Throughput",
    setting="Llama 3 70B, 4 A100, 1,024 tokens in and 512 out on average, at most 8,192",
    columns=("largest batch", "tokens/s", "p50 ms", "p99 ms", "GPU utilization %"),
    printed=dict(zip(_LABELS, _PRINTED, strict=True)),
    measure=_end_to_end,
    status=SCALED,
    reason="one device; the ratios between rows can be compared",
)


def _throughput_stack(material: Material) -> Measured:
    rates = [one["tokens_per_s"] for one in _medians(material)]
    rows = {
        label: Ours(values=(rate, rate / rates[0]), differences=_differences(material))
        for label, rate in zip(_LABELS, rates, strict=True)
    }
    chart = Chart(
        name="stack",
        title="Tokens per second in equal KV memory",
        x_label="KV memory",
        y_label="generated tokens/s",
        lines={"": tuple(zip(_LABELS, rates, strict=True))},
    )
    return Measured(rows=rows, charts=(chart,))


THROUGHPUT_STACK = Item(
    id="throughput-stack",
    title="Throughput Improvement Stack (chart)",
    setting="as End-to-End Serving Throughput",
    columns=("tokens/s", "over contiguous"),
    printed={
        label: (rate, over)
        for label, rate, over in zip(
            _LABELS, (420, 780, 1050, 1180, 1420), (1.0, 1.86, 2.5, 2.81, 3.38), strict=True
        )
    },
    measure=_throughput_stack,
    status=SCALED,
    reason="one device; the ratios between rows can be compared",
)
