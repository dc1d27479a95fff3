"""Whether the row-wise kernels of fused layers run on a GPU; imports Triton only on a GPU."""

import functools
import logging
from dataclasses import dataclass

import torch

from quire.kernels.triton.hardware import cannot_run, failure_of, why_no_triton

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RowShape:
    """Sizes of a model that its row-wise kernels depend on.

    Attributes:
        width: elements of the residual stream.
        head_dim: elements of a head.
        rotary_dim: leading elements of a head that RoPE rotates.
    """

    width: int
    head_dim: int
    rotary_dim: int


def why_no_rows(device: torch.device, dtype: torch.dtype, shape: RowShape) -> str | None:
    """Return why the row-wise kernels are not used on a device, or None.

    The kernels run once on small inputs, and their results are compared with those of PyTorch.

    Args:
        device: of the model.
        dtype: float32, bfloat16 or float16.
        shape: of the model.
    """
    reason = why_no_triton(device)
    if reason is not None:
        return reason
    try:
        wrong = _wrong_kernels(device, dtype, shape)
    except cannot_run() as error:  # not cached: memory may be free at the next load
        _log.warning("fused layers are off", exc_info=True)
        return failure_of(error)
    if not wrong:
        return None
    reason = f"wrong results of {', '.join(wrong)} on {device}"
    _log.warning("fused layers are off: %s; please report it", reason)
    return reason


@functools.cache
def _wrong_kernels(device: torch.device, dtype: torch.dtype, shape: RowShape) -> tuple[str, ...]:
    from quire.kernels.triton.self_test import wrong_kernels

    return wrong_kernels(device, dtype, shape)
