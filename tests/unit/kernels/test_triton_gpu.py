"""Compiled kernels on a GPU equal the reference, for every type and several vector lengths."""

import pytest
import torch

from quire.kernels.page_copies import IN_TORCH, page_copies
from quire.kernels.triton.hardware import Hardware

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_kernels_are_right_on_a_gpu(dtype, head_dim):
    """Whole rows and splits; see `self_test`."""
    from quire.kernels.triton.self_test import tested_hardware

    found = tested_hardware(torch.device("cuda"), dtype, head_dim)

    assert isinstance(found, Hardware), found


def test_pages_are_packed_by_triton_on_a_gpu():
    assert page_copies(torch.device("cuda")) is not IN_TORCH
