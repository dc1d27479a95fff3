"""Models with random weights: right sizes for measuring speed, worthless for quality."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from quire.models.adapter import TransformersDecoder
from quire.models.generation import GenerationDefaults
from quire.models.loader import LoadedModel
from quire.models.weights import weight_bytes


def llama_125m() -> LlamaConfig:
    """The reference shape of the throughput bench: 12 layers of 768, 12 heads over 4 KV heads."""
    return LlamaConfig(
        vocab_size=32_000,
        hidden_size=768,
        intermediate_size=2_048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=8_192,
        tie_word_embeddings=False,
    )


def random_model(config: LlamaConfig, *, dtype: torch.dtype, seed: int = 0) -> LoadedModel:
    """A model of this shape behind Quire's adapter, without a tokenizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    decoder = TransformersDecoder(model.eval())
    return LoadedModel(
        decoder=decoder,
        tokenizer=None,
        generation=GenerationDefaults(),
        spec=decoder.spec,
        name="random llama",
        weight_bytes=weight_bytes(model),
    )
