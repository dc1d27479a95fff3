"""Layouts: bytes, planes, bounds, fingerprints; config dataclasses, refused combinations."""

import ast
import dataclasses
from collections import Counter
from dataclasses import dataclass, replace
from itertools import chain, pairwise, product
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import layout
from quire.errors import ConfigError
from quire.kv.memory import KVMemory
from quire.layout import limits
from quire.layout.codec_names import CODECS, codec_spec
from quire.layout.codecs import ELEMENT_BYTES, CodecSpec
from quire.layout.layout import layout_fingerprint, layout_for, statistics_used
from quire.layout.limits import LIMITS, refused
from quire.layout.model import LayerSpec, StateSpec
from quire.layout.options import MaybeSize, check_options, choices_of, option, require_choice
from quire.layout.pages import KEY, NUMBERS, VALUE, CacheLayout, LaneGroup, PageClass, PlaneSpec
from quire.layout.sizes import format_size, option_size, parse_size, parse_size_or, rounded_size
from quire.layout.statistics import (
    AttentionSum,
    QueryMoments,
    QueryRing,
    ResidualSimilarity,
    SquareSum,
)
from support.model_specs import CACHE_KINDS, small_spec


def model_of(*windows):
    return small_spec(*windows, num_heads=8, head_dim=32, hidden_size=256)


STATISTICS = (AttentionSum(), QueryRing(window=8), QueryMoments(), ResidualSimilarity())


def layout_of(*windows, **options):
    return layout_for(model_of(*windows), codec="bfloat16", page_tokens=16, **options)


def bytes_by_name(layout):
    return {group.name: group.page_class.page_bytes for group in layout.groups}


def test_evicting_layers_store_positions_and_have_heads_apart():
    """Without eviction a page holds all heads of a layer; pre-RoPE keys are those of all layers."""
    [plain] = layout_of(None, None).groups
    assert (plain.num_lanes, plain.ordered) == (2, True)
    assert plain.page_class.page_bytes == 2 * 2 * 16 * 32 * 2
    layout = layout_of(None, 64, None, evicting=True)
    assert bytes_by_name(layout) == {"full": 4096 + 64, "window_64": 4096}
    assert [group.ordered for group in layout.groups] == [False, True]
    for rotated in (True, False):
        groups = layout_of(None, 64, None, evicting=True, rotated=rotated).groups
        assert [group.page_class.rotated for group in groups] == [rotated] * 2
        assert [group.page_class.page_bytes for group in groups] == [4096 + 64, 4096]
    layout = layout_of(None, 64, None, evicting=True, heads_apart=True)
    full, window = layout.groups
    assert bytes_by_name(layout) == {"full": 2048 + 64, "window_64": 4096}
    assert (full.num_lanes, full.lanes_per_layer, full.page_class.heads) == (4, 2, 1)
    assert (window.num_lanes, window.page_class.heads) == (1, 2)
    assert layout_of(None, heads_apart=True) == layout_of(None)


def test_statistics_pages_have_one_float32_plane_with_a_record_per_head():
    """A slot of an attention sum is 4 bytes; a ring of 8 holds 4 queries of 32 and a position."""
    layout = layout_of(None, 64, evicting=True, statistics=STATISTICS)

    assert bytes_by_name(layout_of(64, 64, evicting=True, statistics=STATISTICS)) == {
        "window_64": 4096
    }
    apart = layout_of(None, None, evicting=True, heads_apart=True, statistics=STATISTICS)
    assert [group.num_lanes for group in apart.groups] == [4] * 5
    assert [*bytes_by_name(apart).values()] == [
        *(2048 + 64, 64, 8 * (4 * 32 + 1) * 4 + 32, 4 * (1 + 32 + 32 * 32) * 4 + 48, 64)
    ]
    assert bytes_by_name(layout) == {
        "full": 4096 + 64,
        "full.attention_sum.mean": 2 * 16 * 4,
        "full.query_ring.8": 2 * 8 * (4 * 32 + 1) * 4,
        "full.query_moments.4": 2 * 4 * (1 + 32 + 32 * 32) * 4 + 32,  # whole cache lines
        "full.residual_similarity": 64,
        "window_64": 4096,
    }


