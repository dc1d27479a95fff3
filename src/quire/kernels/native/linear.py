"""Calls of the C library for linear layers: products, norms, RoPE."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from quire.errors import InvariantError
from quire.kernels.native.coding import DTYPES
from quire.kernels.native.library import NativeLibrary
from quire.kernels.native.linear_args import (
    AVX512_BF16,
    GROUP_CODES,
    PANEL_COLUMNS,
    PLAIN,
    STORE,
    CodeArgs,
    LinearArgs,
)
from quire.kernels.native.packed_weights import KINDS, PackedWeight

CODED = ("int8", "int4")


@dataclass(frozen=True, slots=True, eq=False)
class CodedRows:
    """Activations as int8 codes, with one scale for each row and GROUP_CODES elements."""

    codes: Tensor
    scales: Tensor
    sums: Tensor


class Products:
    """Products with packed weights on torch's threads.

    Args:
        library: the loaded C library; `path` selects its code.
        path: code path; None: the best of this CPU.
    """

    def __init__(self, library: NativeLibrary, path: int | None = None) -> None:
        self._library = library
        self._path = library.path if path is None else path

    def activation_dtype(self, weight: PackedWeight, dtype: torch.dtype) -> torch.dtype:
        """Return the type of activations that a product with this weight reads."""
        if weight.kind in CODED:
            return dtype if dtype in (torch.float32, torch.bfloat16) else torch.float32
        pairs = weight.kind == "bfloat16" and self._path == AVX512_BF16
        return torch.bfloat16 if pairs else torch.float32

    def prepare(
        self, weight: PackedWeight, *, bias: Tensor | None = None, finish: int = STORE
    ) -> "Product":
        """Return a product with this weight; its arguments are built once.

        Args:
            weight: packed.
            bias: float32, one number for each column of every panel; see `pack_bias`.
            finish: STORE, ADD to the output, or GATE_SILU for a gated weight.
        """
        return Product(self, self._library, self._path, weight, bias, finish)

    def code_rows(self, x: Float[Tensor, "row inner"]) -> CodedRows:
        """Quantize activations to int8."""
        rows, inner = x.shape
        groups = -(-inner // GROUP_CODES)
        coded = CodedRows(
            codes=torch.empty(rows, inner, dtype=torch.int8),
            scales=torch.empty(rows, groups),
            sums=torch.empty(rows, groups, dtype=torch.int32),
        )
        args = CodeArgs(
            x=x.data_ptr(),
            x_row=x.stride(0),
            codes=coded.codes.data_ptr(),
            scales=coded.scales.data_ptr(),
            sums=coded.sums.data_ptr(),
            rows=rows,
            width=inner,
            x_dtype=DTYPES[x.dtype],
            path=self._path,
        )
        if self._library.code_rows(ctypes.byref(args), self._library.parallel_for):
            raise InvariantError("the C extension cannot quantize activations on this machine")
        return coded


class Product:
    """A product with one packed weight; threads must not share it.

    Args:
        products: quantizes activations.
        library: the loaded C library.
        path: code path.
        weight, bias, finish: see `Products.prepare`.
    """

    def __init__(
        self,
        products: Products,
        library: NativeLibrary,
        path: int,
        weight: PackedWeight,
        bias: Tensor | None,
        finish: int,
    ) -> None:
        self._products, self._library = products, library
        self.weight, self._bias = weight, bias
        self._coded = weight.kind in CODED
        self._args = LinearArgs(
            weight=weight.panels.data_ptr(),
            scales=None if weight.scales is None else weight.scales.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            inner=weight.inner,
            outer=weight.outer,
            weight_kind=KINDS[weight.kind],
            finish=finish,
            path=path,
        )
        self._reference = ctypes.byref(self._args)

    def run(
        self, x: Float[Tensor, "row inner"] | CodedRows, out: Float[Tensor, "row outer"]
    ) -> None:
        """Compute x times the transposed weight.

        Args:
            x: of `Products.activation_dtype`, with a contiguous last axis; codes are computed if
                the weight is coded.
            out: float32, bfloat16 or float16 with a contiguous last axis; float32 if added to.
        """
        if self._coded and isinstance(x, Tensor):
            x = self._products.code_rows(x)
        args = self._args
        if isinstance(x, CodedRows):
            args.x, args.x_row_bytes = x.codes.data_ptr(), x.codes.stride(0)
            args.x_scales, args.x_sums = x.scales.data_ptr(), x.sums.data_ptr()
        else:
            args.x, args.x_row_bytes = x.data_ptr(), x.stride(0) * x.itemsize
            args.x_dtype = DTYPES[x.dtype]
        args.out, args.out_row, args.rows = out.data_ptr(), out.stride(0), len(out)
        args.out_dtype = DTYPES[out.dtype]
        library = self._library
        if library.linear(self._reference, library.parallel_for, torch.get_num_threads()):
            raise InvariantError("the C extension has no product for this machine")


def pack_bias(biases: Sequence[Tensor | None], weights: Sequence[int]) -> Tensor | None:
    """Place biases at the first columns of the parts of a packed weight; None if there are none.

    Args:
        biases: of each part.
        weights: output elements of each part.
    """
    if all(bias is None for bias in biases):
        return None
    parts = []
    for bias, outer in zip(biases, weights, strict=True):
        part = torch.zeros(-(-outer // PANEL_COLUMNS) * PANEL_COLUMNS)
        if bias is not None:
            part[:outer] = bias.detach().float()
        parts.append(part)
    return torch.cat(parts)


def has_products(library: NativeLibrary) -> bool:
    """Whether the library has products for this CPU."""
    return library.path != PLAIN
