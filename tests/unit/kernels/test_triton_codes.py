"""Attention in Triton over coded pages equals attention over the decoded vectors."""

from dataclasses import replace

import pytest
import torch

from quire.codecs.registry import make_codec
from quire.kernels.backend import AttentionMath
from quire.kernels.coded import CodedPages, CodedPlanes
from quire.kernels.gathered import GatheredAttention
from quire.kernels.reference_backend import ReferenceAttention
from quire.kernels.triton.coding import KINDS, PLAIN, why_not
from quire.layout.codec_names import CODECS, codec_spec
from quire.layout.pages import VALUE
from quire.layout.statistics import QueryRing
from quire.policies.keydiff import KeyDiff
from quire.policies.knorm import KNorm
from quire.policies.windows import column_sums
from support.coded_lanes import coded_twin
from support.interpreted import CPU, interpreted, triton_backend
from support.lanes import Lanes, ScoredLanes

launch = interpreted("launch")

REFERENCE = ReferenceAttention()
DECODED = [name for name in KINDS if KINDS[name] != PLAIN and not CODECS[name].constants]
PAIRS = ["int8/int4:group=16", "float32/int2", "int4_hadamard/fp8", "int8/float32"]
SHAPES = {  # KV heads of a page, pages of a row, query heads of a KV head, dims of keys and values
    "MHA": (2, 1, 1, (64, 32)),
    "GQA 4, one-head pages": (1, 2, 4, (16, 16)),
    "GQA 8": (2, 1, 8, (80, 80)),
    "MQA": (1, 1, 8, (16, 64)),
}


def make_lanes(heads=1, count=1, head_dim=16, **change):
    return Lanes(
        **{
            "tokens": [1, 4],
            "slots": [[21] * count, [11] * count],
            "heads": heads,
            "head_dim": head_dim,
            "page_tokens": 8,
            "dtype": torch.float32,
        }
        | change
    )


def on_codes(lanes, pages, query, math, *, backend=None, with_sums=True):
    """Output, and column sums, over pages of codes; new keys and values are not read."""
    coded = object.__new__(Lanes)
    coded.__dict__ |= lanes.__dict__ | {"pages": pages}
    empty = torch.full((len(query), 0, 0), torch.nan)
    coded.fresh = lambda: (empty, empty)
    attend = coded.attend_with_sums if with_sums else coded.attend
    return attend(backend or triton_backend(), query, math)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("codec", [*DECODED, *PAIRS])