def test_slot_statistics_follow_their_group_and_others_have_fixed_records():
    layout = layout_of(None, evicting=True, statistics=STATISTICS)
    sums, ring, moments, shift = layout.groups[1:]
    assert layout.followers_of("full") == (sums,)
    assert sums.page_class.tokens == layout.groups[0].page_class.tokens
    assert [group.records for group in (sums, ring, moments, shift)] == [None, 8, 1, 1]
    assert [group.page_class.tokens for group in (ring, moments, shift)] == [8, 1, 1]
    assert all(group.private and not group.ordered for group in layout.groups[1:])


def test_statistics_share_page_classes_and_sequences_use_their_own():
    statistics = AttentionSum(), SquareSum(), AttentionSum()
    layout = layout_of(None, evicting=True, statistics=statistics)

    names = [group.name for group in layout.groups[1:]]
    assert names == ["full.attention_sum.mean", "full.square_sum.mean"]
    assert len(layout.page_classes) == 2
    layout = layout_of(None, None, evicting=True, statistics=(QueryRing(window=8),))
    ring = layout.groups[1]
    assert layout.smallest_sequence_bytes == 2 * (4160 + 8256)
    assert [ring.bytes_at_most(tokens, 1) for tokens in (0, 1, 1000)] == [0, 2 * 8256, 2 * 8256]

    layout = layout_of(None, 64, evicting=True, statistics=STATISTICS)

    assert statistics_used(layout, ()) == frozenset()
    used = statistics_used(layout, (ResidualSimilarity(), SquareSum(), AttentionSum()))
    assert used == {"full.attention_sum.mean", "full.residual_similarity"}
    assert statistics_used(layout_of(64), STATISTICS) == frozenset()


def small_page(*, tokens=4, value=True, positions=False):
    names = (KEY, VALUE) if value else (NUMBERS,)
    planes = tuple(PlaneSpec(name, codec_spec("float32"), 4) for name in names)
    return PageClass(planes=planes, tokens=tokens, positions=positions)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"records": 0}, "records of 1 or more, got 0"),
        ({"records": -1}, "records of 1 or more, got -1"),
        ({"of": "kv", "window": 8}, "private group without a window, got window=8"),
        ({"records": 3, "window": 8}, "private group without a window, got window=8"),
        *(({"window": n}, "a window needs ordered lanes and at least 1 token") for n in (0, -1)),
        ({"window": 8, "ordered": False}, "a window needs ordered lanes and at least 1 token"),
    ],
)
def test_private_group_has_records_and_no_window_which_needs_ordered_lanes(rules, message):
    page = small_page(value=False, positions=True)
    with pytest.raises(ConfigError, match=message):
        LaneGroup(name="x", page_class=page, layers=(0,), **rules)


KV = LaneGroup(name="kv", page_class=small_page(), layers=(0, 1))
WINDOW = LaneGroup(name="window", page_class=small_page(), layers=(2, 3), window=8)
SUMS = LaneGroup(name="sums", page_class=small_page(value=False), layers=(0, 1), of="kv")


OTHERS = [("nothing", (0, 1), 4), ("window", (2, 3), 4), ("sums", (0, 1), 4), ("kv", (0,), 4)]


@pytest.mark.parametrize(("of", "layers", "tokens"), [*OTHERS, ("kv", (0, 1), 8)])
def test_follower_with_other_lanes_or_pages_is_rejected(of, layers, tokens):
    page = small_page(tokens=tokens, value=False)
    follower = LaneGroup(name="x", page_class=page, layers=layers, of=of)
    assert CacheLayout((KV, WINDOW, SUMS)).followers_of("kv") == (SUMS,)
    with pytest.raises(ConfigError, match=f"'x' follows '{of}'"):
        CacheLayout((KV, WINDOW, SUMS, follower))


def layout_of_codec(codec, **options):
    return layout_for(model_of(None, 64), codec=codec, page_tokens=16, **options)


def with_key_codec(layout, **changed):
    """The layout with other attributes of the key codec in its first group."""
    group = layout.groups[0]
    key, *others = group.page_class.planes
    key = dataclasses.replace(key, codec=dataclasses.replace(key.codec, **changed))
    page = dataclasses.replace(group.page_class, planes=(key, *others))
    first = dataclasses.replace(group, page_class=page)
    return CacheLayout((first, *layout.groups[1:]))


def test_fingerprint_ignores_names_and_help_texts():
    layout = layout_of_codec("int4")

    for changed in ({"summary": "Other words."}, {"name": "other"}, {"options": ()}):
        assert layout_fingerprint(with_key_codec(layout, **changed)) == layout_fingerprint(layout)
    names = {field.name for field in dataclasses.fields(CodecSpec)}
    assert names == {*CHANGED, "name", "summary", "options"}
    private = layout_of_codec("int4", statistics=(AttentionSum(), QueryRing()))
    assert layout_fingerprint(private) == layout_fingerprint(layout)


