"""Chains: calls of the C library that follow each other without Python between them.

They compute a decoder layer: products, RMSNorm, RoPE, writes to pages, attention.
"""

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from quire.errors import InvariantError
from quire.kernels.native.arguments import (
    AVX2,
    DTYPES,
    AttentionArgs,
    ChainCall,
    CodeArgs,
    ConvertArgs,
    LinearArgs,
    NormArgs,
    RopeArgs,
    WriteArgs,
)
from quire.kernels.native.library import NativeLibrary

WIDE_LANES = 16  # float32 numbers of an AVX-512 vector
NARROW_LANES = 8
CHAIN_PARTS = ("qkv", "attention", "output projection", "mlp", "head", "norms and RoPE")
RowArgs = LinearArgs | NormArgs | RopeArgs | CodeArgs | ConvertArgs
_CALLS = (LinearArgs, NormArgs, RopeArgs, CodeArgs, ConvertArgs, WriteArgs, AttentionArgs)
_KINDS = {arguments: kind for kind, arguments in enumerate(_CALLS)}  # as in rows.h


@dataclass(frozen=True, slots=True, eq=False)
class HeadShape:
    """Layout of the output of a joint query, key and value product.

    Attributes:
        columns: first column of queries, keys, values.
        heads: number of heads of each.
        head_dim: elements of a head.
        rotary_dim: leading elements of a head that RoPE rotates, in pairs (i, i + half).
        norms: float32 weights [head_dim] of the norms of query and key heads, or None.
        eps: of these norms.
    """

    columns: tuple[int, int, int]
    heads: tuple[int, int, int]
    head_dim: int
    rotary_dim: int
    norms: tuple[Tensor, Tensor] | None = None
    eps: float = 0.0


