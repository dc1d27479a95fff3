from contextlib import nullcontext

import pytest

from quire.errors import ConfigError, UnknownName
from quire.layout.codec_names import codec_pair, codec_spec
from quire.layout.kv_format import (
    Storing,
    fill_plain,
    read_format,
    refuse_excluded,
    stored_codec,
    without_records,
)
from quire.layout.layout import layout_for, page_and_fixed_bytes, statistics_used
from quire.layout.pages import kv_pages
from support.model_specs import small_spec


def test_bytes_of_a_vector_of_128_elements():
    for text, vector_bytes in (
        *(("float32", 128 * 4), ("bfloat16", 128 * 2), ("int8_channel", 128)),
        *(("int8", 128 + 2), ("fp8", 128 + 2)),
        *(("int4", 64 + 2 * (2 + 2)), ("int4:group=32", 64 + 4 * (2 + 2))),
        *(("int3:group=128", 48 + (2 + 2)), ("int2:group=16", 32 + 8 * (2 + 2))),
        ("int4_outliers", 64 + 2 * (2 + 2) + 2 * (1 + 2)),
        ("int4_outliers:percent=3", 64 + 2 * (2 + 2) + 4 * (1 + 2)),
        *(("int4_hadamard", 64 + 2 * (2 + 2)), ("kvquant3", 48 + 2 * (1 + 2))),
        *(("int4_page", 64 + 128 * (2 + 2) / 32), ("int2_page", 32 + 128 * (2 + 2) / 32)),
    ):
        assert codec_spec(text).vector_bytes(128, 32) == vector_bytes, text


def test_bits_count_scales_and_indices_of_long_vectors_have_two_bytes():
    """KIVI with 2 bits, the channels of keys over 32 tokens: 2 + 32 / 32 = 3; int4:group=32: 5."""
    assert codec_spec("int2_page").effective_bits(128, 32) == 3.0
    assert codec_spec("int4:group=32").effective_bits(128, 16) == 5.0
    planes = {plane.name: plane for plane in codec_spec("int4_outliers").planes(320)}
    assert planes["outlier_indices"].dtype == "int16"
    assert planes["outlier_indices"].width == planes["outlier_values"].width == 4


def test_codecs_store_more_tokens_and_groups_are_the_largest_divisor_of_head_dim_up_to_64():
    """A page of 8 heads of 128 and 16 tokens, padding included."""
    shape = {"head_dim": 128, "heads": 8, "tokens": 16}
    for codec, least in {"int8": 1.88, "int4": 3.4, "int4_outliers": 3.0}.items():
        specs = map(codec_spec, ("bfloat16", codec))
        plain, coded = (kv_pages(key=spec, value=spec, **shape).page_bytes for spec in specs)
        assert plain / coded >= least, codec
    groups = {128: 64, 64: 64, 80: 40, 96: 48, 32: 32, 8: 8, 256: 64}
    assert {dim: codec_spec("int4").group_of(dim) for dim in groups} == groups


def test_names_have_their_options_and_groups_must_divide_head_dims():
    with pytest.raises(ConfigError, match=r"groups of 64 do not divide head_dim 80; .* 40 or 80"):
        codec_spec("int4:group=64").planes(80)
    with pytest.raises(ConfigError, match=r"do not divide head_dim 4; choose group=4, or leave"):
        codec_spec("int4:group=3").planes(4)
    for codec, head_dim in (("int4", 9), ("int2", 6), ("int3", 20)):  # no whole bytes
        with pytest.raises(ConfigError, match=f"got {head_dim}; use int8"):
            codec_spec(codec).planes(head_dim)
    with pytest.raises(UnknownName):
        codec_spec("")

    found = codec_spec("int4_outliers:group=32, percent=2")
    assert found.name == "int4_outliers:group=32,percent=2"
    assert (found.rule, found.group, found.percent) == ("int4_outliers", 32, 2.0)
    assert codec_spec("int4_outliers:group=32,percent=2.0") == found != codec_spec("int4_outliers")
    assert [one.name for one in codec_pair("int8")] == ["int8", "int8"]
    assert [one.name for one in codec_pair("int8 / int4:group=32")] == ["int8", "int4:group=32"]
    assert [one.name for one in codec_pair("kivi2")] == ["int2_page", "int2:group=32"]
    form = read_format("int8/int4:group=16 + sinks=4 + residual=64 + plain=bfloat16")
    assert (form.key.name, form.value.name) == ("int8", "int4:group=16")
    assert (form.sinks, form.residual, form.plain_layers) == (4, 64, 0)
    assert form.required_plain.name == "bfloat16"

    assert without_records(MIXED) == "int4+residual=64"
    assert without_records("int2 + promoted = 3:int8 + sinks=4") == "int2 + sinks=4"
    assert without_records("int8/int4") == "int8/int4"


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