CHANGED = {"rule": "int4_hadamard", "code_bits": 2, "codes": "int8", "scaled": "vector"}
CHANGED |= {"has_zeros": False, "group": 16, "percent": 1.0, "equalise": 1, "constants": ("scale",)}


@pytest.mark.parametrize("attribute", CHANGED)
def test_fingerprint_depends_on_each_parameter_of_a_codec(attribute):
    layout = layout_of_codec("int4")

    changed = with_key_codec(layout, **{attribute: CHANGED[attribute]})

    assert layout_fingerprint(changed) != layout_fingerprint(layout)


def test_fingerprints_of_layouts_differ():
    chunks = (LayerSpec(chunk=64), LayerSpec(chunk=64), None)
    unjoined = LayerSpec(heads=dataclasses.replace(CACHE_KINDS["latent"].heads[0], latent=None))
    state = LayerSpec(attends=False, state=StateSpec(conv=(8, 4), recurrent=(2, 4, 4)))
    specs = [
        *CACHE_KINDS.values(),
        *(small_spec(*chunks), small_spec(unjoined, unjoined), small_spec(state, state)),
    ]
    evicting = {"evicting": True}, {"evicting": True, "heads_apart": True}
    models = (model_of(None, 32), 16), (model_of(64, None), 16), (model_of(None, 64), 32)
    layouts = [
        *(layout_of_codec(f"{codec}+plain=float32") for codec in CODECS),
        *map(layout_of_codec, ("int8/int4", "int4/int8")),
        *(layout_of_codec("int8", **options) for options in (*evicting, {"rotated": False})),
        *(layout_for(model, codec="int8", page_tokens=tokens) for model, tokens in models),
        *(layout_for(spec, codec="int8+plain=float32", page_tokens=16) for spec in specs),
    ]

    assert len(set(map(layout_fingerprint, layouts))) == len(layouts)


STATES = {  # pages of a layer, and bytes of each: those of the tensors in float32
    "qwen3_next": (StateSpec(conv=(8192, 4), recurrent=(32, 128, 128)), 64, 2048 + 32_768),
    "granite": (StateSpec(conv=(4352, 4), recurrent=(64, 64, 128)), 64, 1088 + 32_768),
    "mamba": (StateSpec(conv=(8192, 4), recurrent=(8192, 16)), 16, 8192 + 32_768),
    "small": (StateSpec(conv=(96, 4), recurrent=(4, 16, 16)), 1, 1536 + 4096),
    "one vector": (StateSpec(recurrent=(65_536,)), 1, 262_144),
    "odd": (StateSpec(conv=(7919, 4)), 1, 126_720),  # a prime number of channels
}


