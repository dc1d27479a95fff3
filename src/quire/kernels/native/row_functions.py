"""Calls of the C library for the row-wise functions of a decoder layer: RMSNorm and RoPE."""

import ctypes
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from quire.errors import InvariantError
from quire.kernels.native.coding import DTYPES
from quire.kernels.native.library import NativeLibrary
from quire.kernels.native.linear_args import AVX2, NormArgs, RopeArgs

WIDE_LANES = 16  # float32 numbers of an AVX-512 vector
NARROW_LANES = 8


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
    """RMSNorm and RoPE on torch's threads.

    Args:
        library: the loaded C library.
        path: code path; None: the best of this CPU.
    """

    def __init__(self, library: NativeLibrary, path: int | None = None) -> None:
        self._library = library
        self._path = library.path if path is None else path

    def norm(self, x: Float[Tensor, "row width"], weight: Tensor, eps: float, out: Tensor) -> None:
        """Compute x / sqrt(mean(x ** 2) + eps) * weight into a contiguous `out`.

        Args:
            x: float32 with a contiguous last axis, of a multiple of 8 elements.
            weight: float32.
            eps: added to the mean.
            out: float32, bfloat16 or float16.
        """
        args = NormArgs(
            x=x.data_ptr(),
            weight=weight.data_ptr(),
            out=out.data_ptr(),
            x_row=x.stride(0),
            rows=len(x),
            width=x.shape[1],
            out_dtype=DTYPES[out.dtype],
            path=self._path_of(x.shape[1]),
            eps=eps,
        )
        self._check(self._library.norm(ctypes.byref(args), self._library.parallel_for))

    def split_heads(
        self,
        x: Float[Tensor, "row column"],
        shape: HeadShape,
        cosine: Float[Tensor, "row rotary_dim"],
        sine: Float[Tensor, "row rotary_dim"],
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split a joint product into queries, keys and values; rotate queries and keys.

        Args:
            x: float32 with a contiguous last axis.
            shape: where the heads are.
            cosine: float32, contiguous.
            sine: likewise.
            dtype: of the results.

        Returns:
            Queries, keys, values [row, heads, head_dim].
        """
        query, key, value = (
            torch.empty(len(x), heads, shape.head_dim, dtype=dtype) for heads in shape.heads
        )
        norms = (None, None) if shape.norms is None else shape.norms
        args = RopeArgs(
            x=x.data_ptr(),
            x_row=x.stride(0),
            column=shape.columns,
            cosine=cosine.data_ptr(),
            sine=sine.data_ptr(),
            norm=tuple(None if norm is None else norm.data_ptr() for norm in norms),
            out=(query.data_ptr(), key.data_ptr(), value.data_ptr()),
            heads=shape.heads,
            rows=len(x),
            head_dim=shape.head_dim,
            rotary_dim=shape.rotary_dim,
            out_dtype=DTYPES[dtype],
            path=self._path_of(shape.rotary_dim // 2, shape.head_dim - shape.rotary_dim),
            eps=shape.eps,
        )
        self._check(self._library.rope(ctypes.byref(args), self._library.parallel_for))
        return query, key, value

    def _path_of(self, *widths: int) -> int:
        """The code path for vectors of these lengths: AVX-512 CPUs also run AVX2 code."""
        return AVX2 if any(width % WIDE_LANES for width in widths) else self._path

    @staticmethod
    def _check(status: int) -> None:
        if status:
            raise InvariantError("the C extension has no row functions for this machine")
