"""Whether the row-wise kernels of fused layers run on a GPU; imports Triton only on a GPU."""

import functools
import logging

import torch

from quire.kernels.triton.hardware import cannot_run, failure_of, why_no_triton

_log = logging.getLogger(__name__)


@functools.cache
def why_no_rows(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the row-wise kernels are not used on a device, or None.

    The kernels run once on small inputs, and their results are compared with those of PyTorch.
    """
    reason = why_no_triton(device)
    if reason is not None:
        return reason
    try:
        from quire.kernels.triton.row_self_test import wrong_kernels

        wrong = wrong_kernels(device, dtype)
    except cannot_run() as error:
        _log.info("fused layers are off", exc_info=True)
        return failure_of(error)
    return f"wrong results of {', '.join(wrong)} on {device}" if wrong else None
