"""Measures the peak rates of this machine for reads, copies and matrix products."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.plan.ceilings import Ceilings, Machine, ProductRate
from quire.profile.attention import AttentionBench, AttentionShape
from quire.profile.copies import SWAP_BYTES, measure_copy_rates
from quire.profile.prefill_rates import CHUNKS
from quire.profile.timing import seconds, torch_threads, touched_buffer

# [inner, columns] of common layers: small models, their heads, and a square one
MATRICES = ((768, 768), (768, 2_048), (2_048, 768), (2_048, 2_048), (768, 32_000))
ROWS = (1, 8, 32, 64, 512, 2_048)
DTYPES = ("bfloat16", "float32")
LARGE_BUFFER_BYTES = 256 << 20  # far larger than the caches of common machines


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileConfig:
    """Measurements to run.

    Attributes:
        repeats: measured runs of each, after one warm-up; the median counts.
        buffer_bytes: size of the buffer that is read and copied.
        rows, matrices, dtypes: rows, matrix shapes and dtypes of the products.
        attention: shape of the decoding batch.
        swap_bytes: sizes of swapped sequences.
        chunks, prompt_tokens: chunk lengths and prompt length of the measured prefill.
    """

    repeats: int = 7
    buffer_bytes: int = LARGE_BUFFER_BYTES
    rows: tuple[int, ...] = ROWS
    matrices: tuple[tuple[int, int], ...] = MATRICES
    dtypes: tuple[str, ...] = DTYPES
    attention: AttentionShape = field(default_factory=AttentionShape)
    swap_bytes: tuple[int, ...] = SWAP_BYTES
    chunks: tuple[int, ...] = CHUNKS
    prompt_tokens: int = 2_048


QUICK_PROFILE = ProfileConfig(
    repeats=5,
    buffer_bytes=64 << 20,
    rows=(1, 32),
    matrices=((256, 256),),
    attention=AttentionShape(batch=2, tokens=64, num_heads=4, num_kv_heads=2, head_dim=64),
    swap_bytes=(256 << 10, 1 << 20),
    chunks=(16, 32),
    prompt_tokens=64,
)


class MemoryProbe:
    """Reads and copies one buffer repeatedly.

    Args:
        num_bytes: size of the buffer; a multiple of 16.
    """

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
        """FLOP/s of one product."""
        flops = 2 * self.rows * self.inner * self.columns
        return flops / seconds(self._multiply)

    def _multiply(self) -> Tensor:
        return torch.mm(self._left, self._right, out=self._out)


def measure_ceilings(
    config: ProfileConfig, machine: Machine, *, progress: Callable[[str], None]
) -> Ceilings:
    """Measure all rates of `Ceilings`.

    Args:
        config: measurements to run.
        machine: this machine.
        progress: called with a line for each result.
    """
    memory = MemoryProbe(config.buffer_bytes)
    read, copy = (median_rate(measure, config) for measure in (memory.read_rate, memory.copy_rate))
    with torch_threads(1):
        read_one, copy_one = (
            median_rate(measure, config) for measure in (memory.read_rate, memory.copy_rate)
        )
    progress(f"memory read: {read / 1e9:.1f} GB/s, one thread {read_one / 1e9:.1f} GB/s")
    progress(f"memory copy: {copy / 1e9:.1f} GB/s, one thread {copy_one / 1e9:.1f} GB/s")
    products = tuple(_products(config, progress))
    attention = measure_attention(config)
    for name, rate in attention.items():
        progress(f"attention, {name}: {rate / 1e9:.1f} GB/s")
    return Ceilings(
        machine=machine,
        read_bytes_per_s=read,
        copy_bytes_per_s=copy,
        one_thread_read_bytes_per_s=read_one,
        one_thread_copy_bytes_per_s=copy_one,
        products=products,
        attention_bytes_per_s=attention,
        copies=measure_copy_rates(config.swap_bytes, config.repeats, progress=progress),
    )


def measure_attention(config: ProfileConfig) -> dict[str, float]:
    """KV bytes per second of each attention variant for a decoding batch."""
    bench = AttentionBench(config.attention)
    variants = bench.variants()
    for call in variants.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(config.repeats):
        for name, call in variants.items():
            times[name].append(seconds(call))
    kv_bytes = config.attention.kv_bytes
    return {name: kv_bytes / statistics.median(found) for name, found in times.items()}


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
