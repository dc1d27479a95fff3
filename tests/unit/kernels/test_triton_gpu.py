"""Compiled kernels on a GPU equal the reference, for every type and several vector lengths."""

import pytest
import torch

from quire.kernels.gathered import GatheredAttention
from quire.kernels.page_copies import IN_TORCH, page_copies

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_kernels_are_right_on_a_gpu(dtype, head_dim):
    from quire.kernels.triton.backend import TritonAttention
    from quire.kernels.triton.self_test import first_wrong

    device = torch.device("cuda")
    backend = TritonAttention(device, GatheredAttention(device))

    assert first_wrong(backend, device, dtype, head_dim) is None


def test_pages_are_packed_by_triton_on_a_gpu():
    assert page_copies(torch.device("cuda")) is not IN_TORCH
