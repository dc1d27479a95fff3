"""Link rates by direction, copy size and kind of host memory; many small copies."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.common.result import Cell, Chart, Numbers, PartResult, Table
from benchmarks.gpu.bench import GpuBench, Target
from quire.errors import ConfigError
from quire.offload.swap.host_store import pin_memory
from quire.plan.fitting import fit_seconds
from quire.plan.machine import free_host_bytes
from quire.profile.ceilings import touched_buffer

_DUPLEX_COPIES = 12
_TIMED_BYTES = 64 << 20  # least bytes of consecutive copies, so that the timing error is small
_MAX_COPIES = 200
_CHANGE = "omit the part link"


@dataclass(frozen=True, slots=True)
class _Pair:
    """Buffers of bytes on the host and on the device."""

    host: Tensor
    device: Tensor

    def inward(self, num_bytes: int, first: int = 0) -> Tensor:
        source = self.host[first : first + num_bytes]
        return self.device[first : first + num_bytes].copy_(source, non_blocking=True)

    def outward(self, num_bytes: int) -> Tensor:
        return self.host[:num_bytes].copy_(self.device[:num_bytes], non_blocking=True)


Rates = dict[int, tuple[float, float]]


def run_link(bench: GpuBench) -> PartResult:
    """Run the part.

    h2d_*_gb_per_s, d2h_*_gb_per_s: best rate over all sizes. h2d_call_us: fixed time of a copy.
    """
    kinds = host_kinds(bench)
    largest = max(bench.config.link_bytes)
    bench.target.require(2 * largest, "a copy in each direction", _CHANGE)
    device = torch.ones(largest, dtype=torch.uint8, device=bench.target.device)
    found = {kind: _by_size(bench, _Pair(make(largest), device)) for kind, make in kinds.items()}
    claims: Numbers = {}
    lines: dict[str, tuple[tuple[float, float], ...]] = {}
    for kind, rates in found.items():
        for i, direction in enumerate(("h2d", "d2h")):
            claims[f"{direction}_{kind}_gb_per_s"] = max(both[i] for both in rates.values())
            words = f"{kind}, {'to the host' if i else 'to the device'}"
            lines[words] = tuple((size, both[i]) for size, both in rates.items())
    best = "registered" if bench.target.on_gpu else "pageable"
    pair = _Pair(kinds[best](largest), device)
    duplex = _duplex(bench, pair)
    pieces = [_pieces(bench, pair, size) for size in bench.config.piece_bytes]
    chart = Chart(
        name="gpu-link",
        title="Copies by size",
        x_label="bytes",
        y_label="GB/s",
        lines=lines,
        log_x=True,
        log_y=True,
    )
    return PartResult(
        claims=claims | duplex | {"h2d_call_us": _call_us(found[best])},
        tables=(_size_table(bench, found), _duplex_table(bench, duplex), _piece_table(pieces)),
        charts=(chart,),
    )


def host_kinds(bench: GpuBench) -> dict[str, Callable[[int], Tensor]]:
    """Allocators by kind of host memory; a CPU target has one kind."""

    def pageable(num_bytes: int) -> Tensor:
        _require_host(num_bytes, "pageable memory of a copy")
        return touched_buffer(num_bytes)

    def pinned(num_bytes: int) -> Tensor:
        _require_host(2 * num_bytes, "pinned memory of a copy")
        return torch.ones(num_bytes, dtype=torch.uint8, pin_memory=True)

    def registered(num_bytes: int) -> Tensor:
        _require_host(num_bytes, "registered memory of a copy")
        found = touched_buffer(num_bytes)
        pin_memory(found, found)
        return found

    if not bench.target.on_gpu:
        return {"pageable": pageable}
    return {"pinned": pinned, "registered": registered, "pageable": pageable}


def _by_size(bench: GpuBench, pair: _Pair) -> Rates:
    """GB/s to the device and to the host by size, of consecutive copies."""
    found = {}
    for size in bench.config.link_bytes:
        times = min(_MAX_COPIES, max(1, _TIMED_BYTES // size))
        inward, outward = (
            size / bench.target.median(partial(call, size), bench.config.repeats, times) / 1e9
            for call in (pair.inward, pair.outward)
        )
        found[size] = inward, outward
    return found


def _call_us(rates: Rates) -> float:
    """Fixed time per copy to the device, independent of its size, from a fit over all sizes."""
    amounts = [(1.0, float(size)) for size in rates]
    times_s = [size / (inward * 1e9) for size, (inward, _) in rates.items()]
    return 1e6 * fit_seconds(amounts, times_s)[0]


def _require_host(num_bytes: int, what: str) -> None:
    free_bytes = free_host_bytes()
    if num_bytes > free_bytes:
        raise ConfigError(
            f"{what} needs {num_bytes:,} B of host memory, but {free_bytes:,} B are free on this "
            f"machine or in its container; {_CHANGE}"
        )


def _duplex(bench: GpuBench, pair: _Pair) -> Numbers:
    """Both directions at once: bytes of both directions over the total time."""
    half = pair.host.numel() // 2
    size = min(64 << 20, half)

    def out() -> None:
        pair.host[half : half + size].copy_(pair.device[half : half + size], non_blocking=True)

    for _ in range(2):  # the first round is a warm-up
        in_s, out_s, total_s = _concurrent_s(bench.target, lambda: pair.inward(size), out)
    moved = _DUPLEX_COPIES * size / 1e9
    return {
        "duplex_h2d_gb_per_s": moved / in_s,
        "duplex_d2h_gb_per_s": moved / out_s,
        "duplex_gb_per_s": 2 * moved / total_s,
        "duplex_copied_bytes": 2 * _DUPLEX_COPIES * size,
    }


def _concurrent_s(target: Target, *calls: Callable[[], object]) -> tuple[float, float, float]:
    """Seconds of the repeats of two calls, each on its own stream, and of both.

    A CPU has no streams: the calls run one after the other.
    """
    if not target.on_gpu:
        first_s, second_s = (_DUPLEX_COPIES * target.seconds(c, _DUPLEX_COPIES) for c in calls)
        return first_s, second_s, first_s + second_s
    with torch.cuda.device(target.device):
        streams = [torch.cuda.Stream() for _ in calls]  # type: ignore[no-untyped-call]
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        target.wait()
        begin.record()
        marks = []
        for stream, call in zip(streams, calls, strict=True):
            stream.wait_event(begin)
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                first.record()
                for _ in range(_DUPLEX_COPIES):
                    call()
                last.record()
            marks.append((first, last))
        target.wait()
        (in_s, out_s) = (float(first.elapsed_time(last)) / 1e3 for first, last in marks)
        return in_s, out_s, max(float(begin.elapsed_time(last)) for _, last in marks) / 1e3


def _pieces(bench: GpuBench, pair: _Pair, size: int) -> tuple[Cell, ...]:
    """Rates of many small copies, and of one copy of the same bytes."""
    count = min(bench.config.pieces, pair.host.numel() // size)

    def one_by_one() -> None:
        for index in range(count):
            pair.inward(size, index * size)

    target, repeats = bench.target, bench.config.repeats
    apart_s = target.median(one_by_one, repeats)
    packed_s = target.median(lambda: pair.inward(count * size), repeats)
    moved = count * size / 1e9
    return size, count, 1e6 * apart_s / count, moved / apart_s, moved / packed_s


def _size_table(bench: GpuBench, found: dict[str, Rates]) -> Table:
    return Table(
        name="gpu-link",
        caption=(
            f"{bench.where} Consecutive copies of one size, medians of {bench.config.repeats}. "
            "Expected on PCIe 5 x16: pinned 50 to 56 GB/s in each direction, pageable 5 to 12."
        ),
        columns=("host memory", "bytes", "to the device, GB/s", "to the host, GB/s"),
        rows=tuple((k, size, *both) for k, rates in found.items() for size, both in rates.items()),
    )


def _duplex_table(bench: GpuBench, found: Numbers) -> Table:
    return Table(
        name="gpu-duplex",
        caption=f"{bench.where} Both directions at once, GB/s.",
        columns=("to the device", "to the host", "together"),
        rows=(tuple(found[f"duplex_{name}gb_per_s"] for name in ("h2d_", "d2h_", "")),),
    )


def _piece_table(rows: list[tuple[Cell, ...]]) -> Table:
    return Table(
        name="gpu-pieces",
        caption=(
            "Small copies to the device, compared with one copy of the same bytes. "
            "Expected: below about 28 KiB the fixed time per copy exceeds the transfer time."
        ),
        columns=("bytes", "copies", "us per copy", "GB/s", "in one copy, GB/s"),
        rows=tuple(rows),
    )
