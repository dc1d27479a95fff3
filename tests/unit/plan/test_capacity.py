"""Sequences that fit, division of the memory, limits of containers, layers that stay resident."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError, UnknownName
from quire.kv.memory import KVMemory
from quire.layout.eviction import KEEP_ALL, PREFILL_AND_DECODE, EvictionSpec
from quire.layout.layout import layout_for
from quire.layout.model import ExtraSpec, HeadShape, LayerSpec, MixtureSpec, ModelSpec
from quire.plan.capacity import (
    CapacityVerdict,
    MemoryLayout,
    Workload,
    assess,
    auto_kv_memory,
    capacity,
    coded_weight_bytes,
    decode_share,
    estimate_activation_peak,
    hidden_state_bytes,
    layer_kinds,
    sequence_bytes,
    state_bytes,
    token_bytes,
)
from quire.plan.machine import container_free_bytes, container_total_bytes
from quire.plan.weights import SLOTS, best_batches, place_weights, planned_weights
from quire.scheduler.peaks import Need, Peaks
from support.model_specs import CACHE_KINDS, small_spec


def model_of(*windows: int | None) -> ModelSpec:
    return small_spec(*windows, head_dim=16)


PAGE_BYTES = 2 * 2 * 16 * 16 * 2  # K and V, heads, tokens, head_dim, bytes of fp16


def test_sequence_uses_whole_pages_in_every_layer_and_window():
    """W = 32, pages of 16: 32 tokens that start inside a page touch 3 pages."""
    layout = layout_for(model_of(None, None, None), page_tokens=16, codec="float16")
    for tokens, pages in ((1, 3), (16, 3), (17, 6), (160, 30), (161, 33)):
        assert sequence_bytes(layout, tokens) == pages * PAGE_BYTES
    layout = layout_for(model_of(None, 32, None, 32), page_tokens=16, codec="float16")
    assert [group.layers for group in layout.groups] == [(0, 2), (1, 3)]
    assert sequence_bytes(layout, 16) == 4 * PAGE_BYTES
    assert sequence_bytes(layout, 320) == (2 * 20 + 2 * 3) * PAGE_BYTES


@given(
    st.integers(0, 400),
    st.integers(1, 64),
    st.lists(st.none() | st.integers(1, 200), min_size=1, max_size=4),
)
def test_pages_hold_at_min_the_kv_bytes_of_the_model(tokens, page_tokens, windows):
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
def test_bytes_of_each_kind_are_those_of_the_pool(kind, codec, per_token, saved, held):
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


def fits(kv_bytes: int, tokens: int, batch: int = 1, model: ModelSpec | None = None):
    model = model or model_of(None, None)
    layout = layout_for(model, page_tokens=16, codec="float16")
    return capacity(model, kv_bytes, layout=layout, sequence_tokens=tokens, batch=batch)


def test_sequences_fit_in_whole_pages_up_to_memory_or_context():
    """A sequence of 100 tokens takes 7 pages in each of 2 layers; 30 pages hold two of them."""
    result = fits(30 * PAGE_BYTES + 5, 100, batch=2)
    assert (result.pool_pages, result.pages_per_sequence, result.sequences) == (30, 14, 2)
    assert result.limit == "none"
    assert fits(30 * PAGE_BYTES, 100, batch=3).limit == "memory"

    # 30 pages, 15 a layer, hold 240 tokens, and the last output token has no KV
    # 1,000 pages hold more than the context of 1,000
    by_memory = fits(30 * PAGE_BYTES, 1)
    by_context = fits(1000 * PAGE_BYTES, 1)

    assert (by_memory.longest_tokens, by_memory.longest_limit) == (241, "memory")
    assert (by_context.longest_tokens, by_context.longest_limit) == (1000, "context")
    too_long = fits(10_000 * PAGE_BYTES, 1001)
    assert (too_long.sequences, too_long.limit) == (0, "context")


@given(
    kv_bytes=st.integers(1 << 16, 1 << 28),
    tokens=st.integers(1, 900),
    codec=st.sampled_from(["float16", "int8", "int4"]),
    cap=st.none() | st.integers(16, 600),
    kind=st.none() | st.sampled_from(sorted(CACHE_KINDS)),
)
def test_the_engine_holds_what_is_planned(kv_bytes, tokens, codec, cap, kind):
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


def test_too_small_pools_numbers_below_one_and_unknown_codecs_are_refused():
    with pytest.raises(ConfigError, match="2,048 B in each of 1 layer and a page of 1,024 B in"):
        fits(4095, 1, model=CACHE_KINDS["by_layer"])
    with pytest.raises(ConfigError, match=r"a page of 2,048 B in each of 2 layers = 4,096 B"):
        fits(2 * 2048 - 1, 1)

    for tokens, batch in ((0, 1), (1, 0), (-5, 1)):
        with pytest.raises(ConfigError, match="expected 1 or more"):
            fits(1 << 20, tokens, batch)
    with pytest.raises(ConfigError, match="tokens >= 1"):
        layout_for(model_of(None), page_tokens=0, codec="float16")
    with pytest.raises(UnknownName):
        layout_for(model_of(None), page_tokens=16, codec="int9")


SIZES = {"head_dim": 4, "hidden_size": 16, "intermediate_size": 32, "vocab_size": 100}
MODEL = small_spec(None, None, **SIZES)
PARTS = {"total_bytes": 1000, "weights_bytes": 400, "activation_peak_bytes": 100}


def peak(model: ModelSpec, tokens: int, sampled_rows: int = 0, bytes_per_value: int = 2) -> int:
    options = {"sampled_rows": sampled_rows, "bytes_per_value": bytes_per_value}
    return estimate_activation_peak(model, max_num_batched_tokens=tokens, **options)


def test_kv_memory_is_the_remainder_after_weights_and_the_peak_of_activations():
    kv_bytes = auto_kv_memory(1000, 400, 100, 50)
    layout = MemoryLayout(headroom_bytes=50, kv_bytes=kv_bytes, **PARTS)

    assert kv_bytes == 450
    assert layout.unassigned_bytes == 0
    for headroom in (500, 501, 10_000):
        with pytest.raises(ConfigError, match=rf"total 1,000 B.*400 B.*100 B.*{headroom:,} B"):
            auto_kv_memory(1000, 400, 100, headroom)
    with pytest.raises(ConfigError, match=r"kv_memory=501 B does not fit: 450 B remain of 1000 B"):
        MemoryLayout(headroom_bytes=50, kv_bytes=501, **PARTS)

    # residual 2*16 values a token; attention 2*(4+2)*4 = 48; gated MLP 3*32 = 96; 2 bytes each
    # 10 tokens, no logits: 10 * (32 + 96) * 2 = 2560
    # 50 sampled rows: logits 50 * 100 * (2 + 8) = 50,000 > 1920, so 640 + 50,000
    assert peak(MODEL, 10) == 2560
    assert peak(MODEL, 10, sampled_rows=50) == 50_640
    with pytest.raises(ConfigError, match="max_num_batched_tokens=-1"):
        peak(MODEL, -1)


def test_activation_peak_counts_experts_per_token_widest_heads_and_folded_latents():
    """Two experts of 40 and a shared expert of 8 are wider than the dense 32: 3 * 88 per token."""
    sizes = {"num_layers": 2, "num_experts": 64, "experts_per_token": 2, "expert_size": 40}
    model = replace(MODEL, mixture=MixtureSpec(shared_size=8, **sizes))
    assert peak(model, 1, bytes_per_value=1) == 32 + 3 * 88

    # of each token and byte: 1 + 3 streams of 16, 2 layers of 5, and (4 + 1) * (60 + 40)
    wide = HeadShape(query_heads=4, kv_heads=1, key_dim=60, value_dim=40)
    extra = ExtraSpec(layer_width=5, streams=3)
    model = replace(MODEL, layers=(LayerSpec(), LayerSpec(heads=wide)), extra=extra)
    assert peak(model, 7) == 2 * 7 * (4 * 16 + 2 * 5 + 500)
    # in float32 between two layers: 3 streams, the embeddings, cosines and sines of 4 and of 60
    assert hidden_state_bytes(model, 7) == 4 * 7 * (3 * 16 + 2 * 5 + 2 * (4 + 60))

    # Of each token: a latent of 32 + 8; queries of 20 and outputs of 16 in 4 heads, and folded.
    # Folded queries of 40 and outputs over latents of 32 are more than keys of 20 and values of 16.
    folded = 40 + 4 * (20 + 16) + 4 * (40 + 32)
    model = replace(CACHE_KINDS["latent"], intermediate_size=1)
    assert peak(model, 7) == 2 * 7 * (2 * 32 + folded)


@pytest.mark.parametrize(
    ("kind", "attends", "kept"),
    [
        ("latent", True, 2 * 4 * (12 + 16) * 32),
        ("latent", False, 4 * (12 + 16) * 32),  # only one layer of two has a projection
        ("keys_of_values", True, 0),  # nothing projects a value that is stored itself
    ],
)
def test_projections_of_latents_are_not_quantized(kind: str, attends: bool, kept: int):
    """int8 saves 3 of 4 bytes of a weight, less a scale of 4 B per 32 weights."""
    model = CACHE_KINDS[kind]
    first = replace(model.layers[0], attends=attends)
    model = replace(model, layers=(first, *model.layers[1:]))
    saved_bytes = model.weight_bytes(4) - coded_weight_bytes(model, "int8", 4)

    coded = model.layer_parameters - kept + model.embedding_parameters
    assert saved_bytes == int(coded * (3 - 4 / 32))


SHAPE = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "hidden_size": 4096}
SHAPE |= {"intermediate_size": 14_336, "vocab_size": 128_256, "max_positions": 8192}
LLAMA_8B = small_spec(*[None] * 32, **SHAPE)
LAYOUT = layout_for(LLAMA_8B, page_tokens=16, codec="float16")


def assess_workload(kv_bytes: int, *workload: int) -> CapacityVerdict:
    weights = LLAMA_8B.weight_bytes(2)
    sizes = {"total_bytes": kv_bytes + weights, "weights_bytes": weights, "kv_bytes": kv_bytes}
    memory = MemoryLayout(activation_peak_bytes=0, headroom_bytes=0, **sizes)
    return assess(LLAMA_8B, memory, *workload)


def share(input_tokens: int, output_tokens: int, batch: int) -> float:
    """The share of decode steps in the time of a workload."""
    work = Workload(input_tokens=input_tokens, output_tokens=output_tokens, batch=batch)
    bytes_per = {"weight_bytes_per_value": 2, "kv_bytes_per_value": 2}
    return decode_share(LLAMA_8B, work, flops_per_byte=150, **bytes_per)


def test_kv_bytes_are_those_of_whole_pages_and_never_fitting_requests_critical():
    one_bytes = sequence_bytes(LAYOUT, 1000)
    verdict = assess_workload(100 * one_bytes, 500, 500, 20)
    assert verdict.kv_bytes == 20 * one_bytes == 20 * 1008 * 131_072
    assert verdict.kv_share == 0.2
    assert verdict.sequences == 100
    assert any("20.0% of the KV memory; 100 of them fit" in reason for reason in verdict.reasons)

    verdict = assess_workload(sequence_bytes(LAYOUT, 4000), 5000, 1, 1)
    refused = assess_workload(10**12, 8192, 1, 1)
    assert (verdict.sequences, verdict.impact) == (0, "critical")
    assert any("exceed the model's context of 8,192" in reason for reason in refused.reasons)
    for workload in ((0, 1, 1), (1, -1, 1), (1, 1, 0)):
        with pytest.raises(ConfigError, match=f"workload {','.join(map(str, workload))}"):
            assess_workload(10**9, *workload)
    with pytest.raises(ConfigError, match="kv_memory=0 B"):
        assess_workload(0, 1, 1, 1)


@pytest.mark.parametrize(
    ("fitting", "batch", "impact"),
    [
        *((1000, 50, "low"), (1000, 60, "low-medium"), (1000, 159, "low-medium")),
        *((1000, 160, "high"), (1000, 479, "high"), (1000, 480, "very high")),
        *((1000, 1000, "critical"), (60, 9, "low-medium"), (60, 10, "critical")),
    ],
)
def test_impact_increases_with_the_memory_share_and_with_scarcity(fitting, batch, impact):
    """Levels at 0.32 * (1/6, 1/2, 3/2) and 1; below 150 / 2 fitting sequences memory is scarce."""
    verdict = assess_workload(fitting * sequence_bytes(LAYOUT, 1000), 500, 500, batch)
    assert verdict.impact == impact
    assert verdict.pays == (impact not in ("low", "low-medium"))


def test_decode_share_follows_its_formula():
    """One request of 100 in, 10 out: prefill 100 * 2 P / F; decode 10 * (2 P_read + KV(105))."""
    parameters = LLAMA_8B.num_parameters
    prefill = 100 * 2 * parameters / 150
    decode = 10 * (2 * (parameters - LLAMA_8B.lookup_parameters) + 105 * 131_072)
    assert share(100, 10, 1) == pytest.approx(decode / (prefill + decode))
    # it increases with the output and decreases with the input
    assert share(2000, 5, 16) < 0.1 < share(2000, 500, 16) < share(200, 500, 16) < 1


# ---- memory limits of containers -----------------------------------------------------------------


GIB = 2**30
UNLIMITED_V1 = 9_223_372_036_854_771_712


@pytest.fixture
def write(tmp_path: Path):
    def put(path: str, text: object) -> Path:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
        return file

    return put


@pytest.fixture
def group(write):
    """Writes a control group's files."""

    def put(folder: str, limit: object, used: int, cached: int = 0, version: int = 2) -> None:
        names = ("max", "current", "inactive_file")
        if version == 1:
            names = ("limit_in_bytes", "usage_in_bytes", "total_inactive_file")
        write(f"{folder}/memory.{names[0]}", limit)
        write(f"{folder}/memory.{names[1]}", used)
        write(f"{folder}/memory.stat", f"anon 5\n{names[2]} {cached}\nfile 7")

    return put


