"""How far decoded numbers may be from the ones encoded: proved on numbers of any size and shape."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from quire.codecs.base import Codec
from quire.codecs.hadamard import rotate
from quire.codecs.outliers import largest
from quire.codecs.packing import LARGEST, half_above, half_below, unpack
from quire.codecs.registry import make_codec
from quire.layout.codec_names import codec_spec

HEAD_DIM, TOKENS = 16, 8
ROUNDING = 2**-21  # of float32 arithmetic with a few steps, of the largest number in it
UNDERFLOW = torch.finfo(torch.float32).smallest_normal

_sizes = st.sampled_from((1e-9, 1e-6, 1e-3, 1.0, 300.0, LARGEST))
_unit = st.floats(-1, 1, width=32)


@st.composite
def vectors(draw: st.DrawFn) -> Tensor:
    """[head, token, head_dim] around an offset: ranges that are small against their numbers too."""
    spread, offset = draw(_sizes), draw(_sizes) * draw(st.sampled_from((-1, 0, 1)))
    numbers = draw(arrays(np.float32, (2, TOKENS, HEAD_DIM), elements=_unit))
    return torch.from_numpy(numbers * np.float32(spread) + np.float32(offset)).clamp(
        -LARGEST, LARGEST
    )


def slack(numbers: Tensor) -> Tensor:
    """What arithmetic in float32 may add."""
    return numbers.abs().amax(dim=-1, keepdim=True) * ROUNDING + UNDERFLOW


def by_channel(scales: Tensor) -> Tensor:
    return scales.float().repeat_interleave(HEAD_DIM // scales.shape[-1], dim=-1)


AFFINE = ("int4", "int4:group=4", "int3", "int3:group=8", "int2", "int2:group=16")


@pytest.mark.parametrize("name", AFFINE)
@given(numbers=vectors())
def test_grouped_codes_are_half_a_scale_away_at_the_most(name, numbers):
    codec = make_codec(codec_spec(name), HEAD_DIM)

    planes = codec.encode(numbers)

    error = (codec.decode(planes) - numbers).abs()
    assert (error <= by_channel(planes[1]) / 2 + slack(numbers)).all()


@given(numbers=vectors())
def test_int8_is_half_a_scale_away_at_the_most(numbers):
    codec = make_codec(codec_spec("int8"), HEAD_DIM)

    codes, scales = codec.encode(numbers)

    assert (
        (codec.decode((codes, scales)) - numbers).abs() <= scales.float() / 2 + slack(numbers)
    ).all()
    largest_possible = numbers.abs().amax(dim=-1, keepdim=True) / 127
    assert (scales.float() <= largest_possible * (1 + 2**-10) + 2**-24).all()


@given(numbers=vectors())
def test_fp8_keeps_four_bits_of_a_number(numbers):
    codec = make_codec(codec_spec("fp8"), HEAD_DIM)

    planes = codec.encode(numbers)

    error = (codec.decode(planes) - numbers).abs()
    assert (
        error <= torch.maximum(numbers.abs() / 16, planes[1].float() / 1024) + slack(numbers)
    ).all()


@pytest.mark.parametrize("name", ["int4_page", "int2_page"])
@given(numbers=vectors())
def test_a_channel_of_a_page_is_half_its_scale_away_at_the_most(name, numbers):
    codec = make_codec(codec_spec(name), HEAD_DIM)

    planes = codec.encode(numbers)

    error = (codec.decode(planes) - numbers).abs()
    room = numbers.abs().amax(dim=-2, keepdim=True) * ROUNDING + UNDERFLOW
    assert (error <= planes[1].float() / 2 + room).all()


@given(numbers=vectors(), percent=st.sampled_from((1, 10, 50)))
def test_outliers_are_rounded_to_float16_and_the_others_as_if_these_were_not_there(
    numbers, percent
):
    codec = make_codec(codec_spec(f"int4_outliers:group=8,percent={percent}"), HEAD_DIM)

    planes = codec.encode(numbers)

    _, scales, _, index, _ = planes
    taken = torch.zeros(numbers.shape, dtype=torch.bool).scatter(-1, index.long(), value=True)
    error = (codec.decode(planes) - numbers).abs()
    assert (error[taken] <= numbers.abs()[taken] * 2**-11 + 2**-25).all()
    assert (error <= by_channel(scales) / 2 + slack(numbers))[~taken].all()
    assert_largest_are_taken(numbers, taken)
    assert_scales_are_of_the_others(numbers, taken, scales)


def assert_largest_are_taken(numbers: Tensor, taken: Tensor) -> None:
    sizes = numbers.abs()
    least_taken = sizes.masked_fill(~taken, torch.inf).amin(dim=-1)
    most_left = sizes.masked_fill(taken, -torch.inf).amax(dim=-1)
    assert (least_taken >= most_left).all()


def assert_scales_are_of_the_others(numbers: Tensor, taken: Tensor, scales: Tensor) -> None:
    groups, apart = (x.unflatten(-1, (-1, 8)) for x in (numbers, taken))
    low = groups.masked_fill(apart, torch.inf).amin(dim=-1)
    high = groups.masked_fill(apart, -torch.inf).amax(dim=-1)
    reach = torch.where(apart.all(dim=-1), 0.0, high - low + low.abs() * 2**-10 + 2**-24)
    assert (scales.float() <= reach / 15 * (1 + 2**-10) + 2**-24).all()


@pytest.mark.parametrize("name", ["int4_hadamard", "int3_hadamard:group=8"])
@given(numbers=vectors())
def test_a_rotated_vector_keeps_its_length_and_is_as_near_as_said(name, numbers):
    numbers = numbers / 4  # a rotated vector of the largest numbers would be beyond float16
    codec = make_codec(codec_spec(name), HEAD_DIM)

    planes = codec.encode(numbers)

    decoded, length = codec.decode(planes), numbers.norm(dim=-1)
    half = 2**-10 * (length + decoded.norm(dim=-1)) + 2**-24 * 16 * HEAD_DIM  # of scales and zeros
    found = (decoded - numbers).norm(dim=-1)
    assert ((decoded.norm(dim=-1) - length).abs() <= HEAD_DIM * half)[length > 1e-3].all()
    scale = planes[1].float().amax(dim=-1)
    assert (found <= 2 * HEAD_DIM**0.5 / 2 * 2 * scale + HEAD_DIM * half).all()


def test_a_rotation_turned_twice_is_none_and_keeps_lengths():
    for head_dim in (8, 80, 96, 128):
        made = torch.randn(5, head_dim, generator=torch.Generator().manual_seed(head_dim))

        turned = rotate(made)

        assert torch.allclose(turned.norm(dim=-1), made.norm(dim=-1), atol=1e-5)
        assert torch.allclose(rotate(turned), made, atol=1e-5)


def test_a_rotation_mixes_blocks_of_the_largest_power_of_two_that_divides():
    """head_dim 80 is 5 blocks of 16; the first row of Sylvester's matrix is all ones."""
    single = torch.zeros(80)
    single[16] = 4.0

    assert torch.equal(rotate(single), torch.tensor([0.0] * 16 + [1.0] * 16 + [0.0] * 48))


