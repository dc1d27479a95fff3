"""The check at load detects attention that differs, and accepts every supported model."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from models import tiny
from quire.errors import ModelError, UnsupportedModel
from quire.layout.model import LayerSpec, ModelSpec
from quire.models import bridge
from quire.models.adapter import TransformersDecoder
from quire.models.loader import make_decoder
from quire.models.native_linear import available_products
from quire.models.verify import ReferenceBatch, compare_with_transformers, stored_logits
from support import zoo


class DecoderWithSpec(TransformersDecoder):
    """A decoder that reports a model spec that differs from its model."""

    def __init__(self, model: PreTrainedModel, **changes: Any) -> None:
        super().__init__(model)
        self.spec = replace(self.spec, **changes)


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_architecture_of_the_zoo_passes(name: str, dtype: torch.dtype) -> None:
    decoder = TransformersDecoder(zoo.build(name).to(dtype))
    compare_with_transformers(decoder)
    assert decoder.model.config._attn_implementation == bridge.ATTENTION_NAME  # after the check too


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gemma2", {"softcap": None}),
        ("gpt_oss", {"sinks": None}),
        ("mistral", {"window": None}),
        ("granite", {"scale": 8**-0.5}),
    ],
)
def test_wrong_attention_arguments_are_detected(name, changes, dtype, monkeypatch):
    attend = ReferenceBatch.attend

    def changed(self: ReferenceBatch, call: bridge.AttentionCall, *states: Tensor) -> Tensor:
        return attend(self, replace(call, **changes), *states)

    monkeypatch.setattr(ReferenceBatch, "attend", changed)
    decoder = TransformersDecoder(zoo.build(name).to(dtype))

    with pytest.raises(UnsupportedModel, match="logits differ from Transformers' own on"):
        compare_with_transformers(decoder)


@pytest.mark.skipif(available_products() is None, reason="no C extension with vector instructions")
@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_quantized_weights_are_compared_within_their_own_loss(codec, monkeypatch):
    """Differences up to twice the loss of the codec are accepted; a wrong layer is not."""
    model = zoo.build("llama")
    stored = stored_logits(model, ModelSpec.from_config(model.config.to_dict()))
    decoder = make_decoder(model, None, impl="transformers", codec=codec)
    compare_with_transformers(decoder, stored, codec=codec)

    attend = ReferenceBatch.attend
    monkeypatch.setattr(ReferenceBatch, "attend", lambda *state: -attend(*state))
    with pytest.raises(UnsupportedModel, match=f"leave out --weight-codec {codec}, or skip"):
        compare_with_transformers(decoder, stored, codec=codec)


def test_ignored_positions_are_detected() -> None:
    model = zoo.build("opt")
    decoder = TransformersDecoder(model)
    embed = model.model.decoder.embed_positions
    embed.register_forward_pre_hook(  # treats the flat batch as one sequence
        lambda _, args, kwargs: (args, kwargs | {"position_ids": None}), with_kwargs=True
    )

    with pytest.raises(UnsupportedModel, match="logits differ"):
        compare_with_transformers(decoder)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "mistral",
            {"layers": (LayerSpec(window=8), LayerSpec(window=None))},
            r"layer 1 calls .* window 8, .* config has None",
        ),
        (
            "llama",
            {"num_layers": 3, "layers": (LayerSpec(),) * 3},
            r"3 layers in order, got calls of layers \[0, 1\]",
        ),
    ],
)
def test_spec_that_differs_from_the_model_is_detected(name, changes, message):
    with pytest.raises(UnsupportedModel, match=message):
        compare_with_transformers(DecoderWithSpec(zoo.build(name), **changes))


def test_chunk_that_differs_from_the_config_is_detected() -> None:
    """Chunks of 64 tokens, not of 32: a test prompt goes beyond the end of the first one."""
    model = tiny.build("llama4_text")
    layers = ModelSpec.from_config(model.config.to_dict()).layers
    changed = tuple(replace(layer, chunk=layer.chunk and 32) for layer in layers)
    decoder = DecoderWithSpec(model, layers=changed)
    with pytest.raises(UnsupportedModel, match=r"on 11 of 43 positions .* first at position 32"):
        compare_with_transformers(decoder)


def test_other_scale_of_a_layer_that_reads_keys_of_another_and_nan_are_detected() -> None:
    decoder = TransformersDecoder(zoo.build("gemma4"))
    decoder.model.model.layers[-1].self_attn.scaling = 0.5
    with pytest.raises(UnsupportedModel, match=r"calls attention with scale 0.5, but .* has 1.0"):
        compare_with_transformers(decoder)

    model = zoo.build("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(torch.nan)
    with pytest.raises(ModelError, match="NaN or inf from Transformers itself on 24 of 24"):
        compare_with_transformers(TransformersDecoder(model))