MODEL = small_spec(*(None, 64) * 3, head_dim=32, hidden_size=128, max_positions=512)

MIXED = "int4+residual=64+promoted=32:int8"


def layout_of(codec, **options):
    return layout_for(MODEL, codec=f"{codec}+plain=float16", page_tokens=16, **options)


def test_fill_plain_makes_the_plain_type_explicit_and_one_codec_applies_to_latents_only():
    for text, expected in (
        *(("none", "float16"), ("none/none", "float16"), ("int8", "int8")),
        *(("int8/none", "int8/float16"), ("int4+residual=0", "int4+residual=0")),
        *(("int4+sinks=2", "int4+sinks=2+plain=float16"), ("kivi4", "kivi4+plain=float16")),
        ("int4+sinks=2+plain=float32", "int4+sinks=2+plain=float32"),
    ):
        assert fill_plain(text, "float16") == expected, text
    for text, expected in (
        *(("none", "float16"), ("float16", "float16"), ("int8/none", "int8/float16")),
        *(("int8", "float16/int8"), ("none/int8", "float16/int8")),
        ("int8/int8", "int8/int8+plain=float16"),  # index keys have this type
        ("int4:group=8+residual=9", "float16/int4:group=8+residual=9+plain=float16"),
        ("kivi4", "kivi4+plain=float16"),
    ):
        written = fill_plain(text, "float16", latent=True)
        assert written == expected, text
        assert fill_plain(written, "float16", latent=True) == expected


def test_number_of_newest_tokens_in_full_precision():
    for text, page_tokens, recent in (
        *(("int4+sinks=3", 16, 0), ("int4+residual=9", 16, 9), ("kivi4", 32, 31), ("kivi4", 1, 0)),
        *(("kivi4+residual=128", 32, 128), ("int8/int4_page+residual=3", 8, 7)),
    ):
        assert read_format(text).recent(page_tokens) == recent, text


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("int4+sink=2", UnknownName, "did you mean sinks"),
        ("int4+", UnknownName, "unknown option of a KV codec"),
        ("int4+sinks", ConfigError, "expected sinks to be an integer from 0 to 65536, got ''"),
        ("int4+sinks=-1", ConfigError, "got '-1'"),
        ("int4+residual=70000", ConfigError, "got '70000'"),
        ("float16+residual=4", ConfigError, "is unquantized: remove sinks"),
        ("int4+sinks=4+sinks=8", ConfigError, "sinks is repeated"),
        ("int8+sinks=4+plain=int8", ConfigError, "such as float32, got 'int8'; remove it"),
        ("kivi4:group=16", ConfigError, "kivi4 is the pair int4_page/int4:group=32 .* write both"),
        (
            "int8/kivi2",
            ConfigError,
            "kivi2 is the pair int2_page/int2:group=32 .* write both codecs",
        ),
        ("none:group=4", ConfigError, "none has no options, got 'group=4'; write none"),
        ("fp8:group=4", ConfigError, "fp8 has no options, got 'group=4'; write fp8"),
        ("nome", UnknownName, "did you mean none?"),
        ("int8+states=int4", ConfigError, "states to be float32, bfloat16, int8, got 'int4'"),
        ("int8+states=", ConfigError, "states to be float32, bfloat16, int8, got ''"),
        ("int4+residual=9+promoted=0:int8", ConfigError, "from 1 to 65536, and their codec"),
        ("int4+residual=9+promoted=int8", ConfigError, "such as promoted=32:int8"),
        ("int4+residual=9+promoted=3", ConfigError, "such as promoted=32:int8"),
        ("int4+residual=9+promoted=3:float16", ConfigError, "sinks= and residual= keep tokens in"),
        ("int4+residual=9+promoted=3:int8/int4_page", ConfigError, "encodes tokens one by one"),
        ("int4+residual=9+promoted=3:int8_channel", ConfigError, "without measured constants"),
        ("int4+residual=9+promoted=3:int9", UnknownName, "int9"),
        ("float32+promoted=3:int8", ConfigError, "is unquantized"),
        ("int4+promoted=3:int8", ConfigError, "is unset; add residual=64"),
        ("int4+sinks=4+promoted=3:int8", ConfigError, "is unset; add residual=64"),
        ("int4+promoted=3:int8+promoted=3:int8", ConfigError, "promoted is repeated"),
    ],
)
def test_invalid_format_is_rejected_with_the_reason(text, error, message):
    with pytest.raises(error, match=message):
        read_format(text)


