from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.roofline.measured import total_cost
from quire.errors import ConfigError
from quire.layout.model import HeadShape, LayerSpec, MixtureSpec, ModelSpec
from quire.plan.roofline import (
    PartCost,
    RowTokens,
    crossover_batch,
    decode_step,
    step_parts,
    weights_read_bytes,
)
from support.model_specs import CACHE_KINDS, small_spec

PARTS = ("qkv", "attention", "output projection", "mlp", "head", "rest")


def model_of(*layers: Any, **changes: Any) -> ModelSpec:
    """Of two layers with full attention unless they are given."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 100}
    return small_spec(*(layers or (None, None)), **sizes | changes)


def parts_of(model: ModelSpec, rows: list[RowTokens], sampled_rows: int) -> dict[str, PartCost]:
    parts = step_parts(model, rows, sampled_rows=sampled_rows)
    assert tuple(part.name for part in parts) == PARTS
    return {part.name: part for part in parts}


def test_decode_step_costs():
    """Two sequences with 9 cached tokens, 2 B per element, 2 layers.

    qkv: 16 x (4 + 2 + 2) * 8 = 1,024 weights a layer; 2,048 in all, 4,096 B; 2 tokens * 2 * 2,048
    = 8,192 FLOPs. Output: 4 * 8 x 16 = 512 a layer: 2,048 B, 4,096 FLOPs. MLP: 3 * 16 * 32 = 1,536
    a layer: 6,144 B, 12,288 FLOPs. Head: 100 * 16 = 1,600: 3,200 B, 6,400 FLOPs. Rest: 5 norms of
    16 elements, 160 B, and two embedding rows, 64 B.

    Attention: a token's K and V are 2 * 2 heads * 8 * 2 B = 64 B a layer. Each sequence reads 10
    slots and writes 1: 11 * 64 * 2 layers * 2 sequences = 2,816 B. 10 pairs, 2 * 8 FLOPs for the
    weight and 2 * 8 for the sum, in 4 heads: 10 * 128 * 2 layers * 2 sequences = 5,120 FLOPs.
    """
    parts = parts_of(model_of(), [RowTokens(new=1, before=9)] * 2, 2)

    costs = {name: (part.weight_bytes, part.kv_bytes, part.flops) for name, part in parts.items()}
    assert costs == {
        "qkv": (4_096, 0, 8_192),
        "attention": (0, 2_816, 5_120),
        "output projection": (2_048, 0, 4_096),
        "mlp": (6_144, 0, 12_288),
        "head": (3_200, 0, 6_400),
        "rest": (224, 0, 0),
    }


def test_prefill_chunk_costs():
    """4 new tokens after 6: pairs are 7 + 8 + 9 + 10 = 34; slots are 10 read and 4 written.

    One row is sampled: the head is 1,600 weights for it. With none sampled it is not read.
    """
    parts = parts_of(model_of(), [RowTokens(new=4, before=6)], 1)
    assert parts["attention"].flops == 34 * 128 * 2
    assert parts["attention"].kv_bytes == 14 * 64 * 2
    assert parts["mlp"].flops == 4 * 2 * 2 * 1_536
    assert parts["head"].flops == 2 * 1_600
    assert parts_of(model_of(), [RowTokens(new=4, before=6)], 0)["head"].num_bytes == 0


@pytest.mark.parametrize(
    ("row", "pairs", "slots"),
    [
        (RowTokens(new=1, before=9), 3, 3 + 1),  # the last 3
        (RowTokens(new=1, before=1), 2, 2 + 1),  # the window is not full
        (RowTokens(new=4, before=6), 3 * 4, 6 + 4),  # tokens 4 to 9: the first sees 4, 5, 6
        (RowTokens(new=5, before=0), 1 + 2 + 3 + 3 + 3, 5 + 5),
    ],
)
def test_sliding_window_bounds_attention_cost(row: RowTokens, pairs: int, slots: int):
    attention = parts_of(model_of(3), [row], 1)["attention"]
    assert attention.flops == pairs * 128
    assert attention.kv_bytes == slots * 64


@given(
    kind=st.sampled_from([{}, {"window": 1}, {"window": 7}, {"chunk": 1}, {"chunk": 5}]),
    before=st.integers(0, 30),
    new=st.integers(1, 12),
)
def test_tokens_and_pairs_of_a_step_are_those_that_its_queries_attend_to(kind, before, new):
    layer, one_row = LayerSpec(**kind), (np.array([new]), np.array([before]))
    seen = [range(p + 1 - layer.seen_tokens(p + 1), p + 1) for p in range(before, before + new)]
    if "chunk" in kind:  # a step ends where a chunk does
        assume(before % kind["chunk"] + new <= kind["chunk"])
    assert layer.pairs_in_step(*one_row) == sum(map(len, seen))
    assert layer.seen_in_step(*one_row) == len(set().union(*seen))


def test_attention_cost_of_unequal_shared_and_chunked_layers():
    """Tokens 12 and 13 of chunks of 8; elements have 2 B.

    Chunks: 4 queries, 2 KV heads of 8 + 4: 6 tokens read and 2 written, 5 + 6 pairs. The last layer
    reads those of the first. Full attention: 1 KV head of 32 + 32: 14 read, 2 written, 13 + 14
    pairs.
    """
    wide = HeadShape(query_heads=4, kv_heads=1, key_dim=32, value_dim=32)
    chunk = LayerSpec(chunk=8)
    model = small_spec(chunk, LayerSpec(heads=wide), replace(chunk, source=0), value_dim=4)
    parts = parts_of(model, [RowTokens(new=2, before=12)], 1)

    assert parts["attention"].kv_bytes == (6 + 2 + 6) * 2 * 12 * 2 + (14 + 2) * 64 * 2
    assert parts["attention"].flops == 2 * 11 * 2 * 4 * 12 + 27 * 2 * 4 * 64
    assert parts["qkv"].weight_bytes == 2 * 32 * (4 * 8 + 2 * 12 + 4 * 32 + 64 + 4 * 8)
    assert parts["output projection"].weight_bytes == 2 * 32 * (4 * 4 + 4 * 32 + 4 * 4)
    step = decode_step(model, batch=1, tokens=14)
    assert step.kv_read_bytes == 6 * 2 * 2 * 12 * 2 + 14 * 64 * 2


@pytest.mark.parametrize(
    ("row", "products"),
    [
        (RowTokens(new=1, before=9), 10 * 4 * (40 + 32)),
        (RowTokens(new=4, before=6), 34 * 4 * (40 + 32)),  # less than 34 * 144 + 6 * 3,584
        (RowTokens(new=20, before=0), 210 * 4 * (20 + 16)),
        (RowTokens(new=64, before=9), (9 * 64 + 65 * 32) * 144 + 9 * 3_584),
    ],
)
def test_attention_cost_of_latents_is_that_of_the_cheaper_form(row: RowTokens, products: int):
    """Latents of 32 + 8 elements, 2 layers; 4 heads with queries of 12 + 8 and values of 16.

    Expanding a latent takes 4 * (12 + 16) * 32 = 3,584 multiplications. qkv: queries of rank 24,
    24 x (32 + 4 * 20) = 2,688, latents 32 x 40 = 1,280, their expansion 3,584.
    """
    model = CACHE_KINDS["latent"]
    parts = parts_of(model, [row], 1)
    assert parts["attention"].flops == 2 * 2 * products
    assert parts["attention"].kv_bytes == 2 * 2 * 40 * (row.before + 2 * row.new)
    assert parts["qkv"].weight_bytes == 2 * 2 * (2_688 + 1_280 + 3_584)
    assert parts["output projection"].weight_bytes == 2 * 2 * 32 * 4 * 16


def test_keys_of_values_are_not_expanded():
    """64 tokens after 9: 2,656 pairs, of queries of 32 + 8 with values of 32; the window has 8."""
    model = CACHE_KINDS["keys_of_values"]
    parts = parts_of(model, [RowTokens(new=64, before=9)], 1)

    in_window = 64 * 8 * 4 * (8 + 8)
    assert parts["attention"].flops == 2 * (2_656 * 4 * (40 + 32) + in_window)
    # queries of 32, one projection of keys and values; the last layer has no attention
    assert parts["qkv"].weight_bytes == 2 * 32 * (4 * 8 + 4 * 8 + 4 * 32 + 2 * 32)


def test_attention_cost_of_an_index_is_that_of_all_keys_and_of_the_selected_latents():
    """Layer 0: index keys of 16 and 2 queries of them; both layers: 16 latents of 32 + 8.

    100 tokens: 101 keys are read and one is written; of latents 16 are read.
    """
    parts = parts_of(CACHE_KINDS["indexed"], [RowTokens(new=1, before=100)], 1)

    assert parts["attention"].kv_bytes == 2 * (102 * 16 + 2 * (16 + 1) * 40)
    assert parts["attention"].flops == 2 * (101 * 2 * 16 + 2 * 16 * 4 * (40 + 32))
    read = decode_step(CACHE_KINDS["indexed"], batch=3, tokens=101).kv_read_bytes
    assert read == 3 * 2 * (101 * 16 + 2 * 16 * 40)
    # queries of rank 24, the weights of 2 index heads and their queries, latents with the index key
    index = 2 * (32 + 24 * 16) + 32 * 16
    assert parts["qkv"].weight_bytes == 2 * (2 * (2_688 + 1_280 + 3_584) + index)


def test_mixtures_read_selected_experts_and_parts_sum_to_the_step():
    """In addition to the weights and KV read: the new slots written and the embedding rows."""
    model = model_of()
    step = decode_step(model, batch=3, tokens=50)
    parts = step_parts(model, [RowTokens(new=1, before=49)] * 3, sampled_rows=3)

    written, looked_up = 3 * model.kv_bytes_per_token(2), 3 * 16 * 2
    assert total_cost(parts).num_bytes == step.read_bytes + written + looked_up

    mixture = MixtureSpec(num_layers=2, num_experts=8, experts_per_token=2, expert_size=32)
    model, dense = model_of(mixture=mixture), model_of()
    rows = [RowTokens(new=1, before=9)]
    mlp, plain = parts_of(model, rows, 1)["mlp"], parts_of(dense, rows, 1)["mlp"]

    router = 2 * 16 * 8
    assert mlp.flops == 2 * plain.flops + 2 * router
    assert mlp.weight_bytes == 2 * plain.weight_bytes + 2 * router
    many = parts_of(model, [RowTokens(new=1, before=9)] * 500, 500)["mlp"]
    difference = weights_read_bytes(model, 500, 2) - weights_read_bytes(model, 1, 2)
    assert many.weight_bytes - mlp.weight_bytes == difference > 0


def test_floor_is_the_maximum_of_read_and_compute_time_and_empty_steps_are_refused():
    part = PartCost(name="x", weight_bytes=60, kv_bytes=40, flops=600)
    assert (part.floor_s(10.0, 100.0), part.floor_s(100.0, 10.0)) == (10.0, 60.0)
    with pytest.raises(ConfigError, match="rates above 0"):
        part.floor_s(0.0, 1.0)
    for rows in ([], [RowTokens(new=0, before=1)]):
        with pytest.raises(ConfigError, match="1 or more new tokens"):
            step_parts(model_of(), rows, sampled_rows=0)
    with pytest.raises(ConfigError, match="batch=0"):
        decode_step(model_of(), batch=0, tokens=1)
    with pytest.raises(ConfigError, match="tokens=0"):
        crossover_batch(model_of(), tokens=0)


TIED = {"tied_embeddings": True}


def test_decode_step_reads_weights_once_and_kv_of_every_sequence_at_a_rate():
    """Layer one reads 50 tokens, layer two its window of 10; 2 heads * 8 * K and V * 2 B = 64 B."""
    model = model_of(None, 10, **TIED)
    step = decode_step(model, batch=3, tokens=50)
    assert step.kv_read_bytes == 3 * (50 + 10) * 64
    assert step.weights_read_bytes == 2 * model.num_parameters
    assert step.read_bytes == step.weights_read_bytes + step.kv_read_bytes
    assert step.kv_share == step.kv_read_bytes / step.read_bytes


@pytest.mark.parametrize(("kind", "kv_bytes"), [("state", 2 * 50 * 64), ("state_alone", 0)])
def test_decode_step_reads_recurrent_states(kind: str, kv_bytes: int):
    """Two states of 8 x 3 and 2 x 4 x 4 elements in float32; a step also writes them."""
    model, row = CACHE_KINDS[kind], RowTokens(new=1, before=49)
    step = decode_step(model, batch=3, tokens=50)
    parts = step_parts(model, [row] * 3, sampled_rows=3)
    batch = crossover_batch(model, tokens=50)

    assert step.kv_read_bytes == 3 * (kv_bytes + 2 * 224)
    written = 3 * (model.kv_bytes_per_token(2) + 2 * 224)
    assert sum(part.kv_bytes for part in parts) == step.kv_read_bytes + written
    assert batch * (kv_bytes + 2 * 224) > weights_read_bytes(model, batch, 2)
    step = decode_step(model_of(), batch=4, tokens=10)

    assert step.seconds(1000.0) == step.read_bytes / 1000
    assert step.tokens_per_s(1000.0) == pytest.approx(4000 / step.read_bytes)
    with pytest.raises(ConfigError, match="rate above 0"):
        step.seconds(0.0)


def test_embedding_tables_and_experts_are_not_read_whole():
    tied, untied = model_of(**TIED), model_of(learned_positions=50)
    assert untied.num_parameters > tied.num_parameters
    assert weights_read_bytes(untied, 1, 2) == weights_read_bytes(tied, 1, 2)
    mixture = MixtureSpec(num_layers=2, num_experts=8, experts_per_token=2, expert_size=32)
    model = model_of(mixture=mixture, **TIED)
    one, four, many = (weights_read_bytes(model, batch, 2) for batch in (1, 4, 1000))

    assert one == 2 * model.num_active_parameters < four < many == 2 * model.num_parameters


@pytest.mark.parametrize("experts", [None, 8])
@pytest.mark.parametrize("tokens", [1, 7, 100, 1000])
def test_kv_reads_exceed_weight_reads_from_the_crossover_batch(experts: int | None, tokens: int):
    sizes = {"num_layers": 2, "experts_per_token": 1, "expert_size": 64}
    mixture = experts and MixtureSpec(num_experts=experts, **sizes)
    model = model_of(None, 10, mixture=mixture, **TIED)
    batch = crossover_batch(model, tokens=tokens)
    at = decode_step(model, batch=batch, tokens=tokens)
    before = decode_step(model, batch=batch - 1, tokens=tokens) if batch > 1 else None
    assert at.kv_read_bytes > at.weights_read_bytes
    assert before is None or before.kv_read_bytes <= before.weights_read_bytes
