"""Codecs that equalise channel magnitudes before encoding."""

import pytest
import torch

from quire.codecs.registry import make_codec
from quire.layout.codec_names import codec_spec

HEADS, TOKENS, HEAD_DIM = 2, 64, 32


def keys(seed: int) -> torch.Tensor:
    """Two channels that are large in all tokens, and one that is always zero."""
    keys_ = torch.randn(HEADS, TOKENS, HEAD_DIM, generator=torch.Generator().manual_seed(seed))
    keys_[..., 3] *= 20
    keys_[..., 17] *= 10
    keys_[..., 5] = 0
    return keys_


@pytest.mark.parametrize(
    "name", ["int8", "int4", "int3", "int4_outliers:percent=3", "int4_hadamard"]
)
def test_equalised_codec_divides_before_and_multiplies_after_the_inner_codec(name):
    plain, both = (codec_spec(f"{name}{more}") for more in ("", _with(name)))
    codec = make_codec(both, HEAD_DIM).calibrated(keys(0))
    inner, scale, vectors = make_codec(plain, HEAD_DIM), codec.constant("equal"), keys(1)

    planes = codec.encode(vectors)

    for actual, expected in zip(planes, inner.encode(vectors / scale), strict=True):
        assert torch.equal(actual, expected)
    assert torch.equal(codec.decode(planes), inner.decode(planes) * scale)
    assert both.vector_bytes(HEAD_DIM, 16) == plain.vector_bytes(HEAD_DIM, 16)


def _with(name: str) -> str:
    return ",equalise=1" if ":" in name else ":equalise=1"


def test_equalising_scales_are_square_roots_with_geometric_mean_one():
    codec = make_codec(codec_spec("int4:equalise=1"), HEAD_DIM).calibrated(keys(0))
    scale, largest = codec.constant("equal"), keys(0).abs().amax(dim=1)

    assert scale.shape == (HEADS, 1, HEAD_DIM)
    torch.testing.assert_close(scale.log().mean(dim=-1), torch.zeros(HEADS, 1), atol=1e-5, rtol=0)
    ratio = (scale[:, 0, 3] / scale[:, 0, 0]) ** 2
    torch.testing.assert_close(ratio, largest[:, 3] / largest[:, 0])


@pytest.mark.parametrize("name", ["int4", "int3", "int8"])
def test_equalising_reduces_the_error_of_query_key_products(name):
    """Query-key products: random queries, keys with large channels."""
    vectors, draw = keys(1), torch.Generator().manual_seed(2)
    query = torch.randn(HEADS, 40, HEAD_DIM, generator=draw)
    errors = {}
    for text in (name, f"{name}:equalise=1"):
        codec = make_codec(codec_spec(text), HEAD_DIM).calibrated(keys(0))
        decoded = codec.decode(codec.encode(vectors))
        errors[text] = float((query @ (decoded - vectors).transpose(1, 2)).norm())

    assert errors[f"{name}:equalise=1"] < 0.8 * errors[name]


def test_each_head_has_its_own_scales():
    keys_ = keys(0)
    keys_[1] *= torch.linspace(1, 9, HEAD_DIM)
    codec = make_codec(codec_spec("int4:equalise=1"), HEAD_DIM).calibrated(keys_)
    heads = torch.tensor([[1], [0], [1]])  # three lanes of one head

    of_lanes = codec.of_heads(heads)
    swapped = keys_[[1, 0, 1]][:, None]  # [lane, head, token, head_dim]

    decoded = of_lanes.decode(of_lanes.encode(swapped))
    assert torch.equal(decoded[:, 0], codec.decode(codec.encode(keys_))[[1, 0, 1]])
