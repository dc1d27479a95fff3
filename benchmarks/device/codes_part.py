"""M6: KV and activations in codes on the link, decoded on the device."""

from dataclasses import dataclass

from benchmarks.common.link_codecs import LinkCodecs, link_sizes
from benchmarks.common.result import Cell, Numbers, PartResult, Table
from benchmarks.device.bench import DeviceBench
from benchmarks.device.step_harness import StepHarness, expected_seconds, median_ms
from benchmarks.offload.arms import BY_NAME
from benchmarks.offload_schedule.timelines import copied_bytes
from quire.offload.timeline import Kind

_COPIES = (Kind.KV_IN, Kind.X_IN)


def run_codes(bench: DeviceBench) -> PartResult:
    """Run the part: the pipelined split with each codec pair, and prefetching of plain KV."""
    claims: Numbers = {}
    rows: list[tuple[Cell, ...]] = []
    base_ms = 0.0
    for kv, x in bench.config.wires:
        found, row = _measured(bench, LinkCodecs(kv, x))
        base_ms = base_ms or found.prefetch_ms
        gain = base_ms / found.split_ms
        rows.append((*row, gain, found.expected_gain, found.error))
        claims[f"codes_gain_{kv}_{x}"] = gain
        claims[f"codes_error_{kv}_{x}"] = found.error
        claims[f"codes_copied_bytes_{kv}_{x}"] = found.copied_bytes
    return PartResult(claims=claims, tables=(_table(bench, rows),))


@dataclass(frozen=True, slots=True, kw_only=True)
class _CodedSteps:
    """Results of steps with one pair of codecs.

    Times are milliseconds per row, as batches may differ. The error and the bytes are the split's.

    """

    prefetch_ms: float
    split_ms: float
    expected_gain: float
    error: float
    copied_bytes: int


def _measured(bench: DeviceBench, link_codecs: LinkCodecs) -> tuple[_CodedSteps, tuple[Cell, ...]]:
    """Measure prefetching and the pipelined split; the model's memory is freed on return."""
    harness = bench.harness(bench.config.cases[0], link_codecs)
    case, layouts = (
        harness.case,
        {name: harness.layout(BY_NAME[name]) for name in ("prefetch", "lB")},
    )
    steps = harness.rounds(layouts, bench.config.repeats)
    prefetch_ms, split_ms = (median_ms(steps[name]) for name in ("prefetch", "lB"))
    x_ratio = harness.sizes.x_bytes / harness.sizes.kv_bytes
    found = _CodedSteps(
        prefetch_ms=prefetch_ms / case.rows,
        split_ms=split_ms / case.rows,
        expected_gain=expected_gain(bench, harness),
        error=max(step.error for step in steps["lB"]),
        copied_bytes=copied_bytes(steps["lB"][0].timeline.schedule, *_COPIES),
    )
    share = layouts["lB"].batch.x / case.tokens
    return found, (link_codecs.label, case.label, x_ratio, share, prefetch_ms, split_ms)


def expected_gain(bench: DeviceBench, harness: StepHarness) -> float:
    """Data-sheet time of plain prefetching over the split with these codecs, without decoding."""
    case, machine = harness.case, bench.config.machine
    plain_s = expected_seconds(case, BY_NAME["prefetch"], machine)
    sizes = link_sizes(case, harness.model.link_codecs)
    return plain_s / expected_seconds(case, BY_NAME["lB"], machine, sizes=sizes)


def _table(bench: DeviceBench, rows: list[tuple[Cell, ...]]) -> Table:
    return Table(
        name="device-codes",
        caption=(
            f"{bench.where} The pipelined split with codes on the link, decoding included; gains "
            "over prefetching the first line's KV. Expected: by data sheet, without decoding; the "
            "target is 0.9 of it. Error: relative error of hidden states."
        ),
        columns=(
            *("codecs", "batch", "xi", "recomputed", "prefetch, ms", "pipelined split, ms"),
            *("gain", "expected", "error"),
        ),
        rows=tuple(rows),
    )
