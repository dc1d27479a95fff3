"""Bounds of codec errors, checked on generated vectors of any magnitude."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from quire.codecs.affine import LARGEST, half_above, half_below, unpack
from quire.codecs.hadamard import rotate
from quire.codecs.outliers import largest
from quire.codecs.registry import make_codec
from quire.layout.codec_names import codec_spec

HEAD_DIM, TOKENS = 16, 8
ROUNDING = 2**-21  # float32 rounding, relative to the largest element
UNDERFLOW = torch.finfo(torch.float32).smallest_normal

_sizes = st.sampled_from((1e-9, 1e-6, 1e-3, 1.0, 300.0, LARGEST))
_unit = st.floats(-1, 1, width=32)


@st.composite
def vectors(draw):
    """[head, token, head_dim] around an offset; the range may be small relative to the offset."""
    spread, offset = draw(_sizes), draw(_sizes) * draw(st.sampled_from((-1, 0, 1)))
    numbers = draw(arrays(np.float32, (2, TOKENS, HEAD_DIM), elements=_unit))
    found = torch.from_numpy(numbers * np.float32(spread) + np.float32(offset))
    return found.clamp(-LARGEST, LARGEST)


def slack(numbers):
    """Error bound of the float32 arithmetic."""
    return numbers.abs().amax(dim=-1, keepdim=True) * ROUNDING + UNDERFLOW


def by_channel(scales):
    return scales.float().repeat_interleave(HEAD_DIM // scales.shape[-1], dim=-1)


AFFINE = ("int4", "int4:group=4", "int3", "int3:group=8", "int2", "int2:group=16")


@pytest.mark.parametrize("name", AFFINE)
@given(numbers=vectors())
def test_group_codec_error_is_at_max_half_a_scale(name, numbers):
    codec = make_codec(codec_spec(name), HEAD_DIM)
    planes = codec.encode(numbers)

    error = (codec.decode(planes) - numbers).abs()
    assert (error <= by_channel(planes[1]) / 2 + slack(numbers)).all()


@given(numbers=vectors())
def test_int8_error_is_at_max_half_a_scale(numbers):
    codec = make_codec(codec_spec("int8"), HEAD_DIM)

    codes, scales = codec.encode(numbers)

    error = (codec.decode((codes, scales)) - numbers).abs()
    assert (error <= scales.float() / 2 + slack(numbers)).all()
    largest_possible = numbers.abs().amax(dim=-1, keepdim=True) / 127
    assert (scales.float() <= largest_possible * (1 + 2**-10) + 2**-24).all()


@given(numbers=vectors())
def test_fp8_has_four_significant_bits(numbers):
    codec = make_codec(codec_spec("fp8"), HEAD_DIM)

    planes = codec.encode(numbers)

    error = (codec.decode(planes) - numbers).abs()
    bound = torch.maximum(numbers.abs() / 16, planes[1].float() / 1024)
    assert (error <= bound + slack(numbers)).all()


@pytest.mark.parametrize("name", ["int4_page", "int2_page"])
@given(numbers=vectors())
def test_page_codec_error_is_at_max_half_a_channel_scale(name, numbers):
    codec = make_codec(codec_spec(name), HEAD_DIM)
    planes = codec.encode(numbers)

    error = (codec.decode(planes) - numbers).abs()
    bound = numbers.abs().amax(dim=-2, keepdim=True) * ROUNDING + UNDERFLOW
    assert (error <= planes[1].float() / 2 + bound).all()


@given(numbers=vectors(), percent=st.sampled_from((1, 10, 50)))
def test_outliers_are_float16_and_excluded_from_the_scales(numbers, percent):
    codec = make_codec(codec_spec(f"int4_outliers:group=8,percent={percent}"), HEAD_DIM)

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
    codec = make_codec(codec_spec(name), HEAD_DIM)
    planes = codec.encode(numbers)

    decoded, length = codec.decode(planes), numbers.norm(dim=-1)
    # float16 scales and zeros
    half = 2**-10 * (length + decoded.norm(dim=-1)) + 2**-24 * 16 * HEAD_DIM
    found = (decoded - numbers).norm(dim=-1)
    assert ((decoded.norm(dim=-1) - length).abs() <= HEAD_DIM * half)[length > 1e-3].all()
    scale = planes[1].float().amax(dim=-1)
    assert (found <= 2 * HEAD_DIM**0.5 / 2 * 2 * scale + HEAD_DIM * half).all()


def test_rotation_is_an_involution_and_preserves_norms():
    for head_dim in (8, 80, 96, 128):
        vectors_ = torch.randn(5, head_dim, generator=torch.Generator().manual_seed(head_dim))

        rotated = rotate(vectors_)

        assert torch.allclose(rotated.norm(dim=-1), vectors_.norm(dim=-1), atol=1e-5)
        assert torch.allclose(rotate(rotated), vectors_, atol=1e-5)


def test_rotation_block_is_the_largest_power_of_two_divisor():
    """head_dim 80 is 5 blocks of 16; the first row of Sylvester's matrix is all ones."""
    single = torch.zeros(80)
    single[16] = 4.0

    assert torch.equal(rotate(single), torch.tensor([0.0] * 16 + [1.0] * 16 + [0.0] * 48))


