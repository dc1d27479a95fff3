"""M3: mutual slowdown of copies on the link and computation on the device."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.common.offloaded_model import attend_rows
from benchmarks.common.result import Cell, Numbers, PartResult, Table
from benchmarks.device.bench import DeviceBench
from benchmarks.device.concurrent_calls import call_seconds, matching_times, run_calls
from benchmarks.device.shapes import DecodeCase
from quire.offload.timeline import Kind

_MOST_TOKENS = 64 * 1024  # tokens of a product of 1 ms or more, so that event overhead is small
_MOST_COPY_BYTES = 256 << 20
_CHANGE = "omit the part together"


def run_together(bench: DeviceBench) -> PartResult:
    """Run the part."""
    case = bench.fitting(bench.config.cases[0])
    calls = {"product": (Kind.PROJECT, _product(bench, case))}
    calls["attention"] = (Kind.ATTEND, _attention(bench, case))
    rows: list[tuple[Cell, ...]] = []
    claims: Numbers = {}
    for name, (kind, call) in calls.items():
        device, link, row = _slowdown(bench, kind, call, _copy(bench))
        rows.append((name, *row))
        claims |= {f"slowdown_{name}": device, f"slowdown_copy_beside_{name}": link}
    return PartResult(
        claims=claims,
        tables=(
            Table(
                name="device-together",
                caption=(
                    f"{bench.where} {case.label}: a layer's product and its decode attention, "
                    "together with copies to the device; medians, ms. Expected on an H200: < 3 % "
                    "slower (55 of 4,300 GB/s of its memory)."
                ),
                columns=(
                    *("operation", "alone", "together", "slower by"),
                    *("copy alone", "copy together", "slower by"),
                ),
                rows=tuple(rows),
            ),
        ),
    )


def _slowdown(
    bench: DeviceBench, kind: Kind, call: Callable[[], object], copy: Callable[[], object]
) -> tuple[float, float, tuple[Cell, ...]]:
    """Time together over time alone, minus 1, of the device and of the link."""
    executor, times = bench.target.executor(), bench.config.together
    alone = []
    for lane_kind, work in ((kind, call), (Kind.KV_IN, copy)):
        run_calls(executor, {lane_kind: (work, 1)})  # warm-up
        alone.append(call_seconds(run_calls(executor, {lane_kind: (work, times)}), lane_kind))
    count, copies = matching_times((alone[0], alone[1]), times)
    # twice as many copies, so that they overlap all measured calls
    both = {kind: (call, count), Kind.KV_IN: (copy, 2 * copies)}
    timeline = run_calls(executor, both)
    device_s = call_seconds(timeline, kind, Kind.KV_IN)
    link_s = call_seconds(timeline, Kind.KV_IN, kind)
    slower = (device_s / alone[0] - 1, link_s / alone[1] - 1)
    cells = (alone[0], device_s, slower[0], alone[1], link_s, slower[1])
    return *slower, tuple(c if n in (2, 5) else 1e3 * c for n, c in enumerate(cells))


def _product(bench: DeviceBench, case: DecodeCase) -> Callable[[], object]:
    tokens, hidden, width = min(_MOST_TOKENS, case.tokens), case.spec.hidden_size, case.kv_width
    x, weight, out = _numbers(bench, case, (tokens, hidden), (hidden, width), (tokens, width))
    return lambda: torch.mm(x, weight, out=out)


def _attention(bench: DeviceBench, case: DecodeCase) -> Callable[[], object]:
    heads = case.spec.num_heads * case.spec.head_dim
    query, kv = _numbers(bench, case, (case.rows, heads), (case.tokens, case.kv_width))
    return lambda: attend_rows(case, query, kv)


def _numbers(bench: DeviceBench, case: DecodeCase, *shapes: tuple[int, int]) -> list[Tensor]:
    num_bytes = sum(a * b for a, b in shapes) * case.value_bytes
    bench.target.require(num_bytes, "the operands next to copies", _CHANGE)
    dtype: torch.dtype = getattr(torch, case.dtype)
    return [torch.randn(*shape, dtype=dtype, device=bench.target.device) for shape in shapes]


def _copy(bench: DeviceBench) -> Callable[[], object]:
    size = min(_MOST_COPY_BYTES, bench.pool.num_bytes // 2)
    bench.target.require(size, "a copy", _CHANGE)
    bench.pool.clear()
    source = bench.pool.take((size,), torch.uint8)
    into = torch.empty(size, dtype=torch.uint8, device=bench.target.device)
    return lambda: into.copy_(source, non_blocking=True)
