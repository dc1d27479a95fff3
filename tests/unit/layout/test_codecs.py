"""Codecs: vector bytes worked out by hand, names and options, and rejected head dimensions."""

import pytest

from quire.errors import ConfigError, UnknownName
from quire.layout.codec_names import codec_pair, codec_spec
from quire.layout.pages import kv_pages


@pytest.mark.parametrize(
    ("text", "vector_bytes"),
    [
        ("float32", 128 * 4),
        ("bfloat16", 128 * 2),
        ("int8", 128 + 2),
        ("fp8", 128 + 2),
        ("int8_channel", 128),
        ("int4", 64 + 2 * (2 + 2)),
        ("int4:group=32", 64 + 4 * (2 + 2)),
        ("int3:group=128", 48 + (2 + 2)),
        ("int2:group=16", 32 + 8 * (2 + 2)),
        ("int4_outliers", 64 + 2 * (2 + 2) + 2 * (1 + 2)),
        ("int4_outliers:percent=3", 64 + 2 * (2 + 2) + 4 * (1 + 2)),
        ("int4_hadamard", 64 + 2 * (2 + 2)),
        ("int4_page", 64 + 128 * (2 + 2) / 32),
        ("int2_page", 32 + 128 * (2 + 2) / 32),
        ("kvquant3", 48 + 2 * (1 + 2)),
    ],
)
def test_bytes_of_a_vector_of_128_elements(text, vector_bytes):
    assert codec_spec(text).vector_bytes(128, 32) == vector_bytes


def test_effective_bits_count_scales():
    """KIVI with 2 bits, the channels of keys over 32 tokens: 2 + 32 / 32 = 3; int4:group=32: 5."""
    assert codec_spec("int2_page").effective_bits(128, 32) == 3.0
    assert codec_spec("int4:group=32").effective_bits(128, 16) == 5.0


@pytest.mark.parametrize(
    ("codec", "least"), [("int8", 1.88), ("int4", 3.4), ("int4_outliers", 3.0)]
)
def test_codec_stores_at_min_this_multiple_of_half_precision_tokens(codec, least):
    """A page of 8 heads of 128 and 16 tokens, padding included."""
    specs, shape = map(codec_spec, ("bfloat16", codec)), {"head_dim": 128, "heads": 8, "tokens": 16}
    plain, coded = (kv_pages(key=spec, value=spec, **shape).page_bytes for spec in specs)

    assert plain / coded >= least


def test_outlier_indices_of_a_long_vector_are_two_bytes():
    planes = {plane.name: plane for plane in codec_spec("int4_outliers").planes(320)}

    assert planes["outlier_indices"].dtype == "int16"
    assert planes["outlier_indices"].width == planes["outlier_values"].width == 4


@pytest.mark.parametrize(
    ("head_dim", "group"), [(128, 64), (64, 64), (80, 40), (96, 48), (32, 32), (8, 8), (256, 64)]
)
def test_default_group_is_the_largest_divisor_of_head_dim_up_to_64(head_dim, group):
    assert codec_spec("int4").group_of(head_dim) == group


def test_group_that_does_not_divide_head_dim_is_rejected_with_alternatives():
    with pytest.raises(ConfigError, match=r"groups of 64 do not divide head_dim 80; .* 40 or 80"):
        codec_spec("int4:group=64").planes(80)
    with pytest.raises(ConfigError, match=r"do not divide head_dim 4; choose group=4, or leave"):
        codec_spec("int4:group=3").planes(4)
    for codec, head_dim in (("int4", 9), ("int2", 6), ("int3", 20)):  # no whole bytes
        with pytest.raises(ConfigError, match=f"got {head_dim}; use int8"):
            codec_spec(codec).planes(head_dim)
    with pytest.raises(UnknownName):
        codec_spec("")


def test_codec_options_are_part_of_the_name():
    found = codec_spec("int4_outliers:group=32, percent=2")

    assert found.name == "int4_outliers:group=32,percent=2"
    assert (found.rule, found.group, found.percent) == ("int4_outliers", 32, 2.0)
    assert codec_spec("int4_outliers:group=32,percent=2.0") == found != codec_spec("int4_outliers")


def test_codec_pair_accepts_one_codec_two_codecs_or_a_pair_name():
    assert [one.name for one in codec_pair("int8")] == ["int8", "int8"]
    assert [one.name for one in codec_pair("int8 / int4:group=32")] == ["int8", "int4:group=32"]
    assert [one.name for one in codec_pair("kivi2")] == ["int2_page", "int2:group=32"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int5", "unknown codec 'int5': did you mean int"),
        ("kivi3", "unknown codec 'kivi3': did you mean kivi"),
        ("int4:grup=32", "unknown option of codec 'int4' 'grup': did you mean group"),
        ("fp8:group=32", "codec 'fp8:group=32': fp8 has no options, got 'group=32'; write fp8"),
        ("int4:group=no", "option group of codec 'int4:group=no': expected a number, got no"),
        ("int4:group=0", "at most 65536, got 0"),
        ("int4_outliers:percent=60", "above 0 and at most 50, got 60"),
        ("int4_outliers:percent=nan", "above 0 and at most 50, got nan"),
        ("int4:group", "expected option=value in codec 'int4:group', got 'group'"),
        ("int4:group=", "expected option=value in codec 'int4:group=', got 'group='"),
        ("int4:group=8,group=8", "option 'group' is repeated in codec 'int4:group=8,group=8'"),
        ("int8/int4/int2", "expected one codec, or keys/values"),
        ("int8/float8", "unknown codec 'float8': did you mean"),
    ],
)
def test_invalid_codec_text_is_rejected_with_the_reason(text, message):
    with pytest.raises(ConfigError, match=message):
        codec_pair(text)