@given(numbers=vectors())
def test_calibrated_channel_error_is_at_max_half_a_scale(numbers):
    codec = make_codec(codec_spec("int8_channel"), HEAD_DIM).calibrated(numbers)

    decoded = codec.decode(codec.encode(numbers))

    bound = codec.constant("scale") / 2 + numbers.abs() * ROUNDING + UNDERFLOW
    assert ((decoded - numbers).abs() <= bound).all()


def test_calibrated_channels_saturate_outside_the_range():
    codec = make_codec(codec_spec("int8_channel"), 1).calibrated(torch.tensor([[[2.0]]]))

    decoded = codec.decode(codec.encode(torch.tensor([[[1.0], [5.0], [-9.0]]])))

    assert torch.allclose(decoded, torch.tensor([[[1.0], [2.0], [-2.0]]]), atol=2 / 127 / 2)


@pytest.mark.parametrize("name", ["kvquant4", "kvquant3:percent=10"])
@given(numbers=vectors())
def test_nearest_codebook_entry_is_used(name, numbers):
    codec = make_codec(codec_spec(name), HEAD_DIM).calibrated(numbers)

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


def test_int4_codes_round_half_to_even():
    """min 0, max 30: scale 2; 1 / 2 and 5 / 2 are ties and round to the even code."""
    codec, (packed, scales, zeros) = int4_of([0.0, 1.0, 5.0, 30.0])

    assert (scales.item(), zeros.item()) == (2.0, 0.0)
    assert unpack(packed, 4).tolist() == [[0, 0, 2, 15]]
    assert codec.decode((packed, scales, zeros)).tolist() == [[0.0, 0.0, 4.0, 30.0]]


def test_constant_group_has_scale_0_and_codes_0():
    codec, (packed, scales, zeros) = int4_of([0.5] * 4)

    assert (scales.item(), zeros.item(), packed.any().item()) == (0.0, 0.5, False)
    assert codec.decode((packed, scales, zeros)).tolist() == [[0.5] * 4]


def test_inexact_zero_is_rounded_down_and_its_scale_up():
    """1000.1 is between 1000 and 1000.5; to the nearest the zero could exceed an element."""
    _, (_, scales, zeros) = int4_of([1000.4, 1000.45])

    assert zeros.item() == 1000.0
    assert 0.45 / 15 <= scales.item() <= 0.45 / 15 * (1 + 2**-10)


def test_outlier_ties_select_lower_channels():
    codec = make_codec(codec_spec("int4_outliers:percent=50"), 8)
    numbers = torch.tensor([[1.0, -2.0, 2.0, 2.0, -2.0, 2.0, 0.0, -2.0]])

    assert largest(numbers, codec).tolist() == [[1, 2, 3, 4]]


def test_outlier_channel_does_not_increase_the_error_of_others():
    numbers = torch.linspace(-1, 1, 16)[None]
    numbers[0, 5] = 100.0
    errors = {}
    for name in ("int4", "int4_outliers"):
        codec = make_codec(codec_spec(name), 16)
        errors[name] = (codec.decode(codec.encode(numbers)) - numbers).abs().max().item()

    assert errors["int4_outliers"] < 0.1 < 1 < errors["int4"] < 4
