"""Division of device memory, and the estimate of the activation peak."""

from dataclasses import replace

import pytest

from quire.errors import ConfigError
from quire.layout.model import ExtraSpec, HeadShape, LayerSpec, MixtureSpec, ModelSpec
from quire.plan.capacity import (
    MemoryLayout,
    auto_kv_memory,
    coded_weight_bytes,
    estimate_activation_peak,
    hidden_state_bytes,
)
from support.model_specs import CACHE_KINDS

MODEL = ModelSpec(
    architecture="x",
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    hidden_size=16,
    intermediate_size=32,
    vocab_size=100,
    max_positions=64,
    tied_embeddings=True,
    gated_mlp=True,
    layers=(LayerSpec(),) * 2,
)


def test_kv_memory_is_the_remainder_after_weights_activations_and_headroom():
    kv_bytes = auto_kv_memory(1000, 400, 100, 50)
    layout = MemoryLayout(
        total_bytes=1000,
        weights_bytes=400,
        activation_peak_bytes=100,
        headroom_bytes=50,
        kv_bytes=kv_bytes,
    )

    assert kv_bytes == 450
    assert layout.unassigned_bytes == 0


@pytest.mark.parametrize("headroom_bytes", [500, 501, 10_000])
def test_no_memory_left_for_kv_is_refused_with_the_sizes(headroom_bytes: int):
    with pytest.raises(ConfigError, match=rf"total 1,000 B.*400 B.*100 B.*{headroom_bytes:,} B"):
        auto_kv_memory(1000, 400, 100, headroom_bytes)


def test_kv_memory_that_does_not_fit_is_refused_with_the_remainder():
    with pytest.raises(ConfigError, match=r"kv_memory=501 B does not fit: 450 B remain of 1000 B"):
        MemoryLayout(
            total_bytes=1000,
            weights_bytes=400,
            activation_peak_bytes=100,
            headroom_bytes=50,
            kv_bytes=501,
        )


def test_activation_peak_is_the_maximum_of_attention_mlp_and_logits():
    """Residual 2*16 values a token; attention 2*(4+2)*4 = 48; gated MLP 3*32 = 96; 2 bytes each.

    10 tokens, no logits: 10 * (32 + 96) * 2 = 2560.
    50 sampled rows: logits 50 * 100 * (2 + 8) = 50,000 > 1920, so 640 + 50,000.
    """
    assert (
        estimate_activation_peak(
            MODEL, max_num_batched_tokens=10, sampled_rows=0, bytes_per_value=2
        )
        == 2560
    )
    assert (
        estimate_activation_peak(
            MODEL, max_num_batched_tokens=10, sampled_rows=50, bytes_per_value=2
        )
        == 50_640
    )


def test_activation_peak_counts_only_the_experts_per_token():
    """Two experts of 40 and a shared expert of 8 are wider than the dense 32: 3 * 88 per token."""
    mixture = MixtureSpec(
        num_layers=2, num_experts=64, experts_per_token=2, expert_size=40, shared_size=8
    )
    model = replace(MODEL, mixture=mixture)

    assert estimate_activation_peak(
        model, max_num_batched_tokens=1, sampled_rows=0, bytes_per_value=1
    ) == (32 + 3 * 88)


def test_activation_peak_counts_the_widest_heads_and_the_embeddings_of_all_layers():
    """Of each token and byte: 1 + 3 streams of 16, 2 layers of 5, and (4 + 1) * (60 + 40)."""
    wide = HeadShape(query_heads=4, kv_heads=1, key_dim=60, value_dim=40)
    extra = ExtraSpec(layer_width=5, streams=3)
    model = replace(MODEL, layers=(LayerSpec(), LayerSpec(heads=wide)), extra=extra)

    assert estimate_activation_peak(
        model, max_num_batched_tokens=7, sampled_rows=0, bytes_per_value=2
    ) == 2 * 7 * (4 * 16 + 2 * 5 + 500)
    # in float32 between two layers: 3 streams, the embeddings, cosines and sines of 4 and of 60
    assert hidden_state_bytes(model, 7) == 4 * 7 * (3 * 16 + 2 * 5 + 2 * (4 + 60))


def test_activation_peak_of_latents_counts_the_larger_form():
    """Of each token: a latent of 32 + 8; queries of 20 and outputs of 16 in 4 heads, and folded.

    Folded queries of 40 and outputs over latents of 32 are more than keys of 20 and values of 16.
    """
    folded = 40 + 4 * (20 + 16) + 4 * (40 + 32)
    model = replace(CACHE_KINDS["latent"], intermediate_size=1)

    assert estimate_activation_peak(
        model, max_num_batched_tokens=7, sampled_rows=0, bytes_per_value=2
    ) == 2 * 7 * (2 * 32 + folded)


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


def test_negative_counts_are_refused():
    with pytest.raises(ConfigError, match="max_num_batched_tokens=-1"):
        estimate_activation_peak(
            MODEL, max_num_batched_tokens=-1, sampled_rows=0, bytes_per_value=2
        )
