"""Channels brought to like size before they are encoded."""

import pytest
import torch

from quire.codecs.registry import make_codec
from quire.layout.codec_names import codec_spec

HEADS, TOKENS, HEAD_DIM = 2, 64, 32


def keys(seed: int) -> torch.Tensor:
    """Two channels that are large in all tokens, and one that is always zero."""
    made = torch.randn(HEADS, TOKENS, HEAD_DIM, generator=torch.Generator().manual_seed(seed))
    made[..., 3] *= 20
    made[..., 17] *= 10
    made[..., 5] = 0
    return made


@pytest.mark.parametrize(
    "name", ["int8", "int4", "int3", "int4_outliers:percent=3", "int4_hadamard"]
)
def test_it_is_the_codec_inside_between_a_division_and_a_product(name):
    plain, both = (codec_spec(f"{name}{more}") for more in ("", _with(name)))
    codec = make_codec(both, HEAD_DIM).calibrated(keys(0))
    inside, scale, vectors = make_codec(plain, HEAD_DIM), codec.constant("equal"), keys(1)

    planes = codec.encode(vectors)

    for ours, theirs in zip(planes, inside.encode(vectors / scale), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(codec.decode(planes), inside.decode(planes) * scale)
    assert both.vector_bytes(HEAD_DIM, 16) == plain.vector_bytes(HEAD_DIM, 16)


def _with(name: str) -> str:
    return ",equalise=1" if ":" in name else ":equalise=1"


def test_scales_are_roots_of_what_channels_come_to_with_a_geometric_mean_of_one():
    codec = make_codec(codec_spec("int4:equalise=1"), HEAD_DIM).calibrated(keys(0))
    scale, largest = codec.constant("equal"), keys(0).abs().amax(dim=1)

    assert scale.shape == (HEADS, 1, HEAD_DIM)
    torch.testing.assert_close(scale.log().mean(dim=-1), torch.zeros(HEADS, 1), atol=1e-5, rtol=0)
    ratio = (scale[:, 0, 3] / scale[:, 0, 0]) ** 2
    torch.testing.assert_close(ratio, largest[:, 3] / largest[:, 0])


@pytest.mark.parametrize("name", ["int4", "int3", "int8"])
def test_products_with_like_queries_get_nearer(name):
    """With queries that are small where keys are large, as is usual, and with such that are not."""
    vectors, draw = keys(1), torch.Generator().manual_seed(2)
    query = torch.randn(HEADS, 40, HEAD_DIM, generator=draw)
    wrong = {}
    for text in (name, f"{name}:equalise=1"):
        codec = make_codec(codec_spec(text), HEAD_DIM).calibrated(keys(0))
        decoded = codec.decode(codec.encode(vectors))
        wrong[text] = float((query @ (decoded - vectors).transpose(1, 2)).norm())

    assert wrong[f"{name}:equalise=1"] < 0.8 * wrong[name]


def test_each_head_has_its_own():
    made = keys(0)
    made[1] *= torch.linspace(1, 9, HEAD_DIM)
    codec = make_codec(codec_spec("int4:equalise=1"), HEAD_DIM).calibrated(made)
    heads = torch.tensor([[1], [0], [1]])  # three lanes of one head

    chosen = codec.of_heads(heads)
    swapped = made[[1, 0, 1]][:, None]  # [lane, head, token, head_dim]

    decoded = chosen.decode(chosen.encode(swapped))
    assert torch.equal(decoded[:, 0], codec.decode(codec.encode(made))[[1, 0, 1]])
