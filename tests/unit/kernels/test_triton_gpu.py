"""Compiled kernels on a GPU equal the reference, for every type and several vector lengths."""

import pytest
import torch

from quire.kernels.page_copies import IN_TORCH, page_copies
from quire.kernels.triton.hardware import Hardware

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "dims", [(64, 64), (80, 80), (128, 128), (256, 256), (192, 128), (64, 96), (512, 512)]
)
def test_kernels_are_right_on_a_gpu(dtype, dims):
    """Whole rows and splits; see `self_test`."""
    from quire.kernels.triton.self_test import tested_hardware

    found = tested_hardware(torch.device("cuda"), dtype, *dims)

    assert isinstance(found, Hardware), found


def test_pages_are_packed_by_triton_on_a_gpu():
    assert page_copies(torch.device("cuda")) is not IN_TORCH
