"""Residual cosine similarity before and after attention, for many architectures."""

import pytest
import torch
from torch.nn import functional as F

from quire.layout.statistics import ResidualSimilarity
from quire.models.adapter import TransformersDecoder
from quire.models.loader import load_model
from quire.models.verify import DenseAttention
from support import zoo
from support.flat import sequences

# the submodule whose input is the residual stream after attention
NEXT_MODULE = {
    "llama": "post_attention_layernorm",
    "phi3": "post_attention_layernorm",
    "granite": "post_attention_layernorm",
    "mixtral": "post_attention_layernorm",
    "gemma2": "pre_feedforward_layernorm",
    "gemma3": "pre_feedforward_layernorm",
    "gemma4": "pre_feedforward_layernorm",
    "llama4": "post_attention_layernorm",
    "olmo2": "mlp",
    "gpt2": "ln_2",
    "opt": "final_layer_norm",
    "gpt_oss": "post_attention_layernorm",
}


class RecordingAttention:
    """Dense attention that records residual similarities if it wants them."""

    def __init__(self, tokens, *, wants_residual_similarity=True):
        self._batch = DenseAttention().batch([0] * tokens, range(tokens))
        self.wants_residual_similarity, self.cosines = wants_residual_similarity, {}

    def attend(self, call, query, key, value):
        return self._batch.attend(call, query, key, value)

    def note_residual_similarity(self, layer, cosines):
        self.cosines[layer] = cosines


def blocks(model):
    base = model.base_model
    base = getattr(base, "model", base)
    return getattr(base, "layers", None) or getattr(base, "h", None) or base.decoder.layers


def run(decoder, attention):
    (tokens,) = sequences(11, vocab_size=zoo.VOCAB_SIZE)
    decoder.forward(tokens, torch.arange(11), torch.tensor([10]), attention)
    return attention


@pytest.mark.parametrize("name", NEXT_MODULE)
def test_residual_similarity_compares_the_stream_before_and_after_attention(name):
    model = zoo.build(name)
    decoder, before, after = TransformersDecoder(model), {}, {}
    assert decoder.prepare(ResidualSimilarity()) is None
    for number, block in enumerate(blocks(model)):

        def record(module, args, kwargs, into, number=number):
            hidden = args[0] if args else kwargs["hidden_states"]
            into[number] = hidden.reshape(11, -1)

        block.register_forward_pre_hook(
            lambda *arguments, record=record: record(*arguments, before), with_kwargs=True
        )
        block.get_submodule(NEXT_MODULE[name]).register_forward_pre_hook(
            lambda *arguments, record=record: record(*arguments, after), with_kwargs=True
        )
    cosines = run(decoder, RecordingAttention(11)).cosines

    assert list(cosines) == list(range(decoder.spec.num_layers))
    for layer, found in cosines.items():
        expected = F.cosine_similarity(before[layer], after[layer], dim=-1)
        torch.testing.assert_close(found, expected)
        assert found.max() < 0.999  # attention changes the stream


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_recording_residual_similarity_does_not_change_logits(name):
    plain, watched = (TransformersDecoder(zoo.build(name)) for _ in range(2))
    watched.prepare(ResidualSimilarity())
    logits = []
    for decoder in (plain, watched):
        (tokens,) = sequences(11, vocab_size=zoo.VOCAB_SIZE)
        logits.append(
            decoder.forward(tokens, torch.arange(11), torch.tensor([10]), RecordingAttention(11))
        )

    assert torch.equal(*logits)


def test_residual_similarity_is_recorded_only_if_attention_wants_it():
    decoder = TransformersDecoder(zoo.build("llama"))
    decoder.prepare(ResidualSimilarity())

    assert run(decoder, RecordingAttention(11, wants_residual_similarity=False)).cosines == {}


def test_parallel_attention_and_mlp_is_refused_by_name():
    decoder = TransformersDecoder(zoo.build("gpt_neox"))

    assert "GPTNeoXForCausalLM does not add the output of attention" in decoder.prepare(
        ResidualSimilarity()
    )
    assert run(decoder, RecordingAttention(11)).cosines == {}


def test_attention_output_larger_than_the_stream_is_distinguished():
    """In the packaged model the stream after attention is close to the attention output."""
    model = load_model("quire-tiny", dtype="float32")

    assert model.decoder.prepare(ResidualSimilarity()) is None