@given(numbers=vectors())
def test_measured_channels_are_half_a_scale_away_where_they_were_measured(numbers):
    codec = make_codec(codec_spec("int8_channel"), HEAD_DIM).calibrated(numbers)

    decoded = codec.decode(codec.encode(numbers))

    room = codec.constant("scale") / 2 + numbers.abs() * ROUNDING + UNDERFLOW
    assert ((decoded - numbers).abs() <= room).all()


def test_measured_channels_saturate_beyond():
    codec = make_codec(codec_spec("int8_channel"), 1).calibrated(torch.tensor([[[2.0]]]))

    decoded = codec.decode(codec.encode(torch.tensor([[[1.0], [5.0], [-9.0]]])))

    assert torch.allclose(decoded, torch.tensor([[[1.0], [2.0], [-2.0]]]), atol=2 / 127 / 2)


@pytest.mark.parametrize("name", ["kvquant4", "kvquant3:percent=10"])
@given(numbers=vectors())
def test_the_nearest_entry_of_the_codebook_is_taken(name, numbers):
    codec = make_codec(codec_spec(name), HEAD_DIM).calibrated(numbers)

    packed, index, values = codec.encode(numbers)

    low, high, book = (codec.constant(n) for n in ("low", "high", "codebook"))
    half = (high - low) / 2
    all_places = (book * half[..., None]) + ((high + low) / 2)[..., None]
    nearest = (all_places - numbers[..., None]).abs().amin(dim=-1)
    taken = torch.zeros(numbers.shape, dtype=torch.bool).scatter(-1, index.long(), value=True)
    error = (codec.decode((packed, index, values)) - numbers).abs()
    assert (error <= nearest + slack(numbers) + half * 2**-20)[~taken].all()
    assert unpack(packed, codec.spec.code_bits).max() < len(book)


