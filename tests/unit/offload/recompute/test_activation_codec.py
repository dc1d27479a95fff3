"""Activation codecs: attention inputs encoded as rows of bytes."""

import pytest
import torch

from quire.codecs.registry import make_codec
from quire.config.kv_config import parse_activation_codec
from quire.errors import ConfigError, UnknownName
from quire.layout.codec_names import CODECS, codec_spec
from quire.offload.recompute.activation_store import ActivationCodec

ONE_BY_ONE = [n for n, spec in CODECS.items() if not spec.per_page and not spec.constants]
HIDDEN = 192  # three vectors of 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["none", *ONE_BY_ONE])
def test_decoded_rows_equal_the_codecs_decoded_vectors(name, dtype):
    codec = ActivationCodec(parse_activation_codec(name), HIDDEN, dtype)
    inputs = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(0)).to(dtype)

    rows = codec.encode(inputs)

    assert rows.dtype == torch.uint8
    assert rows.shape == (7, codec.row_bytes)
    expected = inputs
    if name != "none":
        plain = make_codec(codec_spec(name), 64)
        vectors = inputs.float().view(7, 3, 64)
        expected = plain.decode(plain.encode(vectors)).view(7, HIDDEN).to(dtype)
    assert torch.equal(codec.decode(rows), expected)
    assert torch.equal(codec.decode(rows[2:5]), expected[2:5])


def test_row_bytes_by_codec():
    """int8: 192 codes, three float16 scales; int4: 96 bytes, scales and zeros of three groups."""
    plain, int8, int4 = (
        ActivationCodec(parse_activation_codec(name), HIDDEN, torch.bfloat16).row_bytes
        for name in ("none", "int8", "int4")
    )
    assert (plain, int8, int4) == (2 * 192, 192 + 3 * 2, 96 + 3 * 4)


@pytest.mark.parametrize("name", ["int4_page", "kivi4", "int8/int4"])
def test_codec_that_is_not_per_token_is_rejected(name):
    with pytest.raises((ConfigError, UnknownName)):
        parse_activation_codec(name)