class RowFunctions:
    """Arguments of RMSNorm and RoPE; a `Chain` makes the calls.

    Args:
        path: code path of the C library.
    """

    def __init__(self, path: int) -> None:
        self._path = path

    def norm(
        self, x: Float[Tensor, "row width"], weight: Tensor, eps: float, out: Tensor
    ) -> NormArgs:
        """Arguments of x / sqrt(mean(x ** 2) + eps) * weight.

        Args:
            x: float32 with a contiguous last axis, of a multiple of 8 elements.
            weight: float32.
            eps: added to the mean.
            out: contiguous float32, bfloat16 or float16.
        """
        return NormArgs(
            x=x.data_ptr(),
            weight=weight.data_ptr(),
            out=out.data_ptr(),
            x_row=x.stride(0),
            rows=x.shape[0],
            width=x.shape[1],
            out_dtype=DTYPES[out.dtype],
            path=self._path_of(x.shape[1]),
            eps=eps,
        )

    def heads(
        self, x: Float[Tensor, "row column"], shape: HeadShape, dtype: torch.dtype
    ) -> RopeArgs:
        """Arguments that split a joint product into heads, and rotate queries and keys.

        `set_heads` sets the outputs; `cosine` and `sine` point to float32 [row, rotary_dim].

        Args:
            x: float32 with a contiguous last axis.
            shape: where the heads are.
            dtype: of queries, keys and values.
        """
        norms = (None, None) if shape.norms is None else shape.norms
        return RopeArgs(
            x=x.data_ptr(),
            x_row=x.stride(0),
            column=shape.columns,
            norm=tuple(None if norm is None else norm.data_ptr() for norm in norms),
            heads=shape.heads,
            rows=x.shape[0],
            head_dim=shape.head_dim,
            rotary_dim=shape.rotary_dim,
            out_dtype=DTYPES[dtype],
            path=self._path_of(shape.rotary_dim // 2, shape.head_dim - shape.rotary_dim),
            eps=shape.eps,
        )

    def convert(self, x: Float[Tensor, "row width"], out: Tensor) -> ConvertArgs:
        """Arguments of a conversion of contiguous rows from or to float32."""
        return ConvertArgs(
            x=x.data_ptr(),
            out=out.data_ptr(),
            rows=x.shape[0],
            width=x.shape[1],
            x_dtype=DTYPES[x.dtype],
            out_dtype=DTYPES[out.dtype],
            path=self._path_of(x.shape[1]),
        )

    def _path_of(self, *widths: int) -> int:
        """The code path for vectors of these lengths: AVX-512 CPUs also run AVX2 code."""
        return AVX2 if any(width % WIDE_LANES for width in widths) else self._path


def empty_heads(rows: int, shape: HeadShape, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate queries, keys and values [row, heads, head_dim]."""
    query, key, value = (
        torch.empty(rows, heads, shape.head_dim, dtype=dtype) for heads in shape.heads
    )
    return query, key, value


def set_heads(args: RopeArgs, heads: Iterable[Tensor]) -> None:
    """Set queries, keys and values as outputs."""
    for part, tensor in enumerate(heads):
        args.out[part] = tensor.data_ptr()


class PartTimes:
    """Time of the calls of chains, added up by component of the model."""

    def __init__(self) -> None:
        self.nanoseconds = (ctypes.c_int64 * len(CHAIN_PARTS))()

    def seconds(self) -> dict[str, float]:
        """Seconds of each component since the last reset."""
        return {part: n / 1e9 for part, n in zip(CHAIN_PARTS, self.nanoseconds, strict=True)}

    def reset(self) -> None:
        """Set all times to 0."""
        ctypes.memset(self.nanoseconds, 0, ctypes.sizeof(self.nanoseconds))


class LayerAttention(NamedTuple):
    """Attention of one layer, as two calls of a chain.

    Attributes:
        write: writes the new keys and values to their slots.
        attend: attends to the slots.
        num_threads: for `attend`.
        owner: holds the memory that the arguments point to.
    """

    write: WriteArgs
    attend: AttentionArgs
    num_threads: int
    owner: object


class Chain:
    """Calls in order, with arguments that are built once.

    Args:
        library: the loaded C library.
        parts: arguments of the calls, with the name in CHAIN_PARTS that their time counts for; the
            owner keeps the memory they point to alive.

    Attributes:
        calls: the calls, in an array of C.
    """

    def __init__(self, library: NativeLibrary, *parts: tuple[str, Sequence[RowArgs]]) -> None:
        self._library = library
        self._steps = tuple(step for _, steps in parts for step in steps)
        calls = [
            _call(type(step), part, ctypes.addressof(step))
            for part, steps in parts
            for step in steps
        ]
        self.calls = (ChainCall * len(calls))(*calls)

    def set_rows(self, rows: int) -> None:
        """Set the number of rows of every call."""
        for step in self._steps:
            step.rows = rows

    def run(self, times: PartTimes | None = None) -> None:
        """Make the calls; add their times to `times`."""
        _run(self._library, self.calls, times)


class LayerChain:
    """The calls of all layers of a decoder, with attention between two chains of each layer.

    Args:
        library: the loaded C library.
        layers: calls before and after attention of each layer.
    """

    def __init__(self, library: NativeLibrary, layers: Sequence[tuple[Chain, Chain]]) -> None:
        self._library = library
        write, attend = _call(WriteArgs, "attention"), _call(AttentionArgs, "attention")
        calls: list[ChainCall] = []
        self._writes: list[int] = []  # index of the write of each layer; `attend` follows it
        for before, after in layers:
            self._writes.append(len(calls) + len(before.calls))
            calls += [*before.calls, write, attend, *after.calls]
        self._calls = (ChainCall * len(calls))(*calls)
        self._attention: Sequence[object] = ()

    def run(self, attention: Sequence[object], times: PartTimes | None = None) -> None:
        """Make the calls.

        Args:
            attention: a LayerAttention for each layer; the sequence of the last run has not changed
                since.
            times: times of the calls are added to these.
        """
        if attention is not self._attention:
            self._attention = attention
            for write, layer in zip(self._writes, attention, strict=True):
                assert isinstance(layer, LayerAttention), "the calls come from the native backend"
                self._calls[write].args = ctypes.addressof(layer.write)
                attend = self._calls[write + 1]
                attend.args, attend.num_threads = ctypes.addressof(layer.attend), layer.num_threads
        _run(self._library, self._calls, times)


def _call(arguments: type[ctypes.Structure], part: str, address: int | None = None) -> ChainCall:
    return ChainCall(address, _KINDS[arguments], CHAIN_PARTS.index(part))


def _run(library: NativeLibrary, calls: "ctypes.Array[ChainCall]", times: PartTimes | None) -> None:
    threads, nanoseconds = torch.get_num_threads(), None if times is None else times.nanoseconds
    if library.chain(calls, len(calls), library.parallel_for, threads, nanoseconds):
        raise InvariantError("the C extension has no code for the layers of this decoder")