@given(st.floats(-LARGEST, LARGEST, width=32))
@example(0.0)
@example(-0.0)
@example(5e-8)
@example(-5e-8)
@example(LARGEST)
@example(1e-40)
def test_float16_is_rounded_to_the_next_one_below_or_above(number):
    given_number = torch.tensor([number])

    below, above = half_below(given_number), half_above(given_number)

    assert below.float() <= given_number <= above.float()
    exact = given_number.half().float() == given_number
    assert (
        (below == above)
        if exact
        else (below.view(torch.int16) - above.view(torch.int16)).abs() in (1, 2**15 - 1)
    )


# ---- by hand -------------------------------------------------------------------------------------


def int4_of(numbers: list[float]) -> tuple[Codec, tuple[Tensor, ...]]:
    codec = make_codec(codec_spec(f"int4:group={len(numbers)}"), len(numbers))
    return codec, codec.encode(torch.tensor([numbers]))


def test_codes_by_hand_half_to_even():
    """min 0, max 30: scale 2; 1 / 2 and 5 / 2 lie between two codes and go to the even one."""
    codec, (packed, scales, zeros) = int4_of([0.0, 1.0, 5.0, 30.0])

    assert (scales.item(), zeros.item()) == (2.0, 0.0)
    assert unpack(packed, 4).tolist() == [[0, 0, 2, 15]]
    assert codec.decode((packed, scales, zeros)).tolist() == [[0.0, 0.0, 4.0, 30.0]]


def test_a_constant_group_has_scale_0_and_codes_0():
    codec, (packed, scales, zeros) = int4_of([0.5] * 4)

    assert (scales.item(), zeros.item(), packed.any().item()) == (0.0, 0.5, False)
    assert codec.decode((packed, scales, zeros)).tolist() == [[0.5] * 4]


def test_a_zero_that_float16_cannot_hold_is_rounded_down_and_the_scale_reaches_up():
    """1000.1 lies between 1000 and 1000.5: rounding to the nearest would keep the bound here, and
    1000.4 would be encoded from above its zero."""
    _, (_, scales, zeros) = int4_of([1000.4, 1000.45])

    assert zeros.item() == 1000.0
    assert 0.45 / 15 <= scales.item() <= 0.45 / 15 * (1 + 2**-10)


def test_of_outliers_equally_large_those_of_lower_channels_are_taken():
    codec = make_codec(codec_spec("int4_outliers:percent=50"), 8)
    numbers = torch.tensor([[1.0, -2.0, 2.0, 2.0, -2.0, 2.0, 0.0, -2.0]])

    assert largest(numbers, codec).tolist() == [[1, 2, 3, 4]]


def test_one_large_channel_does_not_cost_the_others_their_digits():
    numbers = torch.linspace(-1, 1, 16)[None]
    numbers[0, 5] = 100.0
    errors = {}
    for name in ("int4", "int4_outliers"):
        codec = make_codec(codec_spec(name), 16)
        errors[name] = (codec.decode(codec.encode(numbers)) - numbers).abs().max().item()

    assert errors["int4_outliers"] < 0.1 < 1 < errors["int4"] < 4
