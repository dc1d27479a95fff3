"""Lane groups of a model and the bytes of their pages."""

import dataclasses

import numpy as np
import pytest

from quire.errors import ConfigError
from quire.kv.memory import KVMemory
from quire.layout.codec_names import CODECS, codec_spec
from quire.layout.codecs import CodecSpec
from quire.layout.layout import layout_fingerprint, layout_for, statistics_used
from quire.layout.model import LayerSpec, StateSpec
from quire.layout.pages import KEY, NUMBERS, VALUE, CacheLayout, LaneGroup, PageClass, PlaneSpec
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


def test_page_holds_all_heads_of_a_layer_without_eviction():
    layout = layout_of(None, None)

    assert bytes_by_name(layout) == {"full": 2 * 2 * 16 * 32 * 2}
    assert layout.groups[0].num_lanes == 2
    assert layout.groups[0].ordered


def test_only_evicting_layers_store_positions():
    layout = layout_of(None, 64, None, evicting=True)

    assert bytes_by_name(layout) == {"full": 4096 + 64, "window_64": 4096}
    assert [group.ordered for group in layout.groups] == [False, True]


def test_pre_rope_keys_apply_to_all_layers_or_none():
    layouts = [layout_of(None, 64, evicting=True, rotated=rotated) for rotated in (True, False)]

    assert [[g.page_class.rotated for g in layout.groups] for layout in layouts] == [
        [True, True],
        [False, False],
    ]
    assert bytes_by_name(layouts[0]) == bytes_by_name(layouts[1])


def test_heads_apart_applies_to_evicting_layers_only():
    layout = layout_of(None, 64, None, evicting=True, heads_apart=True)
    full, window = layout.groups

    assert bytes_by_name(layout) == {"full": 2048 + 64, "window_64": 4096}
    assert (full.num_lanes, full.lanes_per_layer, full.page_class.heads) == (4, 2, 1)
    assert (window.num_lanes, window.page_class.heads) == (1, 2)
    assert layout_of(None, heads_apart=True) == layout_of(None)


def test_statistics_pages_have_one_float32_plane_with_a_record_per_head():
    """A slot of an attention sum is 4 bytes; a ring of 8 holds 4 queries of 32 and a position."""
    layout = layout_of(None, 64, evicting=True, statistics=STATISTICS)

    assert bytes_by_name(layout) == {
        "full": 4096 + 64,
        "full.attention_sum.mean": 2 * 16 * 4,
        "full.query_ring.8": 2 * 8 * (4 * 32 + 1) * 4,
        "full.query_moments.4": 2 * 4 * (1 + 32 + 32 * 32) * 4 + 32,  # whole cache lines
        "full.residual_similarity": 64,
        "window_64": 4096,
    }


def test_statistics_have_one_lane_per_head_with_heads_apart():
    layout = layout_of(None, None, evicting=True, heads_apart=True, statistics=STATISTICS)

    assert [group.num_lanes for group in layout.groups] == [4] * 5
    assert bytes_by_name(layout) == {
        "full": 2048 + 64,
        "full.attention_sum.mean": 64,
        "full.query_ring.8": 8 * (4 * 32 + 1) * 4 + 32,
        "full.query_moments.4": 4 * (1 + 32 + 32 * 32) * 4 + 48,
        "full.residual_similarity": 64,
    }


def test_slot_statistics_follow_their_group_and_others_have_fixed_records():
    layout = layout_of(None, evicting=True, statistics=STATISTICS)
    sums, ring, moments, shift = layout.groups[1:]

    assert layout.followers_of("full") == (sums,)
    assert sums.page_class.tokens == layout.groups[0].page_class.tokens
    assert [group.records for group in (sums, ring, moments, shift)] == [None, 8, 1, 1]
    assert [group.page_class.tokens for group in (ring, moments, shift)] == [8, 1, 1]
    assert all(group.private and not group.ordered for group in layout.groups[1:])


def test_statistics_of_equal_shape_share_a_page_class():
    layout = layout_of(
        None, evicting=True, statistics=(AttentionSum(), SquareSum(), AttentionSum())
    )

    assert [group.name for group in layout.groups[1:]] == [
        "full.attention_sum.mean",
        "full.square_sum.mean",
    ]
    assert len(layout.page_classes) == 2


