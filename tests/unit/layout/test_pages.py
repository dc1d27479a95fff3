"""Page classes, lane groups and layouts: bytes, planes and bounds of window lanes."""

from itertools import chain, pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError, UnknownName
from quire.kv.memory import KVMemory
from quire.layout.codec_names import CODECS, codec_spec
from quire.layout.codecs import ELEMENT_BYTES
from quire.layout.pages import KEY, VALUE, CacheLayout, LaneGroup, PageClass, PlaneSpec


def page_class(codec="bfloat16", *, value="same", heads=8, tokens=16, head_dim=128, **options):
    key = codec_spec(codec)
    planes = [PlaneSpec(KEY, key, head_dim, heads)]
    if value is not None:
        planes.append(PlaneSpec(VALUE, key if value == "same" else value, head_dim, heads))
    return PageClass(planes=tuple(planes), tokens=tokens, **options)


# ---- bytes of a page -----------------------------------------------------------------------------


def test_page_of_16_tokens_8_heads_of_128_in_bfloat16_is_64_kib():
    page = page_class()

    assert page.data_bytes == 2 * 16 * 8 * 128 * 2 == page.page_bytes == 65_536


def test_int8_page_has_two_scale_bytes_per_vector():
    page = page_class("int8")

    assert page.data_bytes == 2 * 16 * 8 * (128 + 2) == page.page_bytes == 33_280


def test_positions_add_four_bytes_per_slot_rounded_up_to_a_vector():
    """16 slots need 64 bytes, rounded up to one vector of 128 elements of 2 bytes."""
    for heads in (1, 8):
        plain, page = page_class(heads=heads), page_class(heads=heads, positions=True)
        assert page.positions_offset_bytes == plain.page_bytes
        assert page.page_bytes == plain.page_bytes + 256


def test_pages_with_pre_rope_keys_are_a_separate_class():
    """Pools are per class: equal bytes, but the pages are not interchangeable."""
    after, before = page_class(), page_class(rotated=False)

    assert before.page_bytes == after.page_bytes
    assert before != after
    assert len({after: 1, before: 2, page_class(): 3}) == 2


def test_statistics_pages_have_one_plane():
    page = page_class("float32", value=None, head_dim=2)

    assert page.page_bytes == page.data_bytes == 16 * 8 * 2 * 4


def test_keys_and_values_can_have_different_codecs():
    page = page_class("int8", value=codec_spec("bfloat16"))

    assert page.page_bytes == 16_640 + 32_768


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
    page = page_class(
        key, value=value, heads=heads, tokens=tokens, head_dim=head_dim, positions=positions
    )

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
    page = page_class(
        key, value=codec_spec(value), heads=heads, tokens=tokens, head_dim=head_dim, positions=True
    )

    placed = sorted(chain(*page.placed), key=lambda one: one.offset_bytes)

    assert placed[:2] == [parts[0] for parts in page.placed]
    assert placed[0].offset_bytes == 0
    for before, after in pairwise(placed):
        assert 0 <= after.offset_bytes - before.end_bytes < 4
    for one in placed:
        assert one.offset_bytes % ELEMENT_BYTES[one.plane.dtype] == 0
        assert one.shape == (heads, 1 if one.plane.per_page else tokens, one.plane.width)
    assert placed[-1].end_bytes <= page.positions_offset_bytes


def test_pages_for_rounds_up_to_whole_pages():
    page = page_class(tokens=16)

    assert [page.pages_for(slots) for slots in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("name", "word"), [("head_dim", "width"), ("heads", "heads"), ("tokens", "tokens")]
)
def test_empty_page_is_rejected(name, word):
    with pytest.raises(ConfigError, match=f"{word} >= 1, got 0"):
        page_class(**{name: 0})


def test_unknown_codec_error_suggests_near_names():
    with pytest.raises(UnknownName, match=r"unknown codec 'float8': did you mean"):
        codec_spec("float8")


# ---- groups and layouts --------------------------------------------------------------------------


def test_unordered_slots_must_store_positions():
    with pytest.raises(ConfigError, match="need pages with positions"):
        LaneGroup(name="kv", page_class=page_class(), layers=(0,), ordered=False)

    LaneGroup(name="sums", page_class=page_class(), layers=(0,), ordered=False, private=True)


@pytest.mark.parametrize(("window", "ordered"), [(0, True), (-1, True), (8, False)])
def test_window_needs_ordered_lanes_and_at_min_one_token(window, ordered):
    with pytest.raises(ConfigError, match="a window needs ordered lanes and at least 1 token"):
        LaneGroup(
            name="kv",
            page_class=page_class(positions=True),
            layers=(0,),
            window=window,
            ordered=ordered,
        )


def test_one_head_pages_have_a_lane_per_head_and_layer():
    group = LaneGroup(name="kv", page_class=page_class(heads=1), layers=(1, 4), lanes_per_layer=8)

    assert group.num_lanes == 16


def test_groups_of_a_layout_must_have_unique_names():
    group = LaneGroup(name="kv", page_class=page_class(), layers=(0,))

    with pytest.raises(ConfigError, match="unique names"):
        CacheLayout((group, group))
    with pytest.raises(ConfigError, match="unique names"):
        CacheLayout(())


def test_sequence_of_one_token_needs_one_page_per_lane():
    layout = CacheLayout(
        (
            LaneGroup(name="full", page_class=page_class(), layers=(0, 1)),
            LaneGroup(name="near", page_class=page_class(), layers=(2,), window=64),
            LaneGroup(name="int8", page_class=page_class("int8"), layers=(3,)),
        )
    )

    assert layout.smallest_sequence_bytes == 3 * 65_536 + 33_280
    assert layout.page_classes == (page_class(), page_class("int8"))


# ---- peak of a lane ------------------------------------------------------------------------------


def window_group(window, tokens_per_page):
    page = page_class(heads=1, head_dim=2, tokens=tokens_per_page)
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


def test_single_token_steps_reach_the_page_bound_exactly():
    for window, per_page in product(range(1, 30), range(1, 8)):
        group = window_group(window, per_page)

        slots, pages = peak_slots_and_pages(group, [1] * (window + 2 * per_page))

        assert slots == group.slots_at_most(window + 2 * per_page, 1)
        assert pages == group.page_class.pages_for(slots)


def test_lane_without_a_window_holds_every_token():
    group = window_group(None, 4)

    assert group.slots_at_most(1000, 64) == 1000
    assert group.bytes_at_most(1000, 64) == 250 * group.page_class.page_bytes


def test_bound_of_a_short_sequence_is_its_tokens():
    assert window_group(512, 4).slots_at_most(10, 64) == 10


def test_bytes_at_max_counts_every_lane():
    page = page_class(heads=1)
    group = LaneGroup(name="kv", page_class=page, layers=(0, 1), lanes_per_layer=8, window=64)

    assert group.bytes_at_most(1000, 16) == 6 * 16 * page.page_bytes  # 63 + 16 + 15 = 94 slots
