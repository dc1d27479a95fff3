"""Measured limits of this machine: the read rate, and the product rate of each arithmetic.

The product rate of an arithmetic is that of the fastest product that uses it: of torch or of the C
library, for large and for small shapes. A coded weight is multiplied as int8, a bfloat16 weight as
bfloat16 if the CPU has such products, else as float32.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from quire.kernels.native.library import (
    INSTRUCTION_SETS,
    NativeLibrary,
    NotLoaded,
    load_library,
)
from quire.kernels.native.linear import CODED, PackedWeight, Products, has_products, pack
from quire.profile.ceilings import MemoryProbe, seconds

FLOAT32, BFLOAT16, INT8 = ARITHMETICS = ("float32", "bfloat16", "int8")
PRODUCTS = ((2_048, 768, 2_048), (32, 2_048, 2_048))  # rows, inner, columns
QUICK_PRODUCTS = ((64, 128, 64),)
_KINDS = {FLOAT32: ("float32",), BFLOAT16: ("bfloat16",), INT8: CODED}
_PASSES = 3
_READ_INNER = 1_536  # input elements of the weight that measures the read rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Limits of a machine.

    Attributes:
        read_bytes_per_s: memory bandwidth.
        flops_per_s: product rates by arithmetic.
    """

    read_bytes_per_s: float
    flops_per_s: Mapping[str, float]


def median_rates(found: Iterable[Rates]) -> Rates:
    """Medians of several measurements."""
    rates = list(found)
    return Rates(
        read_bytes_per_s=statistics.median(each.read_bytes_per_s for each in rates),
        flops_per_s={
            name: statistics.median(each.flops_per_s[name] for each in rates)
            for name in rates[0].flops_per_s
        },
    )


class RateProbe:
    """Measures the limits repeatedly with the same buffers.

    Args:
        arithmetics: names in ARITHMETICS.
        buffer_bytes: size of the memory that is read; if the model's weights are smaller than the
            buffer, their steps could read faster, from the caches.
        shapes: (rows, inner, columns) of the products.
    """

    def __init__(
        self,
        arithmetics: Iterable[str],
        buffer_bytes: int,
        shapes: Iterable[tuple[int, int, int]] = PRODUCTS,
    ) -> None:
        self._memory = MemoryProbe(buffer_bytes // 16 * 16)
        products = _own_products()
        self._reader = None if products is None else _reader(products, buffer_bytes)
        shapes = tuple(shapes)
        self._calls = {
            name: [call for shape in shapes for call in _calls(name, shape, products)]
            for name in arithmetics
        }

    def measure(self) -> Rates:
        """Medians of a few passes."""
        reads = [self._memory.read_rate() for _ in range(_PASSES)]
        read_rate = statistics.median(reads)
        if self._reader is not None:
            read_rate = max(read_rate, _rate(*self._reader))
        rates = {name: max(_rate(*call) for call in calls) for name, calls in self._calls.items()}
        return Rates(read_bytes_per_s=read_rate, flops_per_s=rates)


def _own_products() -> Products | None:
    library = load_library()
    if isinstance(library, NativeLibrary) and has_products(library):
        return Products(library)
    return None


def _rate(call: Callable[[], object], amount: int) -> float:
    """Amount per second: the median of a few calls after a first one."""
    call()
    return amount / statistics.median(seconds(call) for _ in range(_PASSES))


def _reader(products: Products, num_bytes: int) -> tuple[Callable[[], object], int]:
    """A product of one row, which is bound by reading its weight."""
    columns = max(num_bytes // (2 * _READ_INNER), 64)
    weight = pack(torch.zeros(columns, _READ_INNER, dtype=torch.bfloat16), "bfloat16")
    return _own_product(products, weight, 1), weight.num_bytes


def _own_product(products: Products, weight: PackedWeight, rows: int) -> Callable[[], object]:
    x = torch.ones(rows, weight.inner)
    given = products.activation_dtype(weight, torch.bfloat16)
    read = products.code_rows(x) if weight.kind in CODED else x.to(given)
    out, product = torch.empty(rows, weight.outer), products.prepare(weight)
    return lambda: product.run(read, out)


def _calls(
    arithmetic: str, shape: tuple[int, int, int], products: Products | None
) -> Iterator[tuple[Callable[[], object], int]]:
    """Yield products that use this arithmetic, with their FLOPs."""
    rows, inner, columns = shape
    flops = 2 * rows * inner * columns
    dtype: torch.dtype = getattr(torch, arithmetic)
    left, right = torch.ones(rows, inner, dtype=dtype), torch.ones(columns, inner, dtype=dtype).T
    if arithmetic == INT8:
        yield (lambda: torch._int_mm(left, right)), flops
    else:
        out = torch.empty(rows, columns, dtype=dtype)
        yield (lambda: torch.mm(left, right, out=out)), flops
    if products is not None:
        for kind in _KINDS[arithmetic]:
            yield _own_product(products, pack(torch.ones(columns, inner), kind), rows), flops


def loaded_path() -> str:
    """Name of the C library's instruction set on this run, or why it is not used."""
    library = load_library()
    return library.reason if isinstance(library, NotLoaded) else INSTRUCTION_SETS[library.path]
