"""Properties of every registered codec: shapes, bytes, finite outputs, independence of vectors.

A vector (or a page, for codecs of whole pages) is encoded independently of the other vectors.
Bounds of errors are in test_bounds.py.
"""

import pytest
import torch
from torch import Tensor

from quire.codecs.base import DTYPES, Codec
from quire.codecs.registry import make_codec, register, registered
from quire.errors import ConfigError
from quire.layout.codec_names import CODECS, codec_spec

HEADS, TOKENS = 3, 32
HEAD_DIMS = (8, 64, 80, 128)

MAX_ERROR = {2: 0.8, 3: 0.3, 4: 0.15, 8: 0.03, 16: 0.002, 32: 0.0001}
"""Largest relative error (norm) of a vector, by the bits of a code."""

every_codec = pytest.mark.parametrize("name", sorted(CODECS))
every_head_dim = pytest.mark.parametrize("head_dim", HEAD_DIMS)


def vectors_of(*shape: int, seed: int = 0) -> Tensor:
    """Random vectors with one channel that is large in all of them, as in keys."""
    vectors = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    vectors[..., shape[-1] // 3] *= 8
    return vectors


def codec_of(name: str, head_dim: int) -> Codec:
    codec = make_codec(codec_spec(name), head_dim)
    return codec.calibrated(vectors_of(HEADS, 200, head_dim, seed=9))


def test_every_named_codec_is_registered():
    assert registered().keys() == CODECS.keys()


@every_codec
@every_head_dim
def test_encoded_planes_match_the_declared_shapes_and_bytes(name, head_dim):
    codec, vectors = codec_of(name, head_dim), vectors_of(2, HEADS, TOKENS, head_dim)

    planes, declared = codec.encode(vectors), codec.spec.planes(head_dim)

    assert len(planes) == len(declared)
    for plane, spec in zip(planes, declared, strict=True):
        assert plane.shape == (2, HEADS, 1 if spec.per_page else TOKENS, spec.width)
        assert plane.dtype == DTYPES[spec.dtype]
    stored_bytes = sum(plane.numel() * plane.itemsize for plane in planes)
    assert stored_bytes == codec.spec.vector_bytes(head_dim, TOKENS) * 2 * HEADS * TOKENS


@every_codec
@every_head_dim
def test_decoded_vectors_are_close_to_the_input(name, head_dim):
    codec, vectors = codec_of(name, head_dim), vectors_of(2, HEADS, TOKENS, head_dim)

    decoded = codec.decode(codec.encode(vectors))

    assert decoded.dtype == torch.float32
    assert decoded.shape == vectors.shape
    assert (decoded - vectors).norm() < MAX_ERROR[codec.spec.code_bits] * vectors.norm()


@pytest.mark.parametrize("better", ["int4_outliers", "int4_hadamard", "int4_page", "kvquant4"])
def test_outlier_codecs_reduce_the_error_of_a_large_channel(better):
    vectors, errors = vectors_of(2, HEADS, TOKENS, 64), {}
    for name in ("int4", better):
        codec = codec_of(name, 64)
        errors[name] = (codec.decode(codec.encode(vectors)) - vectors).norm()

    assert errors[better] < 0.7 * errors["int4"]


@every_codec
@every_head_dim
def test_encoding_of_a_vector_is_independent_of_other_vectors(name, head_dim):
    codec, vectors = codec_of(name, head_dim), vectors_of(4, HEADS, TOKENS, head_dim)
    tokens = slice(None) if codec.spec.per_page else slice(5, 6)

    together = codec.encode(vectors)
    single = codec.encode(vectors[2:3, :, tokens])

    for batched, alone in zip(together, single, strict=True):
        assert torch.equal(batched[2:3, :, tokens if batched.shape[2] > 1 else slice(None)], alone)


@every_codec
@every_head_dim
def test_decoding_of_a_vector_is_independent_of_other_vectors(name, head_dim):
    codec = codec_of(name, head_dim)
    planes = codec.encode(vectors_of(4, HEADS, TOKENS, head_dim))
    tokens = slice(None) if codec.spec.per_page else slice(5, 6)

    alone = codec.decode([plane[1:2, :, tokens].contiguous() for plane in planes])

    assert torch.equal(codec.decode(planes)[1:2, :, tokens], alone)


@every_codec
@pytest.mark.parametrize(
    "number", [0.0, -0.0, 1.0, -3.7, 1e-4, 1e-7, 6e-8, 1e-20, -1e-40, 1000.1, 60000.0, -65504.0]
)
def test_constant_vectors_are_decoded_within_tolerance(name, number):
    """No division by an empty range; float16 next to codes rounds to 2 ** -11 or 2 ** -24."""
    codec = codec_of(name, 64)
    calibrated_for_others = bool(codec.constants)

    decoded = codec.decode(codec.encode(torch.full((1, HEADS, TOKENS, 64), number)))

    assert decoded.isfinite().all()
    if not calibrated_for_others and "hadamard" not in name:
        relative = 1 / 16 if name == "fp8" else 2**-7  # bfloat16, or half a scale of int8
        assert (decoded - number).abs().max() <= max(relative * abs(number), 2**-24)


@every_codec
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_extreme_values_decode_to_finite_values(name, dtype):
    if CODECS[name].is_plain:
        pytest.skip("stores its input unchanged")
    codec, largest = codec_of(name, 64), torch.finfo(dtype).max
    vectors = vectors_of(1, HEADS, TOKENS, 64)
    vectors[0, 0, 3, 5], vectors[0, 1, 4, 6] = torch.inf, -torch.inf
    vectors[0, 2, 5] = largest
    vectors[0, 2, 6, ::2], vectors[0, 2, 6, 1::2] = largest, -largest
    vectors[0, 2, 7] = torch.finfo(dtype).smallest_normal / 4

    decoded = codec.decode(codec.encode(vectors.to(dtype)))

    assert decoded.isfinite().all()


@every_codec
def test_nan_is_confined_to_its_vector(name):
    codec, vectors = codec_of(name, 64), vectors_of(2, HEADS, TOKENS, 64)
    clean = codec.decode(codec.encode(vectors))
    vectors[1, 2, 7, 11] = torch.nan

    decoded = codec.decode(codec.encode(vectors))

    assert decoded[1, 2, 7].isnan().any()
    touched = torch.zeros_like(clean, dtype=torch.bool)
    touched[1, 2, slice(None) if codec.spec.per_page else 7] = True
    assert torch.equal(decoded[~touched], clean[~touched])


@every_codec
def test_empty_input_is_encoded(name):
    codec = codec_of(name, 64)
    if codec.spec.per_page:
        pytest.skip("a page has tokens")

    decoded = codec.decode(codec.encode(torch.empty(2, HEADS, 0, 64)))

    assert decoded.shape == (2, HEADS, 0, 64)


@every_codec
def test_half_precision_vectors_encode_like_float32(name):
    """The arithmetic is in float32 for every model dtype."""
    codec, vectors = codec_of(name, 64), vectors_of(1, HEADS, TOKENS, 64).bfloat16()

    for given, widened in zip(codec.encode(vectors), codec.encode(vectors.float()), strict=True):
        assert torch.equal(given, widened)


@pytest.mark.parametrize("name", [name for name, spec in CODECS.items() if spec.constants])
def test_uncalibrated_codec_names_the_missing_constant(name):
    with pytest.raises(ConfigError, match=r"needs the constant '\w+', measured for each layer"):
        make_codec(CODECS[name], 64).encode(vectors_of(HEADS, 2, 64))


def test_codec_without_a_spec_cannot_be_registered():
    with pytest.raises(ConfigError, match=r"'int5' is not in quire\.layout\.codec_names"):
        register("int5")(registered()["int8"])


def test_duplicate_codec_name_cannot_be_registered():
    class Other(Codec):
        pass

    with pytest.raises(ConfigError, match="two codecs are called 'int8'"):
        register("int8")(Other)


def test_fp8_reports_missing_torch_support(monkeypatch):
    cpu = torch.device("cpu")
    assert registered()["fp8"].why_not(cpu) is None

    monkeypatch.delattr(torch, "float8_e4m3fn")

    assert registered()["fp8"].why_not(cpu) == "this build of torch has no float8_e4m3fn"