def test_limits_of_groups_up_to_the_root_apply_without_cached_files(tmp_path, write, group):
    group("a/b", 4 * GIB, 3 * GIB, cached=GIB)
    membership = write("membership", "0::/a/b")
    assert container_free_bytes(tmp_path, membership) == 2 * GIB
    assert container_total_bytes(tmp_path, membership) == 4 * GIB

    group("a/b", "max", 0)
    group("a", 2 * GIB, GIB)
    group(".", 8 * GIB, 7 * GIB + 1)
    membership = write("membership", "0::/a/b")
    assert container_free_bytes(tmp_path, membership) == GIB - 1
    assert container_total_bytes(tmp_path, membership) == 2 * GIB

    group("a", GIB, GIB + 5)
    assert container_free_bytes(tmp_path, write("membership", "0::/a")) == -5
    assert container_free_bytes(tmp_path, tmp_path / "missing") is None


def test_cgroup_version_1_file_names(tmp_path, write, group):
    group("memory/a", 2 * GIB, GIB, cached=1000, version=1)
    group("memory", UNLIMITED_V1, 0, version=1)
    membership = write("membership", "12:cpu,cpuacct:/a\n7:memory:/a\n0::/")
    assert container_free_bytes(tmp_path, membership) == GIB + 1000


def test_no_limit_is_none_and_the_mount_root_is_the_own_group_in_a_container(
    tmp_path, write, group
):
    for limit in ("max", "", "many"):
        group("a", limit, 0)
        membership = write("membership", "0::/a")
        assert container_free_bytes(tmp_path, membership) is None
        assert container_total_bytes(tmp_path, membership) is None
    group(".", GIB, 0)
    for path in ("/", "/docker/0123", "/../other"):
        assert container_free_bytes(tmp_path, write("membership", f"0::{path}")) == GIB


