"""Launches of a decoder layer's row-wise kernels: RMSNorm with the residual sum, gated SiLU."""

import torch
import triton
from jaxtyping import Float
from torch import Tensor

from quire.kernels.triton.device.rows import add_and_norm, gated_silu, norm_heads
from quire.kernels.triton.hardware import device_of

_GATE_BLOCK = 1024
_WARP_NUMBERS = 512  # numbers of a row for each warp


def normed(
    stream: Float[Tensor, "row width"],
    delta: Float[Tensor, "row width"] | None,
    weight: Float[Tensor, " width"],
    eps: float,
) -> Float[Tensor, "row width"]:
    """Add to the residual stream in place, and return its RMSNorm.

    Args:
        stream: the residual stream, contiguous.
        delta: added to it, contiguous; None: nothing.
        weight: of the norm.
        eps: added to the mean square.
    """
    out, (rows, width) = torch.empty_like(stream), stream.shape
    block = triton.next_power_of_2(width)
    with device_of(stream):
        add_and_norm[(rows,)](
            stream,
            stream if delta is None else delta,
            weight,
            out,
            eps,
            width,
            block,
            delta is not None,
            num_warps=min(16, max(1, block // _WARP_NUMBERS)),
        )
    return out


def norm_query_and_key(
    heads: Float[Tensor, "token columns"],
    num_heads: tuple[int, int],
    weights: tuple[Float[Tensor, " head_dim"], Float[Tensor, " head_dim"]],
    eps: float,
) -> None:
    """Apply RMSNorm to each query and key head in place.

    Args:
        heads: query heads, then key heads, then others; rows may have any stride.
        num_heads: numbers of query and key heads.
        weights: of the norms of query and key heads.
        eps: added to the mean square.
    """
    head_dim = len(weights[0])
    with device_of(heads):
        norm_heads[(len(heads), sum(num_heads))](
            heads,
            *weights,
            eps,
            heads.stride(0),
            num_heads[0],
            head_dim,
            triton.next_power_of_2(head_dim),
            num_warps=1,
        )


def gated(both: Float[Tensor, "row two_widths"]) -> Float[Tensor, "row width"]:
    """Return silu(gate) * up of contiguous rows [gate, up]."""
    rows, width = len(both), both.shape[1] // 2
    out = torch.empty(rows, width, dtype=both.dtype, device=both.device)
    block = min(_GATE_BLOCK, triton.next_power_of_2(width))
    with device_of(both):
        gated_silu[(rows, triton.cdiv(width, block))](both, out, width, block, num_warps=4)
    return out