def test_codecs_in_messages_plain_types_and_pages_of_full_precision():
    with pytest.raises(ConfigError, match=r"needs their type, such as \+plain=float32"):
        layout_for(MODEL, codec="kivi4", page_tokens=32)
    text = f"{MIXED}+plain=float32"
    with pytest.raises(ConfigError, match=rf"KV codec '{MIXED.replace('+', '.')}': the scores"):
        refuse_excluded(text, Storing(form=read_format(text)))
    assert stored_codec("none", "float32") == "float32"
    with pytest.raises(ConfigError, match=r"computes in float32, .* or --dtype float16"):
        stored_codec("int8/float16", "float32")

    # 4 + 64 tokens, key and value, 2 heads of 32 elements of 2 bytes
    layout = layout_of("int4+sinks=4+residual=64")
    groups = {group.name: group for group in layout.groups}

    assert list(groups) == ["full", "full.full_precision", "window_64", "window_64.full_precision"]
    for name in ("full.full_precision", "window_64.full_precision"):
        group = groups[name]
        assert group.page_class.page_bytes == 68 * 2 * 2 * 32 * 2
        assert group.layers == groups[name.removesuffix(".full_precision")].layers
        assert group.bytes_at_most(1, 1) == group.bytes_at_most(9000, 512)
        assert group.private
    assert statistics_used(layout, ()) == {"full.full_precision", "window_64.full_precision"}


@pytest.mark.parametrize("heads_apart", [False, True])
def test_full_precision_and_promoted_tokens_have_pages_of_their_groups_lanes(heads_apart):
    layout = layout_of("int4+sinks=1", evicting=True, heads_apart=heads_apart)
    full, exact = layout.groups[:2]

    assert exact.of == full.name == "full"
    assert (exact.num_lanes, exact.page_class.heads) == (full.num_lanes, full.page_class.heads)
    _, fixed_bytes = page_and_fixed_bytes(layout)
    assert layout.groups[-1].name == "window_64.full_precision"
    assert fixed_bytes == exact.num_lanes * exact.page_class.page_bytes

    # window lanes are not evicted by a rule; keys in int8, values in fp8, one position each
    codec = "int2+residual=9+promoted=7:int8/fp8"
    assert all(group.promoted is None for group in layout_of(codec).groups)
    layout = layout_of(codec, evicting=True, heads_apart=heads_apart)
    [group] = [group for group in layout.groups if group.promoted is not None]
    full, exact = layout.groups[:2]

    assert (group.name, group.of, group.records) == ("full.promoted", "full", 7)
    assert (group.num_lanes, group.page_class.heads) == (full.num_lanes, full.page_class.heads)
    heads, head_dim = group.page_class.heads, MODEL.head_dim
    record_bytes = 2 * heads * (head_dim + 2) + 4
    assert 7 * record_bytes <= group.page_class.page_bytes <= 7 * record_bytes + 64
    _, fixed_bytes = page_and_fixed_bytes(layout)
    fixed = (exact, group)
    assert fixed_bytes == sum(g.num_lanes * g.page_class.page_bytes for g in fixed)
    private = {"full.full_precision", "full.promoted", "window_64.full_precision"}
    assert statistics_used(layout, ()) == private


def test_windows_limit_full_precision_and_plain_layers_have_separate_groups():
    groups = [group for group in layout_of("int4+residual=100").groups if group.full_precision]

    records = {group.name: group.full_precision.records for group in groups}
    assert records == {"full.full_precision": 100, "window_64.full_precision": 64}

    layout = layout_of("int8+plain_layers=2")

    assert {group.name: group.layers for group in layout.groups} == {
        "full": (2,),
        "full.plain": (0, 4),
        "window_64": (3,),
        "window_64.plain": (1, 5),
    }
    assert [group.page_class.is_plain for group in layout.groups] == [False, True, False, True]
    assert all(group.page_class.is_plain for group in layout_of("int8+plain_layers=3").groups)


@pytest.mark.parametrize(
    ("text", "requested", "reason"),
    [
        ("int8_channel", {"evicts": True, "rerotates": True}, "measured on keys after RoPE"),
        ("int4:equalise=1", {"rerotates": True}, "measured on keys after RoPE"),
        (MIXED, {}, "eviction is off"),
        (MIXED, {"evicts": True, "every": 65}, "before the rule scores them"),
        ("int8", {"evicts": True, "rerotates": True}, None),
        ("int8/int8_channel", {"evicts": True, "rerotates": True}, None),
        ("kivi4", {"evicts": True}, None),
        ("int4+sinks=4+residual=9", {"evicts": True}, None),
        ("int8+plain_layers=1", {"evicts": True}, None),
        (MIXED, {"evicts": True, "every": 64}, None),
    ],
)
def test_every_excluded_combination_is_rejected_and_valid_ones_accepted(text, requested, reason):
    refused = pytest.raises(ConfigError, match=f"{reason}.*; use ") if reason else nullcontext()
    with refused:
        refuse_excluded(text, Storing(form=read_format(text), **requested))
