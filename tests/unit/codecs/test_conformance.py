"""Every codec: shapes, bytes, finite outputs, independent vectors, packing, bounds of errors."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from quire.codecs.affine import LARGEST, half_above, half_below, pack, unpack
from quire.codecs.base import DTYPES, Codec
from quire.codecs.hadamard import rotate
from quire.codecs.outliers import largest
from quire.codecs.registry import make_codec, register, registered
from quire.errors import ConfigError
from quire.layout.codec_names import CODECS, codec_spec

HEADS, TOKENS = 3, 32
HEAD_DIMS = (8, 64, 80, 128)

MAX_ERROR = {2: 0.8, 3: 0.3, 4: 0.15, 8: 0.03, 16: 0.002, 32: 0.0001}
"""Largest relative error (norm) of a vector, by the bits of a code."""

every_codec = pytest.mark.parametrize("name", sorted(CODECS))
every_head_dim = pytest.mark.parametrize("head_dim", HEAD_DIMS)


def vectors_of(*shape, seed=0):
    """Random vectors with one channel that is large in all of them, as in keys."""
    vectors = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    vectors[..., shape[-1] // 3] *= 8
    return vectors


def codec_of(name, head_dim):
    codec = make_codec(codec_spec(name), head_dim)
    return codec.calibrated(vectors_of(HEADS, 200, head_dim, seed=9))


def test_codecs_are_registered_by_name_with_a_spec():
    assert registered().keys() == CODECS.keys()
    with pytest.raises(ConfigError, match=r"'int5' is not in quire\.layout\.codec_names"):
        register("int5")(registered()["int8"])
    with pytest.raises(ConfigError, match="two codecs are called 'int8'"):
        register("int8")(type("Other", (Codec,), {}))


@every_codec
@every_head_dim
def test_encoded_planes_have_the_declared_shapes_and_are_decoded_close_to_the_input(name, head_dim):
    codec, vectors = codec_of(name, head_dim), vectors_of(2, HEADS, TOKENS, head_dim)

    planes, declared = codec.encode(vectors), codec.spec.planes(head_dim)

    assert len(planes) == len(declared)
    for plane, spec in zip(planes, declared, strict=True):
        assert plane.shape == (2, HEADS, 1 if spec.per_page else TOKENS, spec.width)
        assert plane.dtype == DTYPES[spec.dtype]
    stored_bytes = sum(plane.numel() * plane.itemsize for plane in planes)
    assert stored_bytes == codec.spec.vector_bytes(head_dim, TOKENS) * 2 * HEADS * TOKENS
    decoded = codec.decode(planes)
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
def test_a_vector_is_encoded_and_decoded_independently_of_others(name, head_dim):
    codec, vectors = codec_of(name, head_dim), vectors_of(4, HEADS, TOKENS, head_dim)
    tokens = slice(None) if codec.spec.per_page else slice(5, 6)

    together = codec.encode(vectors)
    single = codec.encode(vectors[2:3, :, tokens])

    for batched, alone in zip(together, single, strict=True):
        assert torch.equal(batched[2:3, :, tokens if batched.shape[2] > 1 else slice(None)], alone)
    decoded = codec.decode([plane[1:2, :, tokens].contiguous() for plane in together])
    assert torch.equal(codec.decode(together)[1:2, :, tokens], decoded)
    # the arithmetic is in float32 for every model dtype
    half = vectors[:1].bfloat16()
    assert all(map(torch.equal, codec.encode(half), codec.encode(half.float())))
    if not codec.spec.per_page:  # a page has tokens
        empty = codec.decode(codec.encode(vectors[:, :, :0]))
        assert empty.shape == (4, HEADS, 0, head_dim)


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


@pytest.mark.parametrize("name", [name for name, spec in CODECS.items() if spec.constants])
def test_uncalibrated_codec_names_the_missing_constant(name):
    with pytest.raises(ConfigError, match=r"needs the constant '\w+', measured for each layer"):
        make_codec(CODECS[name], 64).encode(vectors_of(HEADS, 2, 64))


def test_fp8_reports_missing_torch_support(monkeypatch):
    cpu = torch.device("cpu")
    assert registered()["fp8"].why_not(cpu) is None

    monkeypatch.delattr(torch, "float8_e4m3fn")

    assert registered()["fp8"].why_not(cpu) == "this build of torch has no float8_e4m3fn"


KEY_HEADS, KEY_TOKENS, KEY_DIM = 2, 64, 32


def keys(seed):
    """Two channels that are large in all tokens, and one that is always zero."""
    keys_ = torch.randn(
        KEY_HEADS, KEY_TOKENS, KEY_DIM, generator=torch.Generator().manual_seed(seed)
    )
    keys_[..., 3] *= 20
    keys_[..., 17] *= 10
    keys_[..., 5] = 0
    return keys_


@pytest.mark.parametrize(
    "name", ["int8", "int4", "int3", "int4_outliers:percent=3", "int4_hadamard"]
)
def test_equalised_codec_divides_before_and_multiplies_after_the_inner_codec(name):
    plain, both = (codec_spec(f"{name}{more}") for more in ("", _with(name)))
    codec = make_codec(both, KEY_DIM).calibrated(keys(0))
    inner, scale, vectors = make_codec(plain, KEY_DIM), codec.constant("equal"), keys(1)

    planes = codec.encode(vectors)

    for actual, expected in zip(planes, inner.encode(vectors / scale), strict=True):
        assert torch.equal(actual, expected)
    assert torch.equal(codec.decode(planes), inner.decode(planes) * scale)
    assert both.vector_bytes(KEY_DIM, 16) == plain.vector_bytes(KEY_DIM, 16)


def _with(name):
    return ",equalise=1" if ":" in name else ":equalise=1"


def test_equalising_scales_are_square_roots_with_geometric_mean_one():
    codec = make_codec(codec_spec("int4:equalise=1"), KEY_DIM).calibrated(keys(0))
    scale, largest = codec.constant("equal"), keys(0).abs().amax(dim=1)

    assert scale.shape == (KEY_HEADS, 1, KEY_DIM)
    torch.testing.assert_close(
        scale.log().mean(dim=-1), torch.zeros(KEY_HEADS, 1), atol=1e-5, rtol=0
    )
    ratio = (scale[:, 0, 3] / scale[:, 0, 0]) ** 2
    torch.testing.assert_close(ratio, largest[:, 3] / largest[:, 0])


@pytest.mark.parametrize("name", ["int4", "int3", "int8"])
def test_equalising_reduces_the_error_of_query_key_products(name):
    """Query-key products: random queries, keys with large channels."""
    vectors, draw = keys(1), torch.Generator().manual_seed(2)
    query = torch.randn(KEY_HEADS, 40, KEY_DIM, generator=draw)
    errors = {}
    for text in (name, f"{name}:equalise=1"):
        codec = make_codec(codec_spec(text), KEY_DIM).calibrated(keys(0))
        decoded = codec.decode(codec.encode(vectors))
        errors[text] = float((query @ (decoded - vectors).transpose(1, 2)).norm())
    assert errors[f"{name}:equalise=1"] < 0.8 * errors[name]


def test_each_head_has_its_own_scales():
    keys_ = keys(0)
    keys_[1] *= torch.linspace(1, 9, KEY_DIM)
    codec = make_codec(codec_spec("int4:equalise=1"), KEY_DIM).calibrated(keys_)
    heads = torch.tensor([[1], [0], [1]])  # three lanes of one head

    of_lanes = codec.of_heads(heads)
    swapped = keys_[[1, 0, 1]][:, None]  # [lane, head, token, head_dim]

    decoded = of_lanes.decode(of_lanes.encode(swapped))
    assert torch.equal(decoded[:, 0], codec.decode(codec.encode(keys_))[[1, 0, 1]])


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
        (3, [1, 2, 3, 4, 5, 6, 7, 0], [1 | 3 << 2 | 1 << 4 | 3 << 6, 2 | 2 << 4, 0b01111000]),
    ],
)
def test_packed_bytes_have_the_documented_layout(bits, codes, packed):
    assert pack(torch.tensor(codes, dtype=torch.uint8), bits).tolist() == packed


WIDTH, ROWS = 16, 8
ROUNDING = 2**-21  # float32 rounding, relative to the largest element
UNDERFLOW = torch.finfo(torch.float32).smallest_normal

_sizes = st.sampled_from((1e-9, 1e-6, 1e-3, 1.0, 300.0, LARGEST))


@st.composite
def vectors(draw):
    """[head, token, head_dim] around an offset; the range may be small relative to the offset."""
    spread, offset = draw(_sizes), draw(_sizes) * draw(st.sampled_from((-1, 0, 1)))
    numbers = draw(arrays(np.float32, (2, ROWS, WIDTH), elements=st.floats(-1, 1, width=32)))
    found = torch.from_numpy(numbers * np.float32(spread) + np.float32(offset))
    return found.clamp(-LARGEST, LARGEST)


def slack(numbers, dim=-1):
    """Error bound of the float32 arithmetic."""
    return numbers.abs().amax(dim=dim, keepdim=True) * ROUNDING + UNDERFLOW


def by_channel(scales):
    return scales.float().repeat_interleave(WIDTH // scales.shape[-1], dim=-1)


AFFINE = ("int4", "int4:group=4", "int3", "int3:group=8", "int2", "int2:group=16")


@pytest.mark.parametrize("name", [*AFFINE, "int4_page", "int2_page"])
@given(numbers=vectors())
def test_error_is_at_max_half_a_scale_of_the_group_or_of_the_channel_of_a_page(name, numbers):
    codec = make_codec(codec_spec(name), WIDTH)
    planes, per_page = codec.encode(numbers), codec.spec.per_page

    error = (codec.decode(planes) - numbers).abs()
    scales = planes[1].float() if per_page else by_channel(planes[1])
    assert (error <= scales / 2 + slack(numbers, dim=-2 if per_page else -1)).all()


@given(numbers=vectors())
def test_errors_are_at_max_half_a_scale_or_four_significant_bits(numbers):
    codec = make_codec(codec_spec("int8"), WIDTH)

    codes, scales = codec.encode(numbers)

    error = (codec.decode((codes, scales)) - numbers).abs()
    assert (error <= scales.float() / 2 + slack(numbers)).all()
    largest_possible = numbers.abs().amax(dim=-1, keepdim=True) / 127
    assert (scales.float() <= largest_possible * (1 + 2**-10) + 2**-24).all()

    codec = make_codec(codec_spec("fp8"), WIDTH)

    planes = codec.encode(numbers)

    error = (codec.decode(planes) - numbers).abs()
    bound = torch.maximum(numbers.abs() / 16, planes[1].float() / 1024)
    assert (error <= bound + slack(numbers)).all()

    codec = make_codec(codec_spec("int8_channel"), WIDTH).calibrated(numbers)

    decoded = codec.decode(codec.encode(numbers))

    bound = codec.constant("scale") / 2 + numbers.abs() * ROUNDING + UNDERFLOW
    assert ((decoded - numbers).abs() <= bound).all()


@given(numbers=vectors(), percent=st.sampled_from((1, 10, 50)))
def test_outliers_are_float16_and_excluded_from_the_scales(numbers, percent):
    codec = make_codec(codec_spec(f"int4_outliers:group=8,percent={percent}"), WIDTH)

    planes = codec.encode(numbers)

    _, scales, _, index, _ = planes
    outliers = torch.zeros(numbers.shape, dtype=torch.bool).scatter(-1, index.long(), value=True)
    error = (codec.decode(planes) - numbers).abs()
    assert (error[outliers] <= numbers.abs()[outliers] * 2**-11 + 2**-25).all()
    assert (error <= by_channel(scales) / 2 + slack(numbers))[~outliers].all()
    assert_largest_are_outliers(numbers, outliers)
    assert_scales_exclude_outliers(numbers, outliers, scales)


def assert_largest_are_outliers(numbers, outliers):
    sizes = numbers.abs()
    smallest_outlier = sizes.masked_fill(~outliers, torch.inf).amin(dim=-1)
    largest_other = sizes.masked_fill(outliers, -torch.inf).amax(dim=-1)
    assert (smallest_outlier >= largest_other).all()


def assert_scales_exclude_outliers(numbers, outliers, scales):
    groups, excluded = (x.unflatten(-1, (-1, 8)) for x in (numbers, outliers))
    low = groups.masked_fill(excluded, torch.inf).amin(dim=-1)
    high = groups.masked_fill(excluded, -torch.inf).amax(dim=-1)
    value_range = torch.where(excluded.all(dim=-1), 0.0, high - low + low.abs() * 2**-10 + 2**-24)
    assert (scales.float() <= value_range / 15 * (1 + 2**-10) + 2**-24).all()


@pytest.mark.parametrize("name", ["int4_hadamard", "int3_hadamard:group=8"])
@given(numbers=vectors())
def test_hadamard_codec_preserves_the_norm_and_bounds_the_error(name, numbers):
    numbers = numbers / 4  # a rotated vector of the largest numbers would be beyond float16
    codec = make_codec(codec_spec(name), WIDTH)
    planes = codec.encode(numbers)

    decoded, length = codec.decode(planes), numbers.norm(dim=-1)
    # float16 scales and zeros
    half = 2**-10 * (length + decoded.norm(dim=-1)) + 2**-24 * 16 * WIDTH
    found = (decoded - numbers).norm(dim=-1)
    assert ((decoded.norm(dim=-1) - length).abs() <= WIDTH * half)[length > 1e-3].all()
    scale = planes[1].float().amax(dim=-1)
    assert (found <= 2 * WIDTH**0.5 / 2 * 2 * scale + WIDTH * half).all()


def test_rotation_is_an_involution_with_the_largest_block_of_two():
    for head_dim in (8, 80, 96, 128):
        vectors_ = torch.randn(5, head_dim, generator=torch.Generator().manual_seed(head_dim))

        rotated = rotate(vectors_)

        assert torch.allclose(rotated.norm(dim=-1), vectors_.norm(dim=-1), atol=1e-5)
        assert torch.allclose(rotate(rotated), vectors_, atol=1e-5)
    # head_dim 80 is 5 blocks of 16; the first row of Sylvester's matrix is all ones
    single = torch.zeros(80)
    single[16] = 4.0
    assert torch.equal(rotate(single), torch.tensor([0.0] * 16 + [1.0] * 16 + [0.0] * 48))


def test_codes_round_half_to_even_saturate_and_are_0_in_a_constant_group():
    codec = make_codec(codec_spec("int8_channel"), 1).calibrated(torch.tensor([[[2.0]]]))

    decoded = codec.decode(codec.encode(torch.tensor([[[1.0], [5.0], [-9.0]]])))

    assert torch.allclose(decoded, torch.tensor([[[1.0], [2.0], [-2.0]]]), atol=2 / 127 / 2)
    # min 0, max 30: scale 2; 1 / 2 and 5 / 2 are ties and round to the even code
    codec, (packed, scales, zeros) = int4_of([0.0, 1.0, 5.0, 30.0])
    assert (scales.item(), zeros.item()) == (2.0, 0.0)
    assert unpack(packed, 4).tolist() == [[0, 0, 2, 15]]
    assert codec.decode((packed, scales, zeros)).tolist() == [[0.0, 0.0, 4.0, 30.0]]

    codec, (packed, scales, zeros) = int4_of([0.5] * 4)
    assert (scales.item(), zeros.item(), packed.any().item()) == (0.0, 0.5, False)
    assert codec.decode((packed, scales, zeros)).tolist() == [[0.5] * 4]

    # 1000.1 is between 1000 and 1000.5; to the nearest the zero could exceed an element
    _, (_, scales, zeros) = int4_of([1000.4, 1000.45])
    assert zeros.item() == 1000.0
    assert 0.45 / 15 <= scales.item() <= 0.45 / 15 * (1 + 2**-10)


@pytest.mark.parametrize("name", ["kvquant4", "kvquant3:percent=10"])
@given(numbers=vectors())
def test_nearest_codebook_entry_is_used(name, numbers):
    codec = make_codec(codec_spec(name), WIDTH).calibrated(numbers)

    packed, index, values = codec.encode(numbers)

    low, high, book = (codec.constant(n) for n in ("low", "high", "codebook"))
    half = (high - low) / 2
    entries = (book * half[..., None]) + ((high + low) / 2)[..., None]
    nearest = (entries - numbers[..., None]).abs().amin(dim=-1)
    outliers = torch.zeros(numbers.shape, dtype=torch.bool).scatter(-1, index.long(), value=True)
    error = (codec.decode((packed, index, values)) - numbers).abs()
    assert (error <= nearest + slack(numbers) + half * 2**-20)[~outliers].all()
    assert unpack(packed, codec.spec.code_bits).max() < len(book)


@given(st.floats(-LARGEST, LARGEST, width=32))
@example(0.0)
@example(-0.0)
@example(5e-8)
@example(-5e-8)
@example(LARGEST)
@example(1e-40)
def test_half_below_and_half_above_are_neighbouring_float16_values(number):
    given_number = torch.tensor([number])

    below, above = half_below(given_number), half_above(given_number)

    assert below.float() <= given_number <= above.float()
    apart = (below.view(torch.int16) - above.view(torch.int16)).abs()
    is_exact = bool(given_number.half().float() == given_number)
    assert below == above if is_exact else apart in (1, 2**15 - 1)


def int4_of(numbers):
    codec = make_codec(codec_spec(f"int4:group={len(numbers)}"), len(numbers))
    return codec, codec.encode(torch.tensor([numbers]))


def test_outliers_do_not_change_the_error_of_others_and_ties_select_lower_channels():
    codec = make_codec(codec_spec("int4_outliers:percent=50"), 8)
    numbers = torch.tensor([[1.0, -2.0, 2.0, 2.0, -2.0, 2.0, 0.0, -2.0]])
    assert largest(numbers, codec).tolist() == [[1, 2, 3, 4]]

    numbers = torch.linspace(-1, 1, 16)[None]
    numbers[0, 5] = 100.0
    errors = {}
    for name in ("int4", "int4_outliers"):
        codec = make_codec(codec_spec(name), 16)
        errors[name] = (codec.decode(codec.encode(numbers)) - numbers).abs().max().item()

    assert errors["int4_outliers"] < 0.1 < 1 < errors["int4"] < 4
