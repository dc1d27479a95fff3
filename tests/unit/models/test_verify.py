"""The check at load finds attention that differs, and lets every sound model through."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.errors import ModelError, UnsupportedModel
from quire.layout.model import LayerSpec
from quire.models import bridge
from quire.models.adapter import TransformersDecoder
from quire.models.verify import DenseBatch, compare_with_transformers
from support import zoo


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_architecture_of_the_zoo_passes(name: str, dtype: torch.dtype) -> None:
    compare_with_transformers(TransformersDecoder(zoo.build(name).to(dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "forgotten"),
    [
        ("gemma2", {"softcap": None}),
        ("gpt_oss", {"sinks": None}),
        ("mistral", {"window": None}),
        ("granite", {"scale": 8**-0.5}),
    ],
)
def test_what_attention_forgets_is_found(
    name: str,
    forgotten: dict[str, object],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attend = DenseBatch.attend

    def forgetful(self: DenseBatch, call: bridge.AttentionCall, *states: Tensor) -> Tensor:
        return attend(self, replace(call, **forgotten), *states)

    monkeypatch.setattr(DenseBatch, "attend", forgetful)
    decoder = TransformersDecoder(zoo.build(name).to(dtype))

    with pytest.raises(UnsupportedModel, match="logits differ from Transformers' own on"):
        compare_with_transformers(decoder)


def test_positions_that_do_not_reach_the_model_are_found() -> None:
    model = zoo.build("opt")
    decoder = TransformersDecoder(model)
    embed = model.model.decoder.embed_positions
    embed.register_forward_pre_hook(  # as if the flat batch were one sequence
        lambda _, args, kwargs: (args, kwargs | {"position_ids": None}), with_kwargs=True
    )

    with pytest.raises(UnsupportedModel, match="logits differ"):
        compare_with_transformers(decoder)


def test_a_window_the_config_does_not_promise_is_found() -> None:
    decoder = TransformersDecoder(zoo.build("mistral"))
    layers = (LayerSpec(window=8), LayerSpec(window=None))
    decoder._spec = replace(decoder.spec, layers=layers)

    with pytest.raises(UnsupportedModel, match=r"layer 1 calls .* window 8, .* config has None"):
        compare_with_transformers(decoder)


def test_a_layer_too_many_is_found() -> None:
    decoder = TransformersDecoder(zoo.build("llama"))
    decoder._spec = replace(decoder.spec, num_layers=3, layers=(LayerSpec(),) * 3)

    with pytest.raises(UnsupportedModel, match=r"3 layers in order, got calls of layers \[0, 1\]"):
        compare_with_transformers(decoder)


def test_logits_that_are_no_numbers_are_found() -> None:
    model = zoo.build("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(torch.nan)

    with pytest.raises(ModelError, match="NaN or inf from Transformers itself on 24 of 24"):
        compare_with_transformers(TransformersDecoder(model))


def test_the_model_attends_through_quire_again_after_the_check() -> None:
    decoder = TransformersDecoder(zoo.build("llama"))

    compare_with_transformers(decoder)

    assert decoder.model.config._attn_implementation == bridge.ATTENTION_NAME
