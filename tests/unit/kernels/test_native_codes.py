"""Attention in C over quantized pages equals attention over the decoded vectors."""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from quire.kernels.backend import Alibi, AttentionMath
from quire.kernels.gathered import GatheredAttention
from quire.kernels.native.arguments import why_not
from quire.kernels.native.backend import NativeAttention
from quire.kernels.native.library import PATHS, NativeLibrary, load_library
from quire.kernels.reference_backend import ReferenceAttention
from quire.layout.codec_names import codec_pair, codec_spec
from support.coded_lanes import coded_twin
from support.lanes import Lanes
from support.pairwise import every_pair

CPU = torch.device("cpu")
LIBRARY = load_library()
SUPPORTED_PATHS = range(LIBRARY.path + 1) if isinstance(LIBRARY, NativeLibrary) else ()
CODECS = (
    "int8",
    "int4:group=8",
    "int4:group=32/int8",
    "int8/int4:group=16",
    "int4_outliers:percent=3",
    "int2/int4_outliers:group=32",
    "fp8",
    "float32/int4",
    "int8/float32",
)


def fits(codec, dims):
    pairs = list(zip(codec_pair(codec), dims, strict=True))
    if any(dim % (spec.group or 1) or dim % 4 for spec, dim in pairs):
        return False
    return all(why_not(spec, dim) is None for spec, dim in pairs)


UNEQUAL = [(48, 32), (192, 128), (32, 64), (64, 192), (128, 256), (128, 8), (8, 64)]
EQUAL = [(dim, dim) for dim in (8, 20, 32, 64, 80, 96, 128, 256, 512)]
DIMS = {codec: [dims for dims in EQUAL + UNEQUAL if fits(codec, dims)] for codec in CODECS}
"""Elements of keys and values that a codec can store."""

pytestmark = pytest.mark.skipif(not SUPPORTED_PATHS, reason="the C extension is not built")


class Refusing(GatheredAttention):
    """Fails if attention falls back to torch."""

    def __init__(self):
        super().__init__(CPU)

    def attend(self, plan, pages, math, query, fresh, *, column_sums=None):
        raise AssertionError("fell back to torch")


def native(path, gathered=None):
    return NativeAttention(replace(LIBRARY, path=path), gathered or GatheredAttention(CPU))


def on_codes(backend, lanes, pages, query, math):
    """Output and column sums over pages of codes."""
    coded = object.__new__(Lanes)
    coded.__dict__ |= lanes.__dict__ | {"pages": pages}
    empty = torch.full((len(query), 0, 0), torch.nan)
    coded.fresh = lambda: (empty, empty)
    return coded.attend_with_sums(backend, query, math)


@st.composite
def cases(draw):
    """Lanes, and codecs that can store their vectors."""
    tokens = [1] * draw(st.sampled_from([0, 1, 3])) + draw(
        st.lists(st.sampled_from([2, 5, 17, 40]), max_size=1)
    ) or [1]
    window = draw(st.sampled_from([None, None, 9, 70]))
    before = st.one_of(st.integers(0, 90), st.integers(120, 260))
    count = draw(st.sampled_from([1, 2]))
    slots = [[draw(before) + new for _ in range(count)] for new in tokens]
    codec = draw(st.sampled_from(CODECS))
    head_dim, value_dim = draw(st.sampled_from(DIMS[codec]))
    lanes = Lanes(
        tokens=tokens,
        slots=slots if window is None else [row[:1] * count for row in slots],
        heads=draw(st.sampled_from([1, 2, 4])),
        head_dim=head_dim,
        value_dim=value_dim,
        page_tokens=draw(st.sampled_from([1, 3, 16, 20, 32])),
        dtype=torch.float32,
        window=window,
        seed=draw(st.integers(0, 1000)),
    )
    return lanes, codec


