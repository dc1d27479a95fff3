"""Measures the peak rates of this machine for reads, copies and matrix products."""

import itertools
import mmap
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import ConfigError
from quire.kv.memory import KVMemory
from quire.kv.store import PageStore, store_of
from quire.kv.swap import Swapped, swap_in, swap_out
from quire.layout.codec_names import codec_spec
from quire.layout.model import ModelSpec
from quire.layout.pages import CacheLayout, LaneGroup, PageClass, kv_pages
from quire.models.loader import LoadedModel
from quire.offload.swap.host_pool import HostPool
from quire.offload.swap.host_store import device_name, host_copies
from quire.plan.ceilings import Ceilings, Machine, ProductRate
from quire.plan.fitting import fit_seconds
from quire.plan.rates import CopyRate, CopyRates, PrefillRates, model_key
from quire.scheduler.schedule_config import ScheduleConfig


def seconds(call: Callable[[], object]) -> float:
    """Duration of a call."""
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s


def touched_buffer(num_bytes: int) -> UInt8[Tensor, " num_bytes"]:
    """Private memory that has been written, on huge pages if the system provides them."""
    memory = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    return buffer.fill_(1)


MIB = 1 << 20
SWAP_BYTES = (MIB // 4, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
_PIECES = 16
_MIN_SECONDS_PER_BYTE = 1e-15  # a fit may be 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTimes:
    """Median times of one sequence size."""

    num_bytes: int
    scattered: bool  # whether its pages are between another sequence's
    out_s: float  # a swap out, bookkeeping included
    back_s: float


class SwapProbe:
    """A sequence that is swapped repeatedly; scattered pages alternate with another sequence's."""

    def __init__(self, device: torch.device, num_bytes: int, *, scattered: bool) -> None:
        plain = codec_spec("bfloat16")
        page = kv_pages(key=plain, value=plain, head_dim=64, heads=4, tokens=16)
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
    """Yield the median times of each size, scattered and contiguous."""
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
    """Fit rates to the times of scattered pages, which an engine's arena has."""
    used = [time for time in times if time.scattered]
    amounts = [(1, time.num_bytes) for time in used]
    out = fit_seconds(amounts, [time.out_s for time in used])
    back = fit_seconds(amounts, [time.back_s for time in used])
    return CopyRates(out=_rate(out, out_piece_s), back=_rate(back, back_piece_s))


def measure_copy_rates(
    sizes: Sequence[int], repeats: int, *, progress: Callable[[str], None]
) -> dict[str, CopyRates]:
    """Measure copy rates by device: the CPU, and an accelerator if there is one."""
    names = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return {
        device_name(device): _measure_device(device, sizes, repeats, progress)
        for device in map(torch.device, names)
    }


def _measure_device(
    device: torch.device, sizes: Sequence[int], repeats: int, progress: Callable[[str], None]
) -> CopyRates:
    times = []
    for measured in measure_copies(device, sizes, repeats):
        times.append(measured)
        placement = "scattered" if measured.scattered else "packed"
        out, back = (measured.num_bytes / s / 1e9 for s in (measured.out_s, measured.back_s))
        progress(
            f"swap {device.type}, {measured.num_bytes / MIB:g} MiB, {placement}: "
            f"out {out:.2f} GB/s, in {back:.2f} GB/s"
        )
    probe = SwapProbe(device, max(sizes), scattered=True)
    return copy_rates(times, *probe.piece_seconds(repeats))


def _rate(fitted: tuple[float, ...], piece_s: int | float) -> CopyRate:
    call_s, byte_s = fitted
    bytes_per_s = 1 / max(byte_s, _MIN_SECONDS_PER_BYTE)
    # the fixed cost of the fit includes one extent
    return CopyRate(bytes_per_s=bytes_per_s, call_s=max(0.0, call_s - piece_s), piece_s=piece_s)


CHUNKS = (64, 128, 256, 512)
_MIN_SECONDS_PER_TOKEN = 1e-12  # a fit may be 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTime:
    """One prefill step of a chunk."""

    tokens: int  # of the chunk
    before: int  # tokens of the prompt before the chunk
    seconds: float

    @property
    def amounts(self) -> tuple[int, int, int]:
        """Numbers of calls, tokens and squares in the formula of `PrefillRates`."""
        return 1, self.tokens, (self.before + self.tokens) ** 2 - self.before**2


def random_prompt(model: LoadedModel, tokens: int, seed: int) -> list[int]:
    """Random tokens that differ for each seed, so that no prefix of them is cached."""
    rng = random.Random(seed)
    return [rng.randrange(model.spec.vocab_size) for _ in range(tokens)]


def kv_memory_for(spec: ModelSpec, tokens: int) -> int:
    """Return the bytes of a KV memory for two sequences of this length, in slabs of any size."""
    return 2 * spec.kv_bytes(tokens, 4) + (64 << 20)


def measure_chunks(
    model: LoadedModel, *, chunks: Sequence[int], prompt_tokens: int, repeats: int
) -> Iterator[ChunkTime]:
    """Prefill prompts in chunks of each length; yield every step after a warm-up of one chunk."""
    if not 1 <= prompt_tokens < model.spec.max_positions:
        raise ConfigError(
            f"expected prompts of 1 to {model.spec.max_positions - 1} tokens, got {prompt_tokens}"
        )
    seeds = itertools.count()
    memory = kv_memory_for(model.spec, prompt_tokens + 1)
    for chunk in chunks:
        schedule = ScheduleConfig(max_num_batched_tokens=chunk, async_scheduling=False)
        engine = Engine(
            model, KVConfig(memory=memory, prefix_cache=PrefixCacheConfig(enabled=False)), schedule
        )
        for repeat in range(repeats + 1):
            tokens = prompt_tokens if repeat else min(chunk, prompt_tokens)
            steps = list(_steps(engine, random_prompt(model, tokens, next(seeds)), chunk))
            yield from steps if repeat else ()


def _steps(engine: Engine, prompt: list[int], chunk: int) -> Iterator[ChunkTime]:
    engine.submit(GenerationRequest(prompt, SamplingParams(max_tokens=1, ignore_eos=True)))
    before = 0
    while engine.has_work:
        done = engine.num_processed_tokens
        taken_s = seconds(engine.step)
        tokens = engine.num_processed_tokens - done
        if tokens:
            yield ChunkTime(tokens=tokens, before=before, seconds=taken_s)
        before += tokens


def prefill_rates(times: Sequence[ChunkTime]) -> PrefillRates:
    """Fit rates to the steps."""
    fitted = fit_seconds([time.amounts for time in times], [time.seconds for time in times])
    call_s, token_s, square_s = fitted
    return PrefillRates(
        call_s=call_s, token_s=max(token_s, _MIN_SECONDS_PER_TOKEN), square_s=square_s
    )


def measure_prefill_rates(
    model: LoadedModel,
    *,
    chunks: Sequence[int],
    prompt_tokens: int,
    repeats: int,
    progress: Callable[[str], None],
) -> dict[str, PrefillRates]:
    """Prefill rates of a model, by its `model_key`."""
    tokens = min(prompt_tokens, model.spec.max_positions - 1)
    times: list[ChunkTime] = []
    for chunk in chunks:
        found = list(measure_chunks(model, chunks=(chunk,), prompt_tokens=tokens, repeats=repeats))
        times += found
        whole = [time for time in found if time.tokens == chunk]
        if whole:
            median_s = statistics.median(time.seconds for time in whole)
            progress(f"prefill in chunks of {chunk} tokens: {chunk / median_s:,.0f} tokens/s")
    rates = prefill_rates(times)
    progress(
        f"prefill: {rates.token_s * 1e6:.1f} us per token, {rates.call_s * 1e3:.2f} ms per step"
    )
    decoder = model.decoder
    dtype = str(decoder.dtype).removeprefix("torch.")
    device = device_name(decoder.device)
    key = model_key(model.spec, dtype=dtype, device=device, weight_codec=model.weight_codec)
    return {key: rates}


# [inner, columns] of common layers: small models, their heads, and a square one
MATRICES = ((768, 768), (768, 2_048), (2_048, 768), (2_048, 2_048), (768, 32_000))
ROWS = (1, 8, 32, 64, 512, 2_048)
DTYPES = ("bfloat16", "float32")
LARGE_BUFFER_BYTES = 256 << 20  # far larger than the caches of common machines


# rows and prompt tokens of static batches
STEP_SIZES = ((1, 64), (2, 64), (2, 512), (4, 64), (8, 128), (32, 64))
THOROUGH_STEP_SIZES = (
    (1, 64),
    (2, 64),
    (2, 1_024),
    (4, 64),
    (8, 64),
    (8, 512),
    (16, 64),
    (32, 64),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileConfig:
    """Measurements to run; of a small model on two cores they take under two minutes."""

    repeats: int = 3  # after one warm-up; the median counts
    buffer_bytes: int = LARGE_BUFFER_BYTES  # of the buffer that is read and copied
    rows: tuple[int, ...] = ROWS
    matrices: tuple[tuple[int, int], ...] = MATRICES
    dtypes: tuple[str, ...] = DTYPES
    swap_bytes: tuple[int, ...] = SWAP_BYTES  # of swapped sequences
    chunks: tuple[int, ...] = CHUNKS  # prefill lengths
    prompt_tokens: int = 1_024
    step_sizes: tuple[tuple[int, int], ...] = STEP_SIZES
    step_new_tokens: int = 12
    step_repeats: int = 1


THOROUGH_PROFILE = ProfileConfig(
    repeats=7, prompt_tokens=2_048, step_sizes=THOROUGH_STEP_SIZES, step_repeats=3
)
QUICK_PROFILE = ProfileConfig(
    repeats=5,
    buffer_bytes=64 << 20,
    rows=(1, 32),
    matrices=((256, 256),),
    swap_bytes=(256 << 10, 1 << 20),
    chunks=(16, 32),
    prompt_tokens=64,
    step_sizes=((1, 64), (2, 128)),
    step_new_tokens=8,
)


class MemoryProbe:
    """Reads and copies one buffer repeatedly."""

    def __init__(self, num_bytes: int) -> None:
        self._numbers = touched_buffer(num_bytes).view(torch.int64)

    def read_rate(self) -> float:
        """Bytes read per second, by one sum over the buffer."""
        return self._numbers.nbytes / seconds(self._numbers.sum)

    def copy_rate(self) -> float:
        """Bytes copied per second, by one copy of half the buffer onto the other half."""
        source, target = self._numbers.chunk(2)
        return source.nbytes / seconds(lambda: target.copy_(source))


class ProductProbe:
    """Multiplies [rows, inner] by [inner, columns] repeatedly, as a linear layer does.

    Operands and result are reused, so small matrices stay in the caches. Small matrices measure
    arithmetic, large ones the reads of weights.
    """

    def __init__(self, dtype: str, rows: int, inner: int, columns: int) -> None:
        self.dtype, self.rows, self.inner, self.columns = dtype, rows, inner, columns
        kind: torch.dtype = getattr(torch, dtype)
        self._left = torch.ones(rows, inner, dtype=kind)
        self._right = torch.ones(columns, inner, dtype=kind).T
        self._out = torch.ones(rows, columns, dtype=kind)

    def rate(self) -> float:
        flops = 2 * self.rows * self.inner * self.columns
        return flops / seconds(self._multiply)

    def _multiply(self) -> Tensor:
        return torch.mm(self._left, self._right, out=self._out)


def measure_ceilings(
    config: ProfileConfig, machine: Machine, *, progress: Callable[[str], None]
) -> Ceilings:
    """Measure all rates of `Ceilings`."""
    memory = MemoryProbe(config.buffer_bytes)
    read, copy = (median_rate(measure, config) for measure in (memory.read_rate, memory.copy_rate))
    progress(f"memory: read {read / 1e9:.1f} GB/s, copy {copy / 1e9:.1f} GB/s")
    return Ceilings(
        machine=machine,
        read_bytes_per_s=read,
        copy_bytes_per_s=copy,
        products=tuple(_products(config, progress)),
        copies=measure_copy_rates(config.swap_bytes, config.repeats, progress=progress),
    )


def _products(config: ProfileConfig, progress: Callable[[str], None]) -> Iterable[ProductRate]:
    for dtype in config.dtypes:
        for inner, columns in config.matrices:
            for rows in config.rows:
                rate = median_rate(ProductProbe(dtype, rows, inner, columns).rate, config)
                shape = f"[{rows}, {inner}] x [{inner}, {columns}]"
                progress(f"matrix product, {dtype} {shape}: {rate / 1e9:,.0f} GFLOP/s")
                yield ProductRate(
                    dtype=dtype, rows=rows, inner=inner, columns=columns, flops_per_s=rate
                )


def median_rate(rate: Callable[[], float], config: ProfileConfig) -> float:
    """The median of `repeats` calls after a warm-up call."""
    rate()
    return statistics.median(rate() for _ in range(config.repeats))
