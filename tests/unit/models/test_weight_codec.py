"""`weight_codec`: int8 and int4 weights in every architecture; refusals read no weights."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from quire.errors import ConfigError, UnknownName
from quire.kernels.native.library import NotLoaded
from quire.kernels.native.linear import pack
from quire.models import checkpoint, loader
from quire.models.adapter import TransformersDecoder
from quire.models.loader import load_model
from quire.models.native.decoder import NativeDecoder
from quire.models.native_linear import (
    PackedEmbedding,
    PackedExperts,
    PackedLinear,
    available_products,
    matrix,
)
from quire.models.own_attention import read_projections
from quire.models.packing import codec_refusal, head_codec, output_head
from quire.offload.weights.placement import place_beyond
from support import zoo
from support.flat import flat_logits, sequences
from support.pairwise import every_pair

CODECS = ("int8", "int4")
MODEL_ERROR = 0.25  # int8 activations of all layers; they change the experts of some tokens
LAYER_ERROR = 0.03

needs_products = pytest.mark.skipif(
    available_products() is None, reason="no C extension with vector instructions"
)


def decode_weights(model: PreTrainedModel, codec: str) -> PreTrainedModel:
    """Replace the weights of a plain model by those that a codec stores."""
    head, kept = output_head(model), read_projections(model)
    for module in list(model.modules()):
        if module in kept:
            continue
        if type(module) in (nn.Linear, Conv1D):
            kind = head_codec(codec) if module is head else codec
            matrix(module).copy_(pack(matrix(module), kind).unpacked())
        elif hasattr(module, "has_gate"):
            for name in ("gate_up_proj", "down_proj"):
                for weight in getattr(module, name).detach():
                    one = weight.mT if module.is_transposed else weight
                    one.copy_(pack(one, codec).unpacked())
    return model


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def plain_weight_names(model: nn.Module) -> set[str]:
    """Names of matrices that are not packed."""
    return {name for name, parameter in model.named_parameters() if parameter.ndim > 1}


@needs_products
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", [name for name in zoo.ARCHITECTURES if name != "gemma3n"])
def test_every_architecture_computes_with_the_decoded_weights(name: str, codec: str) -> None:
    prompts = sequences(21, 1, 13, vocab_size=zoo.VOCAB_SIZE)
    decoded = decode_weights(zoo.build(name), codec)
    decoder = TransformersDecoder(zoo.build(name), codec=codec)

    found = flat_logits(decoder, prompts, chunk_tokens=[6, 1, 64])

    with torch.inference_mode():
        for actual, prompt in zip(found, prompts, strict=True):
            assert error(actual, decoded(prompt.unsqueeze(0)).logits[0]) < MODEL_ERROR
    left = {one for one in plain_weight_names(decoder.model) if "router" not in one}
    kept = ("embed", "wte", "wpe", ".gate.", "feed_forward.experts.", ".kv_b_proj.")
    assert all(any(part in one for part in kept) for one in left)


@needs_products
@every_pair(
    codec=CODECS, impl=["auto", "native", "transformers"], name=["qwen3", "gpt2", "mixtral"]
)
def test_codec_is_loaded_with_each_implementation(
    name: str, impl: str, codec: str, tmp_path: Path
) -> None:
    if impl == "native" and name != "qwen3":
        pytest.skip("no fused layers")
    folder = zoo.save(name, tmp_path)
    loaded = load_model(folder, device="cpu", model_impl=impl, weight_codec=codec)

    linears = [m for m in loaded.decoder.model.modules() if isinstance(m, PackedLinear)]
    head = output_head(loaded.decoder.model)
    assert {m.packed.kind for m in linears if m is not head} == {codec}
    assert isinstance(head, PackedLinear)
    assert head.packed.kind == head_codec(codec)
    assert isinstance(loaded.decoder, NativeDecoder) == (name == "qwen3" and impl != "transformers")
    (prompt,) = sequences(9, vocab_size=zoo.VOCAB_SIZE)
    (found,) = flat_logits(loaded.decoder, [prompt], chunk_tokens=[4])
    with torch.inference_mode():
        expected = decode_weights(zoo.build(name), codec)(prompt[None]).logits[0]
    assert error(found, expected) < MODEL_ERROR


@needs_products
def test_embedding_tied_to_a_quantized_head_reads_the_decoded_rows() -> None:
    model = TransformersDecoder(zoo.build("llama_mqa"), codec="int8").model
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()

    assert isinstance(embedding, PackedEmbedding)
    assert embedding.packed is head.packed
    assert torch.equal(embedding(torch.arange(5)), head.weight[:5])


@needs_products
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_packed_experts_equal_experts_with_the_decoded_weights(name: str, codec: str) -> None:
    models = (
        decode_weights(zoo.build(name), codec),
        TransformersDecoder(zoo.build(name), codec=codec).model,
    )
    plain, packed = (model.model.layers[1].mlp.experts for model in models)
    rows, weights = torch.randn(17, 32), torch.rand(17, 2)
    experts = torch.stack([torch.randperm(4)[:2] for _ in range(17)])
    with torch.inference_mode():
        found, expected = packed(rows, experts, weights), plain(rows, experts, weights)

    assert isinstance(packed, PackedExperts)
    assert error(found, expected) < LAYER_ERROR


@needs_products
def test_experts_multiply_no_tokens() -> None:
    model = TransformersDecoder(zoo.build("mixtral"), codec="int8").model
    experts = next(module for module in model.modules() if isinstance(module, PackedExperts))
    none = torch.empty(0, 2)

    assert experts(torch.empty(0, 32), none.long(), none).shape == (0, 32)


# ---- refusals ------------------------------------------------------------------------------------


@pytest.fixture
def no_weights_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(checkpoint, "read_model", fail)


def _save_llama(folder: Path, **fields: object) -> Path:
    fields = {"vocab_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1} | fields
    config = LlamaConfig(**fields, intermediate_size=16, num_key_value_heads=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@needs_products
def test_input_size_that_fills_no_unit_is_refused_before_weights_are_read(
    tmp_path: Path, no_weights_read: None
) -> None:
    folder = _save_llama(tmp_path / "24", hidden_size=24, head_dim=24)

    for codec in ("int4", "int8"):
        with pytest.raises(ConfigError, match=rf"q_proj has 24 inputs, and {codec} .* of 16"):
            load_model(folder, device="cpu", weight_codec=codec)
    folder = _save_llama(tmp_path / "48", hidden_size=48, head_dim=48)
    with pytest.raises(AssertionError, match="weights were read"):
        load_model(folder, device="cpu", weight_codec="int8")


def test_offloaded_weights_are_refused(tmp_path: Path, no_weights_read: None) -> None:
    folder = zoo.save("llama", tmp_path)

    with pytest.raises(ConfigError, match=r"weight_codec=int8 .*offloaded.*weights-memory all"):
        load_model(folder, device="cpu", weight_codec="int8", placer=place_beyond("1MiB"))


def test_devices_other_than_a_cpu_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"weight_codec=int4 .* not on cuda"):
        loader.check_choices("auto", "int4", torch.device("cuda"), offloaded=False)


def test_a_cpu_without_products_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_weights_read: None
) -> None:
    monkeypatch.setattr(loader, "load_library", lambda: NotLoaded("no C compiler"))

    with pytest.raises(ConfigError, match=r"weight_codec=int8 is not possible: no C compiler"):
        load_model(zoo.save("llama", tmp_path), device="cpu", weight_codec="int8")


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="weight_codec"):
        load_model(tmp_path, device="cpu", weight_codec="int5")
    with pytest.raises(UnknownName, match="model_impl"):
        load_model(tmp_path, device="cpu", model_impl="fused")


class _Derived(nn.Linear):
    pass


class _Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.empty(2, 8, 8))


def _shared() -> nn.Module:
    first, second = nn.Linear(16, 16), nn.Linear(16, 16)
    second.weight = first.weight
    return nn.Sequential(first, second)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Sequential(_Derived(8, 8)), "0 is a _Derived, not a plain linear layer"),
        (lambda: nn.Sequential(_Stacked()), r"0 is a _Stacked with stacked weights \(weights\)"),
        (lambda: nn.Sequential(nn.Linear(16, 16, dtype=torch.float64)), "weights of torch.float64"),
        (lambda: nn.Sequential(nn.Embedding(8, 8)), "no linear layers"),
        (_shared, "0 shares its weight"),
    ],
)
def test_layers_that_cannot_be_packed_are_named(make, reason: str) -> None:
    with torch.device("meta"):
        model = make()
    found = codec_refusal(model, "int8")

    assert found is not None
    assert re.search(reason, found)