def test_sequence_of_one_token_has_all_fixed_records():
    layout = layout_of(None, None, evicting=True, statistics=(QueryRing(window=8),))
    ring = layout.groups[1]

    assert layout.smallest_sequence_bytes == 2 * (4160 + 8256)
    assert [ring.bytes_at_most(tokens, 1) for tokens in (0, 1, 1000)] == [0, 2 * 8256, 2 * 8256]


def test_sequence_uses_the_groups_of_its_own_statistics():
    layout = layout_of(None, 64, evicting=True, statistics=STATISTICS)

    assert statistics_used(layout, ()) == frozenset()
    assert statistics_used(layout, (ResidualSimilarity(), SquareSum(), AttentionSum())) == {
        "full.attention_sum.mean",
        "full.residual_similarity",
    }
    assert statistics_used(layout_of(64), STATISTICS) == frozenset()


def test_model_with_window_layers_only_has_no_statistics():
    assert bytes_by_name(layout_of(64, 64, evicting=True, statistics=STATISTICS)) == {
        "window_64": 4096
    }


def page_class(*, tokens=4, value=True, positions=False):
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
    ],
)
def test_private_group_has_records_and_no_window(rules, message):
    with pytest.raises(ConfigError, match=message):
        LaneGroup(name="x", page_class=page_class(value=False), layers=(0,), **rules)


KV = LaneGroup(name="kv", page_class=page_class(), layers=(0, 1))
WINDOW = LaneGroup(name="window", page_class=page_class(), layers=(2, 3), window=8)
SUMS = LaneGroup(name="sums", page_class=page_class(value=False), layers=(0, 1), of="kv")


@pytest.mark.parametrize(
    ("of", "layers", "tokens"),
    [
        ("nothing", (0, 1), 4),
        ("window", (2, 3), 4),
        ("sums", (0, 1), 4),
        ("kv", (0,), 4),
        ("kv", (0, 1), 8),
    ],
)
def test_follower_with_other_lanes_or_pages_is_rejected(of, layers, tokens):
    page = page_class(tokens=tokens, value=False)
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


def test_fingerprint_ignores_private_groups():
    statistics = (AttentionSum(), QueryRing())

    with_statistics = layout_of_codec("int8", statistics=statistics)
    assert layout_fingerprint(with_statistics) == layout_fingerprint(layout_of_codec("int8"))


CHANGED = {
    "rule": "int4_hadamard",
    "code_bits": 2,
    "codes": "int8",
    "scaled": "vector",
    "has_zeros": False,
    "group": 16,
    "percent": 1.0,
    "equalise": 1,
    "constants": ("scale",),
}


@pytest.mark.parametrize("attribute", CHANGED)
def test_fingerprint_depends_on_each_parameter_of_a_codec(attribute):
    layout = layout_of_codec("int4")

    changed = with_key_codec(layout, **{attribute: CHANGED[attribute]})

    assert layout_fingerprint(changed) != layout_fingerprint(layout)


def test_fingerprint_has_all_parameters_of_codecs():
    texts = {"name", "summary", "options"}

    assert {field.name for field in dataclasses.fields(CodecSpec)} == {*CHANGED, *texts}


def test_fingerprints_of_layouts_differ():
    chunks = (LayerSpec(chunk=64), LayerSpec(chunk=64), None)
    unjoined = LayerSpec(heads=dataclasses.replace(CACHE_KINDS["latent"].heads[0], latent=None))
    state = LayerSpec(attends=False, state=StateSpec(conv=(8, 4), recurrent=(2, 4, 4)))
    specs = [
        *CACHE_KINDS.values(),
        *(small_spec(*chunks), small_spec(unjoined, unjoined), small_spec(state, state)),
    ]
    layouts = [
        *(layout_of_codec(f"{codec}+plain=float32") for codec in CODECS),
        layout_of_codec("int8/int4"),
        layout_of_codec("int4/int8"),
        layout_of_codec("int8", evicting=True),
        layout_of_codec("int8", evicting=True, heads_apart=True),
        layout_of_codec("int8", rotated=False),
        layout_for(model_of(None, 32), codec="int8", page_tokens=16),
        layout_for(model_of(64, None), codec="int8", page_tokens=16),
        layout_for(model_of(None, 64), codec="int8", page_tokens=32),
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