@pytest.mark.parametrize("name", STATES)
def test_a_large_state_has_several_pages_without_padding(name):
    state, count, page_bytes = STATES[name]
    spec = small_spec(LayerSpec(attends=False, state=state), None)

    [group] = [g for g in layout_for(spec, codec="float32", page_tokens=16).groups if g.state]

    assert (group.lanes_per_layer, group.page_class.page_bytes) == (count, page_bytes)
    numbers = [channels * inputs for channels, inputs in filter(None, [state.conv])]
    numbers.append(int(np.prod(state.recurrent)) if state.recurrent else 0)
    assert group.bytes_at_most(1, 1) == -(-4 * sum(numbers) // 64) * 64


@pytest.mark.parametrize(
    ("codec", "count", "conv_bytes", "scan_bytes"),
    [
        ("float32", 64, 2048, 32_768),
        ("int8+states=bfloat16", 32, 2048, 32_768),
        ("float32+states=int8", 16, 4096, 256 * (128 + 2)),  # a scale for each row of 128
    ],
)
def test_states_have_the_bytes_of_their_codec(codec, count, conv_bytes, scan_bytes):
    spec = small_spec(LayerSpec(attends=False, state=STATES["qwen3_next"][0]), None)

    [group] = [g for g in layout_for(spec, codec=codec, page_tokens=16).groups if g.state]

    assert group.lanes_per_layer == count
    assert group.page_class.page_bytes == -(-(conv_bytes + scan_bytes) // 64) * 64


@pytest.mark.parametrize("codec", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("name", ["qwen3_next", "granite"])
def test_large_states_waste_less_than_a_tenth_of_a_small_memory(name, codec):
    recurrent = LayerSpec(attends=False, state=STATES[name][0])
    spec = small_spec(*(recurrent, recurrent, None), num_kv_heads=4, head_dim=128)
    memory = KVMemory(layout_for(spec, codec=codec, page_tokens=16), 64 << 20, 32)

    while memory.try_grow(np.array([memory.start()]), np.array([200], dtype=np.int32)):
        memory.check()

    sequence_bytes = memory.row_bytes(0)
    assert memory.free_bytes < sequence_bytes + 0.1 * memory.total_bytes
    assert memory.used_bytes > 0.85 * memory.total_bytes


def page_of(codec="bfloat16", *, value="same", heads=8, tokens=16, head_dim=128, **options):
    key = codec_spec(codec)
    planes = [PlaneSpec(KEY, key, head_dim, heads)]
    if value is not None:
        planes.append(PlaneSpec(VALUE, key if value == "same" else value, head_dim, heads))
    return PageClass(planes=tuple(planes), tokens=tokens, **options)


PAGE_BYTES = [
    (page_of(), 2 * 16 * 8 * 128 * 2),  # 64 KiB
    (page_of("int8"), 2 * 16 * 8 * (128 + 2)),
    (page_of("float32", value=None, head_dim=2), 16 * 8 * 2 * 4),  # statistics
    (page_of("int8", value=codec_spec("bfloat16")), 16_640 + 32_768),
]


def test_bytes_of_pages_with_positions_and_keys_before_rope():
    for page, num_bytes in PAGE_BYTES:
        assert page.data_bytes == page.page_bytes == num_bytes
    # 16 slots need 64 bytes, rounded up to one vector of 128 elements of 2 bytes
    for heads in (1, 8):
        plain, page = page_of(heads=heads), page_of(heads=heads, positions=True)
        assert page.positions_offset_bytes == plain.page_bytes
        assert page.page_bytes == plain.page_bytes + 256
    # pools are per class: equal bytes, but the pages are not interchangeable
    after, before = page_of(), page_of(rotated=False)
    assert before.page_bytes == after.page_bytes
    assert before != after
    assert len({after: 1, before: 2, page_of(): 3}) == 2

    page = page_of(tokens=16)
    assert [page.pages_for(slots) for slots in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]


@given(
    key=st.sampled_from(sorted(CODECS)),
    value=st.none() | st.sampled_from(sorted(CODECS)).map(codec_spec),
    heads=st.integers(1, 9),
    tokens=st.integers(1, 33),
    head_dim=st.integers(1, 17).map(lambda eights: 8 * eights),
    positions=st.booleans(),
)
def test_pages_are_aligned_and_padded_by_less_than_a_cache_line(
    key, value, heads, tokens, head_dim, positions
):
    shape = {"heads": heads, "tokens": tokens, "head_dim": head_dim, "positions": positions}
    page = page_of(key, value=value, **shape)
    content = page.data_bytes + (4 * tokens if positions else 0)

    assert page.page_bytes % 64 == 0
    assert page.positions_offset_bytes % 4 == 0
    assert page.positions_offset_bytes >= page.data_bytes
    assert page.page_bytes % page.alignment_bytes == 0
    between = sum(map(len, page.placed))  # one byte if floats follow single bytes
    assert 0 <= page.page_bytes - content < page.alignment_bytes + 4 + between


@given(
    key=st.sampled_from(sorted(CODECS)),
    value=st.sampled_from(sorted(CODECS)),
    heads=st.integers(1, 5),
    tokens=st.integers(1, 33),
    head_dim=st.sampled_from((8, 24, 64, 80, 128, 320)),
)
def test_planes_are_consecutive_with_codes_first(key, value, heads, tokens, head_dim):
    shape = {"heads": heads, "tokens": tokens, "head_dim": head_dim, "positions": True}
    page = page_of(key, value=codec_spec(value), **shape)
    placed = sorted(chain(*page.placed), key=lambda one: one.offset_bytes)

    assert placed[:2] == [parts[0] for parts in page.placed]
    assert placed[0].offset_bytes == 0
    for before, after in pairwise(placed):
        assert 0 <= after.offset_bytes - before.end_bytes < 4
    for one in placed:
        assert one.offset_bytes % ELEMENT_BYTES[one.plane.dtype] == 0
        assert one.shape == (heads, 1 if one.plane.per_page else tokens, one.plane.width)
    assert placed[-1].end_bytes <= page.positions_offset_bytes


def test_groups_have_pages_unique_names_and_unordered_slots_positions():
    for name, word in (("head_dim", "width"), ("heads", "heads"), ("tokens", "tokens")):
        with pytest.raises(ConfigError, match=f"{word} >= 1, got 0"):
            page_of(**{name: 0})
    with pytest.raises(ConfigError, match="need pages with positions"):
        LaneGroup(name="kv", page_class=page_of(), layers=(0,), ordered=False)

    LaneGroup(name="sums", page_class=page_of(), layers=(0,), ordered=False, private=True)
    group = LaneGroup(name="kv", page_class=page_of(), layers=(0,))
    with pytest.raises(ConfigError, match="unique names"):
        CacheLayout((group, group))
    with pytest.raises(ConfigError, match="unique names"):
        CacheLayout(())


def test_sequence_of_one_token_needs_one_page_per_lane():
    layout = CacheLayout(
        (
            LaneGroup(name="full", page_class=page_of(), layers=(0, 1)),
            LaneGroup(name="near", page_class=page_of(), layers=(2,), window=64),
            LaneGroup(name="int8", page_class=page_of("int8"), layers=(3,)),
        )
    )
    assert layout.smallest_sequence_bytes == 3 * 65_536 + 33_280
    assert layout.page_classes == (page_of(), page_of("int8"))


def window_group(window, tokens_per_page):
    page = page_of(heads=1, head_dim=2, tokens=tokens_per_page)
    return LaneGroup(name="kv", page_class=page, layers=(0,), window=window)


def peak_slots_and_pages(group, chunks):
    """The peak slots and pages of a lane while it grows by these chunks."""
    memory = KVMemory(CacheLayout((group,)), 64 * 1024, 1)
    row, table = np.array([memory.start()]), memory.tables["kv"]
    peaks = []
    for chunk in chunks:
        memory.grow(row, np.array([chunk], dtype=np.int32))
        peaks.append((int(table.num_slots[0, 0]), int(table.num_pages[0, 0])))
    return tuple(map(max, zip(*peaks, strict=True)))


@pytest.mark.parametrize("per_page", [1, 2, 3, 4, 5])
def test_window_lane_bound_is_tight(per_page):
    for window, chunk in product(range(1, 11), range(1, 9)):
        group = window_group(window, per_page)
        num_chunks = 2 * (window + per_page) + 6  # every alignment of chunks and pages
        tokens = num_chunks * chunk

        slots, pages = peak_slots_and_pages(group, [chunk] * num_chunks)

        bound = group.slots_at_most(tokens, chunk)
        assert slots <= bound
        assert bound - slots < per_page
        assert pages * group.page_class.page_bytes <= group.bytes_at_most(tokens, chunk)
        assert group.page_class.pages_for(bound) - pages <= 1


@given(
    window=st.integers(1, 20),
    per_page=st.integers(1, 6),
    chunks=st.lists(st.integers(1, 9), min_size=1, max_size=40),
)
def test_chunks_of_different_lengths_stay_within_the_bound_of_the_largest(window, per_page, chunks):
    group = window_group(window, per_page)

    slots, pages = peak_slots_and_pages(group, chunks)

    assert slots <= group.slots_at_most(sum(chunks), max(chunks))
    assert pages * group.page_class.page_bytes <= group.bytes_at_most(sum(chunks), max(chunks))


def test_bytes_at_max_count_every_lane_and_single_tokens_reach_the_bound():
    for window, per_page in product(range(1, 30), range(1, 8)):
        group = window_group(window, per_page)

        slots, pages = peak_slots_and_pages(group, [1] * (window + 2 * per_page))

        assert slots == group.slots_at_most(window + 2 * per_page, 1)
        assert pages == group.page_class.pages_for(slots)

    page = page_of(heads=1)
    group = LaneGroup(name="kv", page_class=page, layers=(0, 1), lanes_per_layer=8, window=64)

    assert group.num_lanes == 16
    assert group.bytes_at_most(1000, 16) == 6 * 16 * page.page_bytes  # 63 + 16 + 15 = 94 slots
    assert window_group(512, 4).slots_at_most(10, 64) == 10  # a short sequence
    group = window_group(None, 4)
    assert group.slots_at_most(1000, 64) == 1000
    assert group.bytes_at_most(1000, 64) == 250 * group.page_class.page_bytes


# ---- options -------------------------------------------------------------------------------------


Colour = Literal["red", "green"]


@dataclass(frozen=True, kw_only=True)
class Paint:
    colour: Colour = option("red", help="its colour", flag="paint-colour")
    coats: int | None = option(None, help="layers of it")
    can: MaybeSize = option("auto", help="size of the can", parse=parse_size_or("auto"))

    def __post_init__(self) -> None:
        check_options(self)


def test_fields_are_checked_by_choice_or_type_and_parsed_once():
    assert Paint(colour="green").colour == "green"

    expected = "expected paint-colour to be one of red, green, got 'gren': did you mean green"
    with pytest.raises(ConfigError, match=expected):
        Paint(colour="gren")
    assert choices_of(Colour) == ("red", "green")
    assert choices_of(str) == choices_of(int | None) == ()
    assert Paint(coats=2).coats == 2
    with pytest.raises(ConfigError, match="expected coats to be int or None, got '2'"):
        Paint(coats="2")

    paint = Paint(can="2KiB")
    assert (Paint().can, paint.can) == (None, 2048)
    assert replace(paint, coats=1).can == 2048
    assert replace(Paint(), coats=1).can is None
    with pytest.raises(ConfigError, match=r"--can: 'much' is not a size: .*, or auto$"):
        Paint(can="much")


@pytest.mark.parametrize("value", [None, 3, "", "purple"])
def test_invalid_choice_without_a_near_match_lists_all_choices(value):
    with pytest.raises(ConfigError, match=r"one of red, green, got .*[^?]$"):
        require_choice("colour", value, ("red", "green"))


PARSED = {"64MiB": 64 * 1024**2, "1.5GiB": 3 * 1024**3 // 2, "1TiB": 1024**4, "8MB": 8_000_000}
PARSED |= {"8 mb": 8_000_000, "2kB": 2000, "0.1KiB": 102, "4096": 4096, "4096B": 4096}
PARSED |= {4096: 4096, "0": 0}
SHOWN = {0: "0 B", 1023: "1023 B", 1024: "1.00 KiB", 3 * 1024**3 // 2: "1.50 GiB"}
SHOWN |= {4608 * 1024**3: "4.50 TiB", -2048: "-2.00 KiB"}
ROUNDED = {1: "1KiB", 1024 * 1000: "1000KiB", 2**20: "1MiB", 12672 * 1024: "12.5MiB"}
ROUNDED |= {2**26 - 1: "64MiB", 2**26 + 1: "65MiB", 2**44: "16777216MiB"}


def test_sizes_are_parsed_shown_in_binary_units_and_rounded_up_in_options():
    for text, size_bytes in PARSED.items():
        assert parse_size(text) == size_bytes
    for size_bytes, text in SHOWN.items():
        assert format_size(size_bytes) == text
    for size_bytes, text in ROUNDED.items():
        assert option_size(rounded_size(size_bytes)) == text
        assert parse_size(text) == rounded_size(size_bytes) >= size_bytes


@pytest.mark.parametrize(
    "text",
    [
        *("-1", "-64MiB", -1, "", "MiB", "64M", "64 miles", "1e9", "nan", "inf", "1,000"),
        *("٣MiB", True),
        *("9" * 5_000, "9" * 400 + "MiB", "1." + "9" * 400 + "GiB", 2**63, 10**4_000, "8388608TiB"),
    ],
)
def test_invalid_size_is_rejected_with_an_example(text):
    with pytest.raises(ConfigError, match="64MiB"):
        parse_size(text)


@given(st.integers(min_value=0, max_value=1 << 50))
def test_parse_size_of_format_size_is_equal_within_rounding(size_bytes):
    assert parse_size(format_size(size_bytes)) == pytest.approx(size_bytes, rel=0.006, abs=1)


SOURCE = Path(layout.__file__).parents[1]


def test_texts_are_filled_in_and_every_limit_is_used():
    error = refused(limits.UNUSED_SWAP_SPACE, num_bytes=4096)
    assert str(error) == (
        "--swap-space 4,096 B would not be used, because --preempt recompute swaps no requests: "
        "use --preempt auto, swap or hybrid, or leave out --swap-space"
    )

    used = Counter(
        node.attr
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
    )
    names = [name for name, value in vars(limits).items() if value in LIMITS and name != "LIMITS"]

    assert len(names) == len(LIMITS)
    assert [name for name in names if not used[name]] == []
