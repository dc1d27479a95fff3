"""Measures the time of swapping pages out of the arena and back in, by size.

Each size is measured with the sequence's pages scattered between those of another, as in a busy
arena, and with contiguous pages.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from quire.kv.memory import KVMemory
from quire.kv.store import PageStore, store_of
from quire.kv.stored_sequences import Swapped
from quire.kv.swap import swap_in, swap_out
from quire.layout.codec_names import codec_spec
from quire.layout.pages import CacheLayout, LaneGroup, PageClass
from quire.offload.swap.host_pool import HostPool
from quire.offload.swap.host_store import device_name, host_copies
from quire.plan.fitting import fit_seconds
from quire.plan.rates import CopyRate, CopyRates
from quire.profile.timing import seconds

MIB = 1 << 20
SWAP_BYTES = (MIB // 4, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
_PIECES = 16
_LEAST_SECONDS_PER_BYTE = 1e-15  # a fit may be 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTimes:
    """Median times of one sequence size.

    Attributes:
        num_bytes: bytes of the sequence's KV.
        scattered: whether its pages are scattered between another sequence's.
        out_s, back_s: a swap in each direction, bookkeeping included.
    """

    num_bytes: int
    scattered: bool
    out_s: float
    back_s: float


class SwapProbe:
    """A sequence that is swapped out and in repeatedly.

    Args:
        device: device of the arena.
        num_bytes: bytes of the sequence; rounded down to whole pages.
        scattered: whether another sequence takes every second page.
    """

    def __init__(self, device: torch.device, num_bytes: int, *, scattered: bool) -> None:
        plain = codec_spec("bfloat16")
        page = PageClass(key=plain, value=plain, head_dim=64, heads=4, tokens=16)
        # one lane: with several, swapped-in pages would form runs of their number
        group = LaneGroup(name="kv", page_class=page, layers=(0,))
        pages = max(1, num_bytes // page.page_bytes)
        self.num_bytes = pages * page.page_bytes
        make_store = partial(PageStore, device=device)
        total_bytes = 3 * self.num_bytes + 4 * MIB
        self.memory = KVMemory(CacheLayout((group,)), total_bytes, 2, store=make_store)
        store = store_of(self.memory)
        store.arena.fill_(1)  # commits the memory before it is timed
        self.pool = HostPool(self.num_bytes, host_copies(store, self.num_bytes, page.page_bytes))
        rows = [self.memory.start() for _ in range(1 + scattered)]
        for _ in range(pages):
            for row in rows:
                self.memory.grow(np.array([row]), np.array([page.tokens], dtype=np.int32))
        self.row = rows[0]

    def swap(self) -> tuple[float, float]:
        """Seconds of one swap out and one swap in."""
        swapped: list[Swapped] = []
        out_s = seconds(lambda: swapped.append(swap_out(self.memory, [self.row], self.pool)))
        rows: list[int] = []
        back_s = seconds(lambda: rows.extend(swap_in(self.memory, swapped[0])))
        [self.row] = rows
        return out_s, back_s

    def piece_seconds(self, repeats: int) -> tuple[float, float]:
        """Time of each additional extent, out and in: the same pages in one copy and in many."""
        [page] = self.memory.pools
        pages = self.memory.tables["kv"].row_pages(self.row)
        return (
            _further_s(self.pool.copies.save, page, pages, self.pool.copies.wait, repeats),
            _further_s(self.pool.copies.load, page, pages, self.pool.copies.wait, repeats),
        )


def _further_s(
    copy: Callable[..., None],
    page: PageClass,
    pages: np.ndarray,
    wait: Callable[[], None],
    repeats: int,
) -> float:
    def copied(parts: Sequence[np.ndarray]) -> None:
        start = 0
        for part in parts:
            copy(page, part, start)
            start += len(part) * page.page_bytes
        wait()

    count = min(_PIECES, len(pages))
    whole, split = [pages], np.array_split(pages, count)
    copied(whole)
    times = [
        (seconds(lambda: copied(whole)), seconds(lambda: copied(split))) for _ in range(repeats)
    ]
    differences = [split_s - whole_s for whole_s, split_s in times]
    return max(0.0, statistics.median(differences) / max(1, count - 1))


def measure_copies(device: torch.device, sizes: Sequence[int], repeats: int) -> Iterator[CopyTimes]:
    """Yield the median times of each size, scattered and contiguous.

    Args:
        device: device of the arena.
        sizes: bytes of a sequence, one for each measurement.
        repeats: measured swaps of each size, after a warm-up.
    """
    for size in sizes:
        for scattered in (True, False):
            probe = SwapProbe(device, size, scattered=scattered)
            probe.swap()
            times = [probe.swap() for _ in range(repeats)]
            yield CopyTimes(
                num_bytes=probe.num_bytes,
                scattered=scattered,
                out_s=statistics.median(out_s for out_s, _ in times),
                back_s=statistics.median(back_s for _, back_s in times),
            )


def copy_rates(
    times: Sequence[CopyTimes], out_piece_s: int | float, back_piece_s: int | float
) -> CopyRates:
    """Fit rates to the times of scattered pages, which an engine's arena has.

    Args:
        times: median times of several sizes.
        out_piece_s: time of each extent on a swap out.
        back_piece_s: time of each extent on a swap in.
    """
    used = [time for time in times if time.scattered]
    amounts = [(1, time.num_bytes) for time in used]
    out = fit_seconds(amounts, [time.out_s for time in used])
    back = fit_seconds(amounts, [time.back_s for time in used])
    return CopyRates(out=_rate(out, out_piece_s), back=_rate(back, back_piece_s))


def measure_copy_rates(
    sizes: Sequence[int], repeats: int, *, progress: Callable[[str], None]
) -> dict[str, CopyRates]:
    """Measure copy rates by device: the CPU, and an accelerator if there is one.

    Args:
        sizes: bytes of a sequence.
        repeats: measured swaps of each.
        progress: called with a line for each size.
    """
    names = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return {
        device_name(device): _measure_device(device, sizes, repeats, progress)
        for device in map(torch.device, names)
    }


def _measure_device(
    device: torch.device, sizes: Sequence[int], repeats: int, progress: Callable[[str], None]
) -> CopyRates:
    times = []
    for time in measure_copies(device, sizes, repeats):
        times.append(time)
        placement = "scattered" if time.scattered else "packed"
        out, back = (time.num_bytes / s / 1e9 for s in (time.out_s, time.back_s))
        progress(
            f"swap {device.type}, {time.num_bytes / MIB:g} MiB, {placement}: out {out:.2f} GB/s, "
            f"in {back:.2f} GB/s"
        )
    probe = SwapProbe(device, max(sizes), scattered=True)
    return copy_rates(times, *probe.piece_seconds(repeats))


def _rate(fitted: tuple[float, ...], piece_s: int | float) -> CopyRate:
    call_s, byte_s = fitted
    bytes_per_s = 1 / max(byte_s, _LEAST_SECONDS_PER_BYTE)
    # the fixed cost of the fit includes one extent
    return CopyRate(bytes_per_s=bytes_per_s, call_s=max(0.0, call_s - piece_s), piece_s=piece_s)
