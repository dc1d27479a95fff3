"""Arguments of the C library's row-wise functions of a decoder layer: RMSNorm and RoPE."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from quire.kernels.native.arguments import AVX2, ConvertArgs, NormArgs, RopeArgs
from quire.kernels.native.coding import DTYPES

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
