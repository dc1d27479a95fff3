"""Bytes read by a decode step."""

from typing import Any

import pytest

from quire.errors import ConfigError
from quire.layout.model import LayerSpec, MixtureSpec, ModelSpec
from quire.plan.roofline import (
    RowTokens,
    crossover_batch,
    decode_step,
    step_parts,
    weights_read_bytes,
)
from support.model_specs import CACHE_KINDS


def model_of(**changes: Any) -> ModelSpec:
    fields: dict[str, Any] = {
        "architecture": "x",
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "hidden_size": 16,
        "intermediate_size": 32,
        "vocab_size": 100,
        "max_positions": 1000,
        "tied_embeddings": True,
        "gated_mlp": True,
        "layers": (LayerSpec(), LayerSpec(window=10)),
    }
    return ModelSpec(**(fields | changes))


def test_decode_step_reads_weights_once_and_kv_of_every_sequence():
    """Layer one reads 50 tokens, layer two its window of 10; 2 heads * 4 * K and V * 2 B = 32 B."""
    model = model_of()
    step = decode_step(model, batch=3, tokens=50)

    assert step.kv_read_bytes == 3 * (50 + 10) * 32
    assert step.weights_read_bytes == 2 * model.num_parameters
    assert step.read_bytes == step.weights_read_bytes + step.kv_read_bytes
    assert step.kv_share == step.kv_read_bytes / step.read_bytes


@pytest.mark.parametrize(("kind", "kv_bytes"), [("state", 2 * 50 * 64), ("state_alone", 0)])
def test_decode_step_reads_recurrent_states(kind: str, kv_bytes: int):
    """Two states of 8 x 3 and 2 x 4 x 4 elements in float32; a step also writes them."""
    model, row = CACHE_KINDS[kind], RowTokens(new=1, before=49)
    step, parts = (
        decode_step(model, batch=3, tokens=50),
        step_parts(model, [row] * 3, sampled_rows=3),
    )
    batch = crossover_batch(model, tokens=50)

    assert step.kv_read_bytes == 3 * (kv_bytes + 2 * 224)
    written = 3 * (model.kv_bytes_per_token(2) + 2 * 224)
    assert sum(part.kv_bytes for part in parts) == step.kv_read_bytes + written
    assert batch * (kv_bytes + 2 * 224) > weights_read_bytes(model, batch, 2)


def test_step_time_is_bytes_divided_by_rate():
    step = decode_step(model_of(), batch=4, tokens=10)

    assert step.seconds(1000.0) == step.read_bytes / 1000
    assert step.tokens_per_s(1000.0) == pytest.approx(4000 / step.read_bytes)
    with pytest.raises(ConfigError, match="rate above 0"):
        step.seconds(0.0)


def test_embedding_tables_are_not_read_whole():
    tied, untied = model_of(), model_of(tied_embeddings=False, learned_positions=50)

    assert untied.num_parameters > tied.num_parameters
    assert weights_read_bytes(untied, 1, 2) == weights_read_bytes(tied, 1, 2)


def test_one_token_reads_its_experts_and_many_tokens_read_all():
    mixture = MixtureSpec(num_layers=2, num_experts=8, experts_per_token=2, expert_size=32)
    model = model_of(mixture=mixture)

    assert weights_read_bytes(model, 1, 2) == 2 * model.num_active_parameters
    assert weights_read_bytes(model, 1000, 2) == 2 * model.num_parameters
    assert (
        weights_read_bytes(model, 1, 2) < weights_read_bytes(model, 4, 2) < 2 * model.num_parameters
    )


@pytest.mark.parametrize("experts", [None, 8])
@pytest.mark.parametrize("tokens", [1, 7, 100, 1000])
def test_kv_reads_exceed_weight_reads_from_the_crossover_batch(experts: int | None, tokens: int):
    mixture = experts and MixtureSpec(
        num_layers=2, num_experts=experts, experts_per_token=1, expert_size=64
    )
    model = model_of(mixture=mixture)
    batch = crossover_batch(model, tokens=tokens)
    at = decode_step(model, batch=batch, tokens=tokens)
    before = decode_step(model, batch=batch - 1, tokens=tokens) if batch > 1 else None

    assert at.kv_read_bytes > at.weights_read_bytes
    assert before is None or before.kv_read_bytes <= before.weights_read_bytes


def test_empty_batches_and_sequences_are_refused():
    with pytest.raises(ConfigError, match="batch=0"):
        decode_step(model_of(), batch=0, tokens=1)
    with pytest.raises(ConfigError, match="tokens=0"):
        crossover_batch(model_of(), tokens=0)