# ---- layers that stay resident -------------------------------------------------------------------


SMALL_MODEL = small_spec(*[None] * 8)


@pytest.mark.parametrize(
    ("budget", "offloaded_layers"),
    [(None, ()), (65, ()), (64, (0, 2, 4)), (54, (0, 1, 3, 4)), (44, (0, 1, 2, 3, 4))],
)
def test_resident_layers_fill_the_budget_minus_two_slots(budget, offloaded_layers):
    """Six layers of 10 B and 5 B of other weights: n offloaded use 5 + 10 * (6 - n) + 20 B."""
    found = place_weights([10] * 6, 5, budget)

    assert found.offloaded_layers == offloaded_layers
    resident = 5 + 10 * (6 - len(offloaded_layers))
    assert found.device_bytes == resident + (20 if offloaded_layers else 0)
    assert found.host_bytes == 10 * len(offloaded_layers)
    assert found.total_bytes == 65


def test_budget_below_the_minimum_is_refused_and_planned_weights_place_equal_layers():
    assert place_weights([10] * 6, 5, 25).offloaded_layers == (0, 1, 2, 3, 4, 5)
    with pytest.raises(ConfigError, match=r"24 B is too small.* 25 B .*raise --weights-memory"):
        place_weights([10] * 6, 5, 24)
    with pytest.raises(ConfigError, match=r"at least 25 B"):
        place_weights([10, 10], 5, 24)
    assert not place_weights([10, 10], 5, 25).offloaded_layers  # the slots hold them

    total = SMALL_MODEL.weight_bytes(2)
    layer_bytes = SMALL_MODEL.layer_parameters * 2 // 8
    found = planned_weights(SMALL_MODEL, 2, total - layer_bytes)
    assert planned_weights(SMALL_MODEL, 2, None).device_bytes == total
    assert len(found.offloaded_layers) == 3
    assert found.device_bytes == total - layer_bytes
    assert found.text.startswith("weights: ")
    assert "3 of 8 layers offloaded through 2 slots" in found.text


@given(
    layers=st.lists(st.integers(1, 40), min_size=1, max_size=24),
    other=st.integers(0, 50),
    budget=st.integers(1, 1200),
)
def test_budget_is_met_or_refused_if_impossible(layers, other, budget):
    try:
        found = place_weights(layers, other, budget)
    except ConfigError:
        least = other + SLOTS * max(layers) if len(layers) > SLOTS else other + sum(layers)
        assert budget < least
        return
    assert found.device_bytes <= budget
    assert found.host_bytes + found.device_bytes == found.total_bytes + SLOTS * found.slot_bytes
    assert len(set(found.offloaded_layers)) == len(found.offloaded_layers) != 1
    gaps = [b - a for a, b in zip(found.offloaded_layers, found.offloaded_layers[1:], strict=False)]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_the_fewest_batches_that_hide_the_copy_share_a_pass():
    batches = {0.0: 1, 0.9: 1, 1.0: 1, 1.1: 2, 3.5: 4, 4.0: 4, 99.0: 8}
    assert {copy_s: best_batches(copy_s, batch_s=1.0) for copy_s in batches} == batches