@pytest.mark.parametrize("path", SUPPORTED_PATHS, ids=[PATHS[path] for path in SUPPORTED_PATHS])
@given(
    case=cases(),
    group=st.sampled_from([1, 2, 3, 4, 7, 9]),
    softcap=st.sampled_from([None, 2.0]),
    with_sinks=st.booleans(),
    rounded=st.sampled_from([None, False, True]),
    joined=st.booleans(),
)
def test_attention_over_codes_equals_attention_over_decoded_vectors(
    path, case, group, softcap, with_sinks, rounded, joined
):
    lanes, codec = case
    query = lanes.query(group, joined=joined)
    pages = coded_twin(lanes, codec)
    sinks = torch.linspace(-2, 2, query.shape[1]) if with_sinks else None
    slopes = torch.linspace(0.02, 0.7, query.shape[1])
    alibi = None if rounded is None else Alibi(slopes, 0.7, rounded)
    math = AttentionMath(query.shape[2] ** -0.5, softcap, sinks, alibi=alibi, joined=joined)
    expected, expected_sums = lanes.attend_with_sums(ReferenceAttention(), query, math)
    got, sums = on_codes(native(path), lanes, pages, query, math)

    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(sums, expected_sums, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("tokens", [[1, 1, 1], [40]])
@pytest.mark.parametrize("value_dim", [32, 64])
def test_c_attention_over_codes_does_not_fall_back_to_torch(codec, tokens, value_dim):
    if LIBRARY.path == 0 and tokens != [1, 1, 1]:
        pytest.skip("chunks are left to torch without vector instructions")
    lanes = Lanes(
        tokens=tokens,
        slots=[[70]] * len(tokens),
        heads=2,
        head_dim=64,
        value_dim=value_dim,
        page_tokens=16,
        dtype=torch.float32,
    )
    query, math = lanes.query(4), AttentionMath(scale=0.125)
    pages = coded_twin(lanes, codec)
    expected, _ = lanes.attend_with_sums(ReferenceAttention(), query, math)
    got, _ = on_codes(native(LIBRARY.path, Refusing()), lanes, pages, query, math)

    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@every_pair(
    codec=["int8", "int4", "int8/bfloat16"],
    tokens=[[1, 1], [40, 33]],
    dims=[(128, 128), (192, 128), (48, 64)],
)
def test_attention_over_codes_with_half_precision_queries(codec, tokens, dims):
    lanes = Lanes(
        tokens=tokens,
        slots=[[300], [77]],
        heads=2,
        head_dim=dims[0],
        value_dim=dims[1],
        page_tokens=16,
        dtype=torch.float32,
    )
    query, math = lanes.query(4).bfloat16(), AttentionMath(scale=dims[0] ** -0.5)
    pages = coded_twin(lanes, codec)
    expected, expected_sums = lanes.attend_with_sums(ReferenceAttention(), query.float(), math)
    got, sums = on_codes(native(LIBRARY.path, Refusing()), lanes, pages, query, math)

    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), expected, atol=1e-4, rtol=2**-8)
    torch.testing.assert_close(sums, expected_sums, atol=1e-5, rtol=1e-3)


@every_pair(
    path=[path for path in SUPPORTED_PATHS if path],
    codec=["bfloat16/int8", "int8", "bfloat16/int4", "int4/fp8"],
    tokens=[[1, 1], [5, 33]],
    dims=[(64, 512), (32, 96), (8, 24)],
    group=[4, 20, 64],
)
def test_half_precision_queries_attend_to_latents_in_codes(path, codec, tokens, dims, group):
    """Codes of int8 are rounded to bfloat16 if the CPU has products of it."""
    lanes = Lanes(
        tokens=tokens,
        slots=[[2300], [77]],
        heads=1,
        head_dim=dims[0],
        value_dim=dims[1],
        page_tokens=16,
        dtype=torch.float32,
    )
    query = lanes.query(group, joined=True).bfloat16()
    pages, math = coded_twin(lanes, codec), AttentionMath(sum(dims) ** -0.5, joined=True)
    expected, expected_sums = lanes.attend_with_sums(ReferenceAttention(), query.float(), math)
    got, sums = on_codes(native(path, Refusing()), lanes, pages, query, math)

    atol = 2e-2 * float(expected.abs().max())
    torch.testing.assert_close(got.float(), expected, atol=atol, rtol=2**-8)
    torch.testing.assert_close(sums, expected_sums, atol=2e-3, rtol=2e-2)


@pytest.mark.parametrize("path", SUPPORTED_PATHS, ids=[PATHS[path] for path in SUPPORTED_PATHS])
@given(
    case=cases(),
    group=st.sampled_from([1, 2, 3, 4, 7, 9]),
    softcap=st.sampled_from([None, 2.0]),
    sharpness=st.sampled_from([0.01, 1.0, 8.0]),
)
def test_decoding_over_codes_with_half_precision_queries(path, case, group, softcap, sharpness):
    """Products may be computed in integers: column sums are exact, outputs are rounded."""
    lanes, codec = case
    assume(lanes.tokens.max() == 1)
    query = (lanes.query(group) * sharpness).bfloat16()
    pages = coded_twin(lanes, codec)
    math = AttentionMath(scale=query.shape[2] ** -0.5, softcap=softcap)
    expected, expected_sums = lanes.attend_with_sums(ReferenceAttention(), query.float(), math)
    got, sums = on_codes(native(path), lanes, pages, query, math)

    # an output near 0 whose terms cancel has the rounding error of its terms
    torch.testing.assert_close(got.float(), expected, atol=4e-4, rtol=2**-8)
    # queries are rounded to 16-bit integers: the error of a logit grows with the queries
    rtol = 1e-4 * max(1.0, sharpness)
    torch.testing.assert_close(sums, expected_sums, atol=2e-5, rtol=rtol)


