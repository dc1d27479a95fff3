from dataclasses import replace

import pytest
import torch

from quire.errors import UnsupportedModel
from quire.layout.model import HeadShape, LayerSpec, ModelSpec
from quire.models.sharding import rank_spec, refuse_unshardable, shard
from quire.models.verify import compare_with_transformers
from support import zoo
from support.flat import plain_logits
from support.model_specs import CACHE_KINDS
from support.ranks import ThreadGroup, on_ranks, rank_model

DIVISIBLE = (
    *("llama", "llama_mha", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gemma4", "granite"),
    *("gpt_neox", "minicpm3", "youtu"),
)
REFUSED = {
    "deepseek_v3": "mixture of experts",
    "llama_mqa": "KV heads",
    "gpt2": "no tensor-parallel plan",
    "olmo2": "colwise_gather_output",
    "phi3": "rowwise_split_input",
    "mixtral": "mixture of experts",
    "llama4": "mixture of experts",
    "gemma3n": "mean and deviation",
    "gemma4_unified": "KV heads .* has 1",
}


def spec_of(architecture: str) -> ModelSpec:
    return ModelSpec.from_config(zoo.build(architecture).config.to_dict())


@pytest.mark.parametrize("architecture", DIVISIBLE)
def test_logits_of_ranks_equal_those_of_the_whole_model(architecture: str) -> None:
    tokens = torch.arange(3, 43)
    (expected,) = plain_logits(zoo.build(architecture), tokens)

    def logits(group: ThreadGroup) -> torch.Tensor:
        return rank_model(architecture, group).decoder.reference_logits(tokens)

    for found in on_ranks(2, logits):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_check_at_load_runs_on_all_ranks(architecture: str) -> None:
    def check(group: ThreadGroup) -> int:
        model = rank_model(architecture, group)
        compare_with_transformers(model.decoder)
        return model.spec.num_kv_heads

    assert on_ranks(2, check) == [1, 1]


def test_each_rank_has_its_part_of_the_weights() -> None:
    copies, spec = [zoo.build("llama_mha") for _ in range(2)], spec_of("llama_mha")

    def parts(group: ThreadGroup) -> list[torch.Tensor]:
        shard(copies[group.rank], spec, group)
        layer = copies[group.rank].model.layers[1]
        queries, outputs = layer.self_attn.q_proj, layer.self_attn.o_proj
        weights = queries.weight, outputs.own.weight, layer.mlp.down_proj.own.weight
        return [queries.bias, *weights, outputs.bias]

    *found, output_bias = zip(*on_ranks(2, parts), strict=True)

    whole = zoo.build("llama_mha").model.layers[1]
    queries, outputs = whole.self_attn.q_proj, whole.self_attn.o_proj
    expected = queries.bias, queries.weight, outputs.weight, whole.mlp.down_proj.weight
    for of_ranks, weight, dim in zip(found, expected, (0, 0, 1, 1), strict=True):
        assert torch.equal(torch.cat(of_ranks, dim), weight)
    assert torch.equal(output_bias[0], outputs.bias)


@pytest.mark.parametrize(("architecture", "reason"), REFUSED.items())
def test_models_that_cannot_be_divided_are_refused(architecture: str, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        refuse_unshardable(zoo.build(architecture), spec_of(architecture), 2)


def test_heads_of_every_layer_are_divided() -> None:
    spec = CACHE_KINDS["by_layer"]
    heads = HeadShape(query_heads=4, kv_heads=4, key_dim=16, value_dim=8)
    layers = (*spec.layers[:2], LayerSpec(heads=heads))
    own = rank_spec(replace(spec, layers=layers, dense_sizes=(64, 64, 128)), 2)

    latents = rank_spec(spec_of("minicpm3"), 2)  # each rank stores the latents of all heads
    of_one = spec_of("minicpm3").heads[0].values_per_token
    assert latents.heads[0].values_per_token == of_one == 16 + 8
    assert (latents.num_heads, latents.num_kv_heads) == (2, 1)
    assert own.heads[2] == HeadShape(query_heads=2, kv_heads=2, key_dim=16, value_dim=8)
    assert own.heads[0] == HeadShape(query_heads=2, kv_heads=1, key_dim=8, value_dim=8)
    assert own.dense_sizes == (32, 32, 64)
    with pytest.raises(UnsupportedModel, match=r"multiple of tensor_parallel_size=2, but .* has 1"):
        rank_spec(spec, 2)
    with pytest.raises(UnsupportedModel, match="tensor_parallel_size=3"):
        rank_spec(spec_of("llama"), 3)
