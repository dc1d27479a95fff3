"""Pages, the number of sequences that fit, and the limiting resource."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError, UnknownName
from quire.kv.memory import KVMemory
from quire.layout.eviction import KEEP_ALL, PREFILL_AND_DECODE, EvictionSpec
from quire.layout.layout import layout_for
from quire.layout.model import LayerSpec, ModelSpec
from quire.plan.capacity import (
    capacity,
    layer_kinds,
    sequence_bytes,
    state_bytes,
    token_bytes,
)
from quire.scheduler.peaks import Need, Peaks
from support.model_specs import CACHE_KINDS


def model_of(*windows: int | None, **changes: Any) -> ModelSpec:
    fields: dict[str, Any] = {
        "architecture": "x",
        "num_layers": len(windows),
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "hidden_size": 64,
        "intermediate_size": 128,
        "vocab_size": 100,
        "max_positions": 1000,
        "tied_embeddings": True,
        "gated_mlp": True,
        "layers": tuple(LayerSpec(window=window) for window in windows),
    }
    return ModelSpec(**(fields | changes))


PAGE_BYTES = 2 * 2 * 16 * 16 * 2  # K and V, heads, tokens, head_dim, bytes of fp16


def test_page_holds_keys_and_values_of_all_heads_of_one_layer():
    layout = layout_for(model_of(None, None), page_tokens=16, codec="float16")

    assert [group.page_class.page_bytes for group in layout.groups] == [PAGE_BYTES]
    assert layout.groups[0].layers == (0, 1)


@pytest.mark.parametrize(("tokens", "pages"), [(1, 3), (16, 3), (17, 6), (160, 30), (161, 33)])
def test_sequence_uses_whole_pages_in_every_layer(tokens: int, pages: int):
    layout = layout_for(model_of(None, None, None), page_tokens=16, codec="float16")

    assert sequence_bytes(layout, tokens) == pages * PAGE_BYTES


def test_window_layers_are_bounded_by_the_pages_of_their_window():
    """W = 32, pages of 16: 32 tokens that start inside a page touch 3 pages."""
    layout = layout_for(model_of(None, 32, None, 32), page_tokens=16, codec="float16")

    assert [group.layers for group in layout.groups] == [(0, 2), (1, 3)]
    assert sequence_bytes(layout, 16) == 4 * PAGE_BYTES
    assert sequence_bytes(layout, 320) == (2 * 20 + 2 * 3) * PAGE_BYTES


@given(
    st.integers(0, 400),
    st.integers(1, 64),
    st.lists(st.none() | st.integers(1, 200), min_size=1, max_size=4),
)
def test_pages_hold_at_min_the_kv_bytes_of_the_model(
    tokens: int, page_tokens: int, windows: list[int | None]
):
    model = model_of(*windows)
    layout = layout_for(model, page_tokens=page_tokens, codec="float16")
    needed = model.kv_bytes(tokens, 2)

    assert needed <= sequence_bytes(layout, tokens)
    assert sequence_bytes(layout, tokens) <= needed + len(windows) * 2 * page_tokens * 128


# one token in float16, in int8, where each vector has a scale of 2 B, and the pages of 16 tokens:
#   2 heads x (8 + 8):  2 x 16 x 2 = 64 B;   2 x (10 + 10) = 40 B;  1,024 B and 640 B
#   2 heads x (8 + 4):  2 x 12 x 2 = 48 B;   2 x (10 + 6) = 32 B;     768 B and 512 B
#   1 head x (32 + 32): 64 x 2 = 128 B;      34 + 34 = 68 B;        2,048 B and 1,088 B
#   2 values of 32 + 8: 2 x 40 x 2 = 160 B;     2 x (34 + 10) = 88 B; 2,560 B and 1,408 B
#   states of 8 x 3 and 2 x 4 x 4 in float32: 224 B, one page of 256 B for all tokens
#   a latent of 32 + 8: 40 x 2 = 80 B;    34 + 16 = 50 B (8 not quantized); 1,280 B and 832 B
#   with an index key of 16: 32 B more, not quantized;                      1,792 B and 1,344 B
# 40 tokens are 3 pages; the window of 8 and the chunk of 32 then need one, of tokens 32 to 39
BYTES_BY_HAND = [
    ("unequal", "float16", 3 * 48, 0, (2 * 3 + 1) * 768),
    ("unequal", "int8", 3 * 32, 0, (2 * 3 + 1) * 512),
    ("by_layer", "float16", 2 * 64 + 128, 0, 2 * 1024 + 3 * 2048),
    ("by_layer", "int8", 2 * 40 + 68, 0, 2 * 640 + 3 * 1088),
    ("shared", "float16", 64 + 64 + 128, 64 + 2 * 64 + 128, (1 + 3) * 1024 + 3 * 2048),
    ("shared", "int8", 40 + 40 + 68, 40 + 2 * 40 + 68, (1 + 3) * 640 + 3 * 1088),
    ("keys_of_values", "float16", 64 + 160, 0, 1024 + 3 * 2560),
    ("keys_of_values", "int8", 40 + 88, 0, 640 + 3 * 1408),
    ("state", "float16", 2 * 64, 0, 2 * 3 * 1024 + 2 * 256),
    ("state_alone", "int8", 0, 0, 2 * 256),
    ("chunked", "float16", 3 * 64, 0, (2 + 3) * 1024),
    ("chunked", "int8", 3 * 40, 0, (2 + 3) * 640),
    ("latent", "float16", 2 * 80, 0, 2 * 3 * 1280),
    ("latent", "float16/int8", 2 * 50, 0, 2 * 3 * 832),
    ("indexed", "float16", 80 + 32 + 80, 0, 3 * 1792 + 3 * 1280),
    ("indexed", "float16/int8", 50 + 32 + 50, 0, 3 * 1344 + 3 * 832),
]


@pytest.mark.parametrize(("kind", "codec", "per_token", "saved", "held"), BYTES_BY_HAND)
def test_bytes_of_each_kind_are_those_of_the_pool(
    kind: str, codec: str, per_token: int, saved: int, held: int
):
    """A sequence that grows to 40 tokens; its plan is for the peak, before pages are freed."""
    model = CACHE_KINDS[kind]
    layout = layout_for(model, page_tokens=16, codec=codec)
    kinds = layer_kinds(layout)
    memory = KVMemory(layout, 1 << 20, 2)
    rows = np.array([memory.start()])
    for tokens in (8, 8, 8, 8, 7, 1):
        memory.grow(rows, np.array([tokens], dtype=np.int32))

    states = sum(layer.state is not None for layer in model.layers)
    assert state_bytes(layout) == 256 * states
    assert token_bytes(layout) == sum(k.bytes_per_token for k in kinds.values()) == per_token
    assert sum(k.saved_bytes_per_token for k in kinds.values()) == saved
    assert memory.row_bytes(int(rows[0])) == held
    assert sum(pool.used_bytes for pool in memory.pools.values()) == held
    if codec == "float16":
        assert model.kv_bytes_per_token(2) == per_token
    peak = sequence_bytes(layout, 40)
    assert held <= memory.peak_bytes[rows[0]] <= peak
    bounded = [group for group in layout.groups if group.bounded]
    # one more page of each window and chunk
    assert peak == held + sum(g.num_lanes * g.page_class.page_bytes for g in bounded)
    for group in (group for group in layout.groups if not group.private):
        bound = kinds[group.name].max_bytes
        assert (bound is not None) == group.bounded
        assert bound is None or bound == 2 * group.page_class.page_bytes * group.num_lanes


def test_a_memory_without_room_for_one_token_names_the_page_of_each_kind():
    with pytest.raises(ConfigError, match="2,048 B in each of 1 layer and a page of 1,024 B in"):
        fits(4095, 1, model=CACHE_KINDS["by_layer"])


def fits(kv_bytes: int, tokens: int, batch: int = 1, model: ModelSpec | None = None):
    model = model or model_of(None, None)
    layout = layout_for(model, page_tokens=16, codec="float16")
    return capacity(model, kv_bytes, layout=layout, sequence_tokens=tokens, batch=batch)


def test_sequences_are_counted_in_whole_pages():
    """A sequence of 100 tokens takes 7 pages in each of 2 layers; 30 pages hold two of them."""
    result = fits(30 * PAGE_BYTES + 5, 100, batch=2)

    assert (result.pool_pages, result.pages_per_sequence, result.sequences) == (30, 14, 2)
    assert result.limit == "none"
    assert fits(30 * PAGE_BYTES, 100, batch=3).limit == "memory"


def test_longest_sequence_is_limited_by_memory_or_context():
    """30 pages, 15 a layer, hold 240 tokens, and the last output token has no KV.

    1,000 pages hold more than the context of 1,000.
    """
    by_memory = fits(30 * PAGE_BYTES, 1)
    by_context = fits(1000 * PAGE_BYTES, 1)

    assert (by_memory.longest_tokens, by_memory.longest_limit) == (241, "memory")
    assert (by_context.longest_tokens, by_context.longest_limit) == (1000, "context")


@given(
    kv_bytes=st.integers(1 << 16, 1 << 28),
    tokens=st.integers(1, 900),
    codec=st.sampled_from(["float16", "int8", "int4"]),
    cap=st.none() | st.integers(16, 600),
    kind=st.none() | st.sampled_from(sorted(CACHE_KINDS)),
)
def test_the_engine_holds_what_is_planned(
    kv_bytes: int, tokens: int, codec: str, cap: int | None, kind: str | None
):
    """Slabs of the arena are counted: a plan of bytes alone would promise more."""
    model = model_of(None, None, None) if kind is None else CACHE_KINDS[kind]
    cap = cap if kind is None else None
    layout = layout_for(model, page_tokens=16, codec=codec, evicting=cap is not None)
    held = capacity(model, kv_bytes, layout=layout, sequence_tokens=tokens, batch=1, retained=cap)
    peaks = Peaks(KVMemory(layout, kv_bytes, 4), 1)
    eviction = EvictionSpec(cap=cap, every=1, when=PREFILL_AND_DECODE) if cap else KEEP_ALL
    counts = peaks.counts([Need(tokens, eviction=eviction)])[0]

    assert min(1000, 1 + peaks.longest_sequence(1000, eviction)) == held.longest_tokens
    assert held.sequences == 0 or peaks.fit_alone(counts * held.sequences)
    assert not peaks.fit_alone(counts * (held.sequences + 1))


def test_no_sequence_longer_than_the_context_fits():
    result = fits(10_000 * PAGE_BYTES, 1001)

    assert result.sequences == 0
    assert result.limit == "context"


def test_pool_smaller_than_one_token_is_refused_with_the_page_size():
    with pytest.raises(ConfigError, match=r"a page of 2,048 B in each of 2 layers = 4,096 B"):
        fits(2 * 2048 - 1, 1)


@pytest.mark.parametrize(("tokens", "batch"), [(0, 1), (1, 0), (-5, 1)])
def test_lengths_and_batches_below_one_are_refused(tokens: int, batch: int):
    with pytest.raises(ConfigError, match="expected 1 or more"):
        fits(1 << 20, tokens, batch)


def test_a_page_without_tokens_and_an_unknown_codec_are_refused():
    with pytest.raises(ConfigError, match="tokens >= 1"):
        layout_for(model_of(None), page_tokens=0, codec="float16")
    with pytest.raises(UnknownName):
        layout_for(model_of(None), page_tokens=16, codec="int9")
