"""M6: KV and activations in codes on the wire, decoded on the device."""

from quire.bench.device.bench import DeviceBench
from quire.bench.device.rig import DeviceRig, expected_seconds, median_ms
from quire.bench.device.wire import Wire, wire_sizes
from quire.bench.offload.arms import BY_NAME, Layout
from quire.bench.offload.rig import ArmStep
from quire.bench.result import Cell, Numbers, PartResult, Table
from quire.offload.schedule.operations import Kind

_COPIES = (Kind.KV_IN, Kind.X_IN)


def run_codes(bench: DeviceBench) -> PartResult:
    """The part: the pipelined split on every wire, beside prefetching plain KV."""
    claims: Numbers = {}
    rows: list[tuple[Cell, ...]] = []
    base_ms = 0.0
    for kv, x in bench.config.wires:
        wire = Wire(kv, x)
        rig = bench.rig(bench.config.cases[0], wire)
        layouts = {name: rig.layout(BY_NAME[name]) for name in ("prefetch", "lB")}
        steps = rig.rounds(layouts, bench.config.repeats)
        base_ms = base_ms or median_ms(steps["prefetch"])
        rows.append(_row(bench, rig, layouts["lB"], steps, base_ms))
        claims[f"codes_gain_{kv}_{x}"] = base_ms / median_ms(steps["lB"])
        claims[f"codes_error_{kv}_{x}"] = max(step.error for step in steps["lB"])
        claims[f"codes_copied_bytes_{kv}_{x}"] = steps["lB"][0].timeline.schedule.num_bytes(
            *_COPIES
        )
    return PartResult(claims=claims, tables=(_table(bench, rows),))


def _row(
    bench: DeviceBench,
    rig: DeviceRig,
    layout: Layout,
    steps: dict[str, list[ArmStep]],
    base_ms: float,
) -> tuple[Cell, ...]:
    case, wire = rig.case, rig.bed.wire
    lb_ms = median_ms(steps["lB"])
    return (
        wire.label,
        case.label,
        rig.sizes.x_bytes / rig.sizes.kv_bytes,
        layout.batch.x / case.tokens,
        median_ms(steps["prefetch"]),
        lb_ms,
        base_ms / lb_ms,
        expected_gain(bench, rig),
        max(step.error for step in steps["lB"]),
    )


def expected_gain(bench: DeviceBench, rig: DeviceRig) -> float:
    """Plain prefetching over this wire's split by the data sheet, decoding left out."""
    case, machine = rig.case, bench.config.machine
    plain_s = expected_seconds(case, BY_NAME["prefetch"], machine)
    sizes = wire_sizes(case, rig.bed.wire)
    return plain_s / expected_seconds(case, BY_NAME["lB"], machine, sizes=sizes)


def _table(bench: DeviceBench, rows: list[tuple[Cell, ...]]) -> Table:
    return Table(
        name="device-codes",
        caption=(
            f"{bench.where} The pipelined split with codes on the wire, decoding counted; gains "
            "over prefetching the first line's KV. Expected: by data sheet, without decoding; 0.9 "
            "of it is wanted. Error: of hidden states, relative."
        ),
        columns=(
            *("wire", "batch", "xi", "recomputed", "prefetch, ms", "pipelined split, ms"),
            *("gain", "expected", "error"),
        ),
        rows=tuple(rows),
    )
