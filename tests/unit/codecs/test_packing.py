"""Packing of codes is lossless and has the documented layout."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.codecs.affine import pack, unpack


@given(bits=st.sampled_from((2, 3, 4, 8)), num_groups=st.integers(1, 20), seed=st.integers(0, 99))
def test_unpack_inverts_pack(bits, num_groups, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(1 << bits, (2, 3, 8 * num_groups), generator=generator).to(torch.uint8)

    packed = pack(codes, bits)

    assert packed.shape == (2, 3, bits * num_groups)
    assert packed.dtype == torch.uint8
    assert torch.equal(unpack(packed, bits), codes)


@pytest.mark.parametrize(
    ("bits", "codes", "packed"),
    [
        (4, [1, 2, 3, 4], [1 | 3 << 4, 2 | 4 << 4]),
        (2, [0, 1, 2, 3, 3, 2, 1, 0], [0 | 2 << 2 | 3 << 4 | 1 << 6, 1 | 3 << 2 | 2 << 4 | 0]),
        # low bits 1 2 3 0 1 2 3 0 in pairs of (i, i + 2, i + 4, i + 6), then high bits 0 to 7
        (
            3,
            [1, 2, 3, 4, 5, 6, 7, 0],
            [1 | 3 << 2 | 1 << 4 | 3 << 6, 2 | 0 | 2 << 4 | 0, 0b01111000],
        ),
    ],
)
def test_packed_bytes_have_the_documented_layout(bits, codes, packed):
    assert pack(torch.tensor(codes, dtype=torch.uint8), bits).tolist() == packed
