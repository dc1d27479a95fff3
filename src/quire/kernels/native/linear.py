"""Calls of the C library for linear layers: products, norms, RoPE."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from quire.errors import InvariantError
from quire.kernels.native.arguments import (
    AVX512_BF16,
    GROUP_CODES,
    PANEL_COLUMNS,
    PLAIN,
    STORE,
    CodeArgs,
    LinearArgs,
)
from quire.kernels.native.coding import DTYPES
from quire.kernels.native.library import NativeLibrary
from quire.kernels.native.packed_weights import KINDS, PackedWeight

CODED = ("int8", "int4")


@dataclass(frozen=True, slots=True, eq=False)
class CodedRows:
    """Activations as int8 codes, with one scale for each row and GROUP_CODES elements."""

    codes: Tensor
    scales: Tensor
    sums: Tensor

    @classmethod
    def empty(cls, rows: int, inner: int) -> "CodedRows":
        """Allocate codes of [rows, inner] activations."""
        groups = -(-inner // GROUP_CODES)
        return cls(
            codes=torch.empty(rows, inner, dtype=torch.int8),
            scales=torch.empty(rows, groups),
            sums=torch.empty(rows, groups, dtype=torch.int32),
        )


def set_input(args: LinearArgs, x: Tensor | CodedRows) -> None:
    """Set the activations of a product."""
    if isinstance(x, CodedRows):
        args.x, args.x_row_bytes = x.codes.data_ptr(), x.codes.stride(0)
        args.x_scales, args.x_sums = x.scales.data_ptr(), x.sums.data_ptr()
    else:
        args.x, args.x_row_bytes = x.data_ptr(), x.stride(0) * x.itemsize
        args.x_dtype = DTYPES[x.dtype]


def set_output(args: LinearArgs, out: Tensor) -> None:
    """Set the output of a product."""
    args.out, args.out_row = out.data_ptr(), out.stride(0)
    args.out_dtype = DTYPES[out.dtype]


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
        return Product(self, self._library, weight, bias, finish)

    def linear_args(
        self, weight: PackedWeight, *, bias: Tensor | None = None, finish: int = STORE
    ) -> LinearArgs:
        """Arguments of a product, without activations and output; see `prepare`."""
        return LinearArgs(
            weight=weight.panels.data_ptr(),
            scales=None if weight.scales is None else weight.scales.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            inner=weight.inner,
            outer=weight.outer,
            weight_kind=KINDS[weight.kind],
            finish=finish,
            path=self._path,
        )

    def code_args(self, x: Float[Tensor, "row inner"], coded: CodedRows) -> CodeArgs:
        """Arguments of a quantization of activations."""
        return CodeArgs(
            x=x.data_ptr(),
            x_row=x.stride(0),
            codes=coded.codes.data_ptr(),
            scales=coded.scales.data_ptr(),
            sums=coded.sums.data_ptr(),
            rows=x.shape[0],
            width=x.shape[1],
            x_dtype=DTYPES[x.dtype],
            path=self._path,
        )

    def code_rows(self, x: Float[Tensor, "row inner"]) -> CodedRows:
        """Quantize activations to int8."""
        coded = CodedRows.empty(*x.shape)
        args = self.code_args(x, coded)
        if self._library.code_rows(ctypes.byref(args), self._library.parallel_for):
            raise InvariantError("the C extension cannot quantize activations on this machine")
        return coded


class Product:
    """A product with one packed weight; threads must not share it.

    Args:
        products: quantizes activations.
        library: the loaded C library.
        weight, bias, finish: see `Products.prepare`.
    """

    def __init__(
        self,
        products: Products,
        library: NativeLibrary,
        weight: PackedWeight,
        bias: Tensor | None,
        finish: int,
    ) -> None:
        self._products, self._library = products, library
        self.weight, self.bias = weight, bias
        self._coded = weight.kind in CODED
        self._args = products.linear_args(weight, bias=bias, finish=finish)
        self._reference = ctypes.byref(self._args)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that hold the weight and the bias."""
        found = (self.weight.panels, self.weight.scales, self.bias)
        return tuple(tensor for tensor in found if tensor is not None)

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
        set_input(args, x)
        set_output(args, out)
        args.rows = out.shape[0]
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
