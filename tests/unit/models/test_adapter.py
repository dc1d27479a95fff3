"""The adapter equals Transformers' own attention; the check at load detects what differs."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from models import tiny
from quire.errors import InvariantError, ModelError, UnsupportedModel
from quire.layout.model import LayerSpec, ModelSpec
from quire.models import bridge
from quire.models.adapter import TransformersDecoder
from quire.models.base import AttentionCall
from quire.models.bridge import attend_through_bridge
from quire.models.loader import make_decoder
from quire.models.native_linear import available_products
from quire.models.verify import ReferenceBatch, compare_with_transformers, stored_logits
from support import zoo
from support.flat import flat_logits, plain_logits, sequences


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_ragged_chunked_batches_give_transformers_logits(name: str) -> None:
    prompts = sequences(21, 13, 1, 17, vocab_size=zoo.VOCAB_SIZE)
    ours = flat_logits(TransformersDecoder(zoo.build(name)), prompts, chunk_tokens=[6, 5, 1, 1, 64])
    for actual, expected in zip(ours, plain_logits(zoo.build(name), *prompts), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def test_lm_head_runs_on_sampled_rows_unless_a_model_computes_all():
    model = zoo.build("llama")
    decoder, head_inputs = TransformersDecoder(model), []
    model.lm_head.register_forward_hook(lambda _, args, __: head_inputs.append(args[0].shape))

    logits = run(decoder, Recorder(), num_tokens=7, sample_rows=[6, 2])

    assert head_inputs == [(1, 2, decoder.spec.hidden_size)]
    assert logits.shape == (2, zoo.VOCAB_SIZE)
    assert run(decoder, Recorder(), sample_rows=[]).shape == (0, zoo.VOCAB_SIZE)

    model = zoo.build("gemma2")  # its final softcap must be applied
    whole = TransformersDecoder(zoo.build("gemma2"))
    forward = model.forward
    model.forward = lambda input_ids, position_ids, use_cache, return_dict: forward(
        input_ids, position_ids=position_ids, use_cache=use_cache, return_dict=return_dict
    )

    found, expected = (
        run(decoder, Recorder(), num_tokens=5, sample_rows=[4, 1])
        for decoder in (TransformersDecoder(model), whole)
    )

    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_one_model_in_two_threads_keeps_requests_separate() -> None:
    decoder = TransformersDecoder(zoo.build("llama"))
    prompts = sequences(18, 18, vocab_size=zoo.VOCAB_SIZE)

    def work(prompt: Tensor) -> Tensor:
        return flat_logits(decoder, [prompt], chunk_tokens=[4])[0]

    alone = [work(prompt) for prompt in prompts]
    with ThreadPoolExecutor(2) as threads:
        assert all(map(torch.equal, threads.map(work, prompts), alone))


def test_bridge_of_the_only_decoder_is_cleared_after_a_failed_forward(monkeypatch):
    model = zoo.build("llama")
    monkeypatch.setattr(Recorder, "attend", lambda *_: 1 // 0)

    with pytest.raises(ZeroDivisionError):
        run(TransformersDecoder(model), Recorder())

    with pytest.raises(InvariantError, match="only in forwards of a Quire decoder"):
        model(torch.tensor([[1, 2, 3]]))
    model = zoo.build("llama")
    TransformersDecoder(model)
    with pytest.raises(InvariantError, match="got one that has a decoder"):
        TransformersDecoder(model)


@pytest.fixture
def attention():
    """Attention of layer 1 of a decoder outside of a forward, with a recorder."""
    model = zoo.build("llama")
    module = model.model.layers[1].self_attn
    module.decoder = TransformersDecoder(model)
    module.quire_bridge.attention = Recorder()
    return module


def test_unknown_attention_options_are_refused_and_scales_follow_from_head_dim(attention) -> None:
    states = torch.zeros(1, 4, 2, 8)
    for options, num_values, word in (
        ({"position_bias": torch.zeros(1)}, 2, "position_bias"),
        ({"indices": torch.zeros(1)}, 2, "indices"),
        ({"is_causal": False}, 2, "passes is_causal=False"),
        ({}, 1, "as many values as keys"),
    ):
        values = states[:, :, :num_values]
        with pytest.raises(UnsupportedModel, match=word):
            attend_through_bridge(attention, states, states, values, None, **options)
    states = torch.zeros(1, 4, 2, 16)

    out, weights = attend_through_bridge(
        attention, states, states, states, None, output_router=True
    )

    recorder = attention.quire_bridge.attention
    assert recorder.calls == [AttentionCall(1, 0.25, None, None, None)]
    assert out.shape == (1, 2, 4, 16)
    assert weights is None


class Recorder:
    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.calls.append(call)
        return query.clone()


def run(
    decoder: TransformersDecoder,
    attention: Recorder,
    *,
    num_tokens: int = 4,
    sample_rows: list[int] | None = None,
) -> Tensor:
    rows = [0] if sample_rows is None else sample_rows
    (prompt,) = sequences(num_tokens, vocab_size=zoo.VOCAB_SIZE)
    return decoder.forward(
        prompt, torch.arange(num_tokens), torch.tensor(rows, dtype=torch.int64), attention
    )


# ---- the check at load ---------------------------------------------------------------------------


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
        *(("gemma2", {"softcap": None}), ("gpt_oss", {"sinks": None})),
        *(("mistral", {"window": None}), ("granite", {"scale": 8**-0.5})),
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


def test_ignored_positions_and_another_chunk_are_detected():
    model = zoo.build("opt")
    decoder = TransformersDecoder(model)
    embed = model.model.decoder.embed_positions
    embed.register_forward_pre_hook(  # treats the flat batch as one sequence
        lambda _, args, kwargs: (args, kwargs | {"position_ids": None}), with_kwargs=True
    )

    with pytest.raises(UnsupportedModel, match="logits differ"):
        compare_with_transformers(decoder)

    # chunks of 64 tokens, not of 32: a test prompt goes beyond the end of the first one
    model = tiny.build("llama4_text")
    layers = ModelSpec.from_config(model.config.to_dict()).layers
    changed = tuple(replace(layer, chunk=layer.chunk and 32) for layer in layers)
    decoder = DecoderWithSpec(model, layers=changed)
    with pytest.raises(UnsupportedModel, match=r"on 11 of 43 positions .* first at position 32"):
        compare_with_transformers(decoder)


def test_specs_and_scales_that_differ_from_the_model_and_nan_are_detected() -> None:
    windows, three = (LayerSpec(window=8), LayerSpec(window=None)), (LayerSpec(),) * 3
    for name, changes, message in (
        ("mistral", {"layers": windows}, r"layer 1 calls .* window 8, .* config has None"),
        ("llama", {"num_layers": 3, "layers": three}, r"3 layers in order, got .* \[0, 1\]"),
    ):
        with pytest.raises(UnsupportedModel, match=message):
            compare_with_transformers(DecoderWithSpec(zoo.build(name), **changes))
    decoder = TransformersDecoder(zoo.build("gemma4"))  # its last layer reads keys of another
    decoder.model.model.layers[-1].self_attn.scaling = 0.5
    with pytest.raises(UnsupportedModel, match=r"calls attention with scale 0.5, but .* has 1.0"):
        compare_with_transformers(decoder)

    model = zoo.build("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(torch.nan)
    with pytest.raises(ModelError, match="NaN or inf from Transformers itself on 24 of 24"):
        compare_with_transformers(TransformersDecoder(model))