@every_pair(
    path=SUPPORTED_PATHS,
    dims=[(64, 64), (128, 128), (192, 128), (192, 192), (256, 256), (64, 192), (128, 8), (8, 64)],
    codec=[
        "int8",
        "int4",
        "int2",
        "int8/int2",
        "int4:group=128",
        "int2:group=128/int8",
        "fp8/int4",
    ],
)
def test_decoding_over_codes_whose_scales_cover_whole_blocks(path, codec, dims):
    """Products of bytes read blocks of 64 channels of four or sixteen slots."""
    if not fits(codec, dims):
        pytest.skip(f"{codec} has no scales for keys and values of {dims}")
    for group, page_tokens, heads in (
        (1, 16, 4),
        (2, 1, 1),
        (3, 16, 4),
        (4, 32, 2),
        (7, 5, 1),
        (8, 16, 8),
    ):
        lanes = Lanes(
            tokens=[1, 1],
            slots=[[203], [64]],
            heads=heads,
            head_dim=dims[0],
            value_dim=dims[1],
            page_tokens=page_tokens,
            dtype=torch.float32,
            seed=group,
        )
        query, pages = lanes.query(group).bfloat16(), coded_twin(lanes, codec)
        math = AttentionMath(scale=dims[0] ** -0.5)
        expected, expected_sums = lanes.attend_with_sums(ReferenceAttention(), query.float(), math)
        got, sums = on_codes(native(path), lanes, pages, query, math)

        torch.testing.assert_close(got.float(), expected, atol=4e-4, rtol=2**-8)
        torch.testing.assert_close(sums, expected_sums, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("path", SUPPORTED_PATHS, ids=[PATHS[path] for path in SUPPORTED_PATHS])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_non_finite_query_gives_a_non_finite_output_in_its_head_only(path, value):
    lanes = Lanes(
        tokens=[1], slots=[[70]], heads=1, head_dim=64, page_tokens=16, dtype=torch.float32
    )
    query = lanes.query(2).bfloat16()
    query[0, 1, 5] = value
    pages = coded_twin(lanes, "int8")
    got, _ = on_codes(native(path), lanes, pages, query, AttentionMath(scale=0.125))

    assert got[0, 0].isfinite().all()
    assert not got[0, 1].isfinite().any()


@pytest.mark.parametrize("codec", ["int8", "int4", "int4_outliers"])
def test_output_of_a_row_is_batch_invariant(codec):
    """Its output is bitwise independent of the other rows and of the number of threads."""
    shape = {"heads": 4, "head_dim": 64, "page_tokens": 16, "dtype": torch.float32}
    slots, tokens = [[9000], [1200], [700]], [1, 1, 60]
    lanes, math = Lanes(tokens=tokens, slots=slots, **shape), AttentionMath(scale=0.125)
    query = lanes.query(2)
    pages = coded_twin(lanes, codec)
    backend = native(LIBRARY.path)
    together, _ = on_codes(backend, lanes, pages, query, math)
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert torch.equal(on_codes(backend, lanes, pages, query, math)[0], together)
    finally:
        torch.set_num_threads(threads)
    for row, first in enumerate([0, 1, 2]):
        alone = Lanes(tokens=tokens[row : row + 1], slots=slots[row : row + 1], **shape)
        alone.table = lanes.table[row : row + 1]
        part = slice(first, first + tokens[row])
        row_pages = replace(pages, rows=torch.tensor([row]))
        assert torch.equal(
            on_codes(backend, alone, row_pages, query[part], math)[0], together[part]
        )


def test_codecs_with_calibrated_constants_fall_back_to_torch():
    calibrated = replace(codec_spec("int4"), constants=("equal",))

    assert "does not read int4" in str(why_not(calibrated, 128))


@pytest.mark.parametrize(
    ("codec", "head_dim", "reason"),
    [
        ("int3", 64, "does not read int3"),
        ("int8_channel", 64, "does not read int8_channel"),
        ("int4:group=8", 256, "it reads at most 16 groups of a vector"),
        ("int4_outliers:percent=10", 128, "at most 8 outliers"),
        ("int4", 128, None),
        ("bfloat16", 128, None),
    ],
)
def test_why_not_gives_the_reason_for_unsupported_codecs(codec, head_dim, reason):
    found = why_not(codec_spec(codec), head_dim)

    assert found is None if reason is None else reason in found