def test_codes_equal_decoded_vectors(codec, shape, monkeypatch):
    monkeypatch.setattr(launch, "TILE_BYTES", 1)
    heads, count, group, (head_dim, value_dim) = SHAPES[shape]
    window = None if group == 1 else 15
    lanes = make_lanes(heads, count, head_dim, value_dim=value_dim, window=window)
    query = lanes.query(group)
    pages = coded_twin(lanes, codec)
    sinks = torch.linspace(-2, 2, query.shape[1])
    math = AttentionMath(scale=head_dim**-0.5, softcap=2.0, sinks=sinks)
    expected, expected_sums = lanes.attend_with_sums(REFERENCE, query, math)
    if group == 8:  # the sums of a chunk take most of the time
        got, sums = on_codes(lanes, pages, query, math, with_sums=False), expected_sums
    else:
        got, sums = on_codes(lanes, pages, query, math)

    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(sums, expected_sums, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("codec", ["int8", "float32/int8", "int4/fp8", "int4_outliers"])
def test_codes_of_latents_equal_decoded_latents(codec):
    lanes = make_lanes(tokens=[1, 1], slots=[[21], [11]], head_dim=16, value_dim=32)
    query, math = lanes.query(20, joined=True), AttentionMath(48**-0.5, joined=True)
    pages = coded_twin(lanes, codec)

    got = on_codes(lanes, pages, query, math, with_sums=False)

    torch.testing.assert_close(got, lanes.attend(REFERENCE, query, math), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("codec", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_queries_of_half_precision(codec, dtype):
    """With float16 the scales of values are not multiplied with weights, which could underflow."""
    lanes = make_lanes(head_dim=64)
    query = lanes.query(4).to(dtype)
    pages = coded_twin(lanes, codec)
    math = AttentionMath(scale=0.125)
    expected, _ = lanes.attend_with_sums(REFERENCE, query.float(), math)
    got, _ = on_codes(lanes, pages, query, math)

    assert got.dtype == dtype
    atol = 2 ** (-7 if dtype is torch.bfloat16 else -10) * float(expected.abs().max())
    torch.testing.assert_close(got.float(), expected, atol=atol, rtol=0)


@pytest.mark.parametrize("codec", ["int8_channel", "int8:equalise=1", "int4:equalise=1"])
@pytest.mark.parametrize("count", [1, 2])
def test_constants_of_channels_are_applied_to_queries_and_outputs(codec, count):
    lanes, codecs, planes = make_lanes(2 // count, count, head_dim=16, value_dim=32), [], []
    for vectors in (lanes.pages.key, lanes.pages.value):
        dim = vectors.shape[3]
        spread = torch.linspace(0.1, 3, dim) * torch.tensor([1.0, 4.0])[:, None, None]
        own = make_codec(codec_spec(codec), dim).calibrated(torch.randn(2, 50, dim) * spread)
        codecs.append(own)
        by_lane = vectors.nan_to_num(0.0)
        # page p holds the heads of one lane; encode it with each lane's constants
        lane_of = torch.zeros(len(vectors), dtype=torch.long)
        for lane in range(count):
            lane_of[lanes.table[:, lane].clamp_min(0).flatten().long()] = lane
        heads = lane_of[:, None] * (2 // count) + torch.arange(2 // count)
        planes.append(_strided(own.of_heads(heads).encode(by_lane)))
    coded = CodedPages(*map(CodedPlanes, codecs, planes))
    pages = replace(lanes.pages, key=planes[0][0], value=planes[1][0], coded=coded)
    query, math = lanes.query(2), AttentionMath(scale=0.25)
    expected, expected_sums = on_codes(lanes, pages, query, math, backend=REFERENCE)
    got, sums = on_codes(lanes, pages, query, math)

    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(sums, expected_sums, atol=2e-5, rtol=1e-4)


def _strided(planes):
    """The planes in pages of equal byte strides."""
    stride = 1024
    placed = []
    for plane in planes:
        pages = torch.zeros(len(plane), stride, dtype=torch.uint8)
        part = pages[:, : plane[0].nbytes].view(plane.dtype).view(plane.shape)
        placed.append(part.copy_(plane))
    return tuple(placed)


def test_other_codecs_fall_back_to_gathered_pages(caplog):
    """Codes with measured codebooks, or of whole pages."""
    lanes = make_lanes(page_tokens=8, slots=[[16], [8]], tokens=[1, 4])
    codec = make_codec(codec_spec("int4_page"), 16)
    sides = [codec.encode(x.nan_to_num(0.0)) for x in (lanes.pages.key, lanes.pages.value)]
    coded = CodedPages(*(CodedPlanes(codec, side) for side in sides))
    pages = replace(lanes.pages, key=sides[0][0], value=sides[1][0], coded=coded)
    query, math = lanes.query(2), AttentionMath(scale=0.25)
    expected, sums = on_codes(lanes, pages, query, math, backend=REFERENCE)
    backend = triton_backend(GatheredAttention(CPU))
    got, got_sums = on_codes(lanes, pages, query, math, backend=backend)

    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got_sums, sums, atol=1e-5, rtol=1e-4)
    assert "they do not decode int4_page" in caplog.text


def test_reasons_why_a_codec_is_not_decoded():
    assert why_not(codec_spec("int8"), 64) is None
    assert why_not(codec_spec("int8:equalise=1"), 64) is None
    assert why_not(codec_spec("int4_hadamard"), 64) is None
    assert why_not(codec_spec("kvquant4"), 64) == "they do not decode kvquant4"
    many = codec_spec("int4_outliers:percent=50")
    assert why_not(many, 64) == f"they read at most 16 outliers of a vector, {many.name} has more"


def test_every_codec_that_is_decoded_is_tested():
    """Measured codecs have tests of their own."""
    assert {*DECODED, "int8_channel"} == {n for n, kind in KINDS.items() if kind != PLAIN}


@pytest.mark.parametrize(
    ("codec", "shape", "window", "group"),
    [
        ("float32", (2, 16, 4), 3, 3),
        ("bfloat16", (1, 64, 16), 32, 1),
        ("float16", (3, 80, 5), 40, 2),
        ("int8", (1, (32, 64), 8), 5, 2),
        ("fp8", (1, 32, 8), 5, 2),
        ("int4", (2, 32, 8), 5, 2),
        ("int4_outliers", (1, 64, 8), 5, 1),
    ],
)
def test_scores_of_cached_tokens_equal_those_of_their_keys(codec, shape, window, group):
    heads, dims, page_tokens = shape
    head_dim, value_dim = dims if isinstance(dims, tuple) else (dims, dims)
    plain = codec in ("float32", "bfloat16", "float16")
    sizes = {"value_dim": value_dim, "page_tokens": page_tokens}
    dtype = getattr(torch, codec) if plain else torch.float32
    lanes = make_lanes(heads, 2, head_dim, tokens=[1, 1], dtype=dtype, **sizes)
    pages = None if plain else coded_twin(lanes, codec)
    cached = ScoredLanes(lanes, QueryRing(window), group, pages)
    expected, view = cached.view(), cached.view(triton_backend())
    sums = column_sums(view, cached.ring)

    torch.testing.assert_close(sums, column_sums(expected, cached.ring), atol=2e-5, rtol=2e-5)
    for rule in (KeyDiff(), KNorm()):
        torch.testing.assert_close(rule.score(view), rule.score(expected), atol=2e-6, rtol=2e-5)
    norms = view.in_pages(VALUE).norms()
    torch.testing.assert_close(norms, cached.values().norm(dim=2), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("codec", ["int4_hadamard", "int8_channel"])
def test_keys_that_kernels_do_not_decode_are_not_scored(codec):
    side = CodedPlanes(make_codec(codec_spec(codec), 16), (torch.zeros(1, 1, 1, 16),))

    assert not triton_backend().can_score(side.planes[0], side)
