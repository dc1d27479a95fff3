"""Calls of the C library for linear layers, and weights in the order in which it reads them."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from quire.errors import InvariantError
from quire.kernels.memory import zero_memory
from quire.kernels.native.arguments import (
    AVX512_BF16,
    DTYPES,
    GATE_COLUMNS,
    GROUP_CODES,
    PANEL_COLUMNS,
    PLAIN,
    STORE,
    CodeArgs,
    LinearArgs,
)
from quire.kernels.native.library import NativeLibrary

KINDS = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3}
UNIT_NUMBERS = {"float32": 1, "bfloat16": 2, "int8": 4, "int4": 8}
INNER_MULTIPLES = UNIT_NUMBERS | {"int8": 16, "int4": 16}
"""Input elements come in multiples of these: activations are quantized 16 elements at a time."""

INT8_MAX, INT4_MAX = 127, 7
CODED = ("int8", "int4")


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight [outer, inner] in panels of PANEL_COLUMNS rows of `outer`.

    Attributes:
        panels: the packed bytes.
        kind: float32, bfloat16, int8 or int4.
        outer, inner: output and input elements.
        scales: float32; int8: [panels, PANEL_COLUMNS]; int4: [panels, groups, PANEL_COLUMNS]; else
            None.
        gated: panels hold GATE_COLUMNS columns of a gate, then as many of the other factor.
    """

    panels: Tensor
    kind: str
    outer: int
    inner: int
    scales: Tensor | None = None
    gated: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the panels and scales."""
        return self.panels.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def part(self, first: int, outer: int) -> "PackedWeight":
        """Return a view of `outer` output elements from a multiple of PANEL_COLUMNS on."""
        if first % PANEL_COLUMNS:
            raise InvariantError(f"expected a multiple of {PANEL_COLUMNS}, got {first}")
        panels = slice(first // PANEL_COLUMNS, -(-(first + outer) // PANEL_COLUMNS))
        scales = None if self.scales is None else self.scales[panels]
        return replace(self, panels=self.panels[panels], outer=outer, scales=scales)

    def whole_panels(self) -> "PackedWeight":
        """Return a view that includes the columns of zeros at the end."""
        return replace(self, outer=len(self.panels) * PANEL_COLUMNS, gated=False)

    def rows(self, numbers: Tensor) -> Float[Tensor, "row inner"]:
        """Return rows of the weight, decoded: bfloat16 for bfloat16, else float32.

        Args:
            numbers: int64 indices of output elements.
        """
        panel, column = numbers // PANEL_COLUMNS, numbers % PANEL_COLUMNS
        units = self.panels[panel, :, column]  # [row, units, 4 bytes]
        if self.scales is None:
            dtype = torch.float32 if self.kind == "float32" else torch.bfloat16
            return units.reshape(len(numbers), -1).view(dtype)
        if self.kind == "int8":
            codes = units.reshape(len(numbers), -1).float() - (INT8_MAX + 1)
            return codes * self.scales[panel, column][:, None]
        codes = torch.stack([units & 15, units >> 4], dim=2).reshape(len(numbers), -1).float()
        scales = self.scales[panel, :, column].repeat_interleave(GROUP_CODES, dim=1)
        return (codes - (INT4_MAX + 1)) * scales[:, : self.inner]

    def unpacked(self) -> Float[Tensor, "outer inner"]:
        """Return the whole weight, decoded; of a gated weight, the gate first."""
        if not self.gated:
            return self.rows(torch.arange(self.outer))
        half = self.outer // 2
        panel, column = torch.arange(half) // GATE_COLUMNS, torch.arange(half) % GATE_COLUMNS
        gate = panel * PANEL_COLUMNS + column
        return torch.cat([self.rows(gate), self.rows(gate + GATE_COLUMNS)])


def can_pack(inner: int, kind: str) -> bool:
    """Whether a weight with `inner` input elements can be packed."""
    return inner % INNER_MULTIPLES[kind] == 0


def pack(weight: Tensor, kind: str) -> PackedWeight:
    """Pack a weight [outer, inner]; int8 and int4 weights are rounded to nearest.

    int8: one scale for each output element. int4: one for each output element and GROUP_CODES input
    elements.
    """
    outer, inner = weight.shape
    num_panels = -(-outer // PANEL_COLUMNS)
    packed = _empty(num_panels, inner, kind)
    panels = packed.panels
    for number in range(num_panels):  # one at a time: no second copy of the weight
        _pack_panel(weight[number * PANEL_COLUMNS : (number + 1) * PANEL_COLUMNS], packed, number)
    return replace(packed, panels=panels, outer=outer)


def pack_parts(weights: Sequence[Tensor], kind: str) -> tuple[PackedWeight, tuple[int, ...]]:
    """Pack weights of the same input below each other, each from a new panel on.

    Returns:
        The packed weight, and the first output element of each part.
    """
    inner = weights[0].shape[1]
    lengths = [-(-len(weight) // PANEL_COLUMNS) * PANEL_COLUMNS for weight in weights]
    starts = tuple(sum(lengths[:number]) for number in range(len(weights)))
    packed = _empty(sum(lengths) // PANEL_COLUMNS, inner, kind)
    for start, weight in zip(starts, weights, strict=True):
        for first in range(0, len(weight), PANEL_COLUMNS):
            rows = weight[first : first + PANEL_COLUMNS]
            _pack_panel(rows, packed, (start + first) // PANEL_COLUMNS)
    return replace(packed, outer=starts[-1] + len(weights[-1])), starts


def pack_gated(gate: Tensor, other: Tensor, kind: str) -> PackedWeight:
    """Pack the two factors of a gated product; see `GATE_SILU` in linear.h."""
    half, inner = gate.shape
    num_panels = -(-half // GATE_COLUMNS)
    packed = _empty(num_panels, inner, kind)
    for number in range(num_panels):
        part = slice(number * GATE_COLUMNS, (number + 1) * GATE_COLUMNS)
        rows = gate.new_zeros(2, GATE_COLUMNS, inner)
        rows[0, : len(gate[part])], rows[1, : len(other[part])] = gate[part], other[part]
        _pack_panel(rows.flatten(0, 1), packed, number)
    return replace(packed, outer=2 * half, gated=True)


def _empty(num_panels: int, inner: int, kind: str) -> PackedWeight:
    if not can_pack(inner, kind):
        raise InvariantError(f"expected a multiple of {INNER_MULTIPLES[kind]}, got {inner}")
    units = inner // UNIT_NUMBERS[kind]
    panels = zero_memory(num_panels * units * PANEL_COLUMNS * 4)
    scales = None
    if kind == "int8":
        scales = torch.zeros(num_panels, PANEL_COLUMNS)
    elif kind == "int4":
        scales = torch.zeros(num_panels, -(-inner // GROUP_CODES), PANEL_COLUMNS)
    return PackedWeight(
        panels=panels.view(num_panels, units, PANEL_COLUMNS, 4),
        kind=kind,
        outer=num_panels * PANEL_COLUMNS,
        inner=inner,
        scales=scales,
    )


def _pack_panel(rows: Tensor, packed: PackedWeight, number: int) -> None:
    """Pack up to PANEL_COLUMNS rows of a weight as one panel; missing rows are zeros."""
    if len(rows) < PANEL_COLUMNS:
        rows = torch.cat([rows, rows.new_zeros(PANEL_COLUMNS - len(rows), rows.shape[1])])
    if packed.kind in ("float32", "bfloat16"):
        units = rows.to(torch.float32 if packed.kind == "float32" else torch.bfloat16)
    else:
        assert packed.scales is not None, "codes have scales"
        if packed.kind == "int8":
            units, scales = _int8_codes(rows.float())
            packed.scales[number] = scales[:, 0]
        else:
            groups = torch.nn.functional.pad(rows.float(), (0, -rows.shape[1] % GROUP_CODES))
            codes, scales = _int4_codes(groups.view(PANEL_COLUMNS, -1, GROUP_CODES))
            packed.scales[number] = scales[..., 0].T
            halves = codes.view(PANEL_COLUMNS, -1)[:, : rows.shape[1]]
            halves = halves.reshape(PANEL_COLUMNS, -1, 2, 4)
            units = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
    # PyTorch transposes a matrix of int32 in blocks, units of four uint8 one by one
    panel = packed.panels[number].view(torch.int32)[..., 0]
    units = units.contiguous()
    if units.storage_offset() * units.element_size() % 4:  # no view as int32
        units = units.clone()
    panel.copy_(units.view(torch.int32).t())


def _int8_codes(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Codes plus an offset of 128, and scales, of the last axis: -127 to 127."""
    scales = numbers.abs().amax(dim=-1, keepdim=True) / INT8_MAX
    codes = (numbers / _divisors(scales)).round_()
    return (codes.clamp_(-INT8_MAX, INT8_MAX) + (INT8_MAX + 1)).to(torch.uint8), scales


def _int4_codes(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Codes plus an offset of 8, and scales, of the last axis: -8 to 7.

    The number of largest magnitude gets the code -8, so a scale may be negative: all 16 codes are
    used, and the largest number is exact. Scales of the least squared error have a higher KL: they
    clip the largest numbers (docs/weights.md).
    """
    largest = numbers.gather(-1, numbers.abs().argmax(dim=-1, keepdim=True))
    scales = largest / -(INT4_MAX + 1)
    codes = (numbers / _divisors(scales)).round_()
    return (codes.clamp_(-INT4_MAX - 1, INT4_MAX) + (INT4_MAX + 1)).to(torch.uint8), scales


def _divisors(scales: Tensor) -> Tensor:
    return scales.where(scales.abs() > torch.finfo(torch.float32).tiny, 1.0)


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
