"""How much attention changes the residual stream, told by the layers of many architectures."""

import pytest
import torch
from torch.nn import functional as F

from quire.layout.statistics import ResidualSimilarity
from quire.models.adapter import TransformersDecoder
from quire.models.loader import load_model
from quire.models.verify import DenseAttention
from support import zoo
from support.flat import sequences

# the part of a layer that is given the stream after attention, by the architecture's own code
NEXT_PART = {
    "llama": "post_attention_layernorm",
    "phi3": "post_attention_layernorm",
    "granite": "post_attention_layernorm",
    "mixtral": "post_attention_layernorm",
    "gemma2": "pre_feedforward_layernorm",
    "gemma3": "pre_feedforward_layernorm",
    "olmo2": "mlp",
    "gpt2": "ln_2",
    "opt": "final_layer_norm",
    "gpt_oss": "post_attention_layernorm",
}


class Watching:
    """Dense attention that wants to be told, or not."""

    def __init__(self, tokens, *, wants_residual_similarity=True):
        self._batch = DenseAttention().batch([0] * tokens, range(tokens))
        self.wants_residual_similarity, self.cosines = wants_residual_similarity, {}

    def attend(self, call, query, key, value):
        return self._batch.attend(call, query, key, value)

    def note_residual_similarity(self, layer, cosines):
        self.cosines[layer] = cosines


def blocks(model):
    base = model.base_model
    return getattr(base, "layers", None) or getattr(base, "h", None) or base.decoder.layers


def run(decoder, attention):
    (tokens,) = sequences(11, vocab_size=zoo.VOCAB_SIZE)
    decoder.forward(tokens, torch.arange(11), torch.tensor([10]), attention)
    return attention


@pytest.mark.parametrize("name", NEXT_PART)
def test_the_stream_before_and_after_attention_is_seen(name):
    model = zoo.build(name)
    decoder, before, after = TransformersDecoder(model), {}, {}
    assert decoder.prepare(ResidualSimilarity()) is None
    for number, block in enumerate(blocks(model)):

        def keep(module, args, kwargs, into, number=number):
            given = args[0] if args else kwargs["hidden_states"]
            into[number] = given.reshape(11, -1)

        block.register_forward_pre_hook(
            lambda *given, keep=keep: keep(*given, before), with_kwargs=True
        )
        block.get_submodule(NEXT_PART[name]).register_forward_pre_hook(
            lambda *given, keep=keep: keep(*given, after), with_kwargs=True
        )
    cosines = run(decoder, Watching(11)).cosines

    assert list(cosines) == list(range(decoder.spec.num_layers))
    for layer, found in cosines.items():
        expected = F.cosine_similarity(before[layer], after[layer], dim=-1)
        torch.testing.assert_close(found, expected)
        assert found.max() < 0.999  # attention does change it


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_watching_changes_no_logit(name):
    plain, watched = (TransformersDecoder(zoo.build(name)) for _ in range(2))
    watched.prepare(ResidualSimilarity())
    logits = []
    for decoder in (plain, watched):
        (tokens,) = sequences(11, vocab_size=zoo.VOCAB_SIZE)
        logits.append(decoder.forward(tokens, torch.arange(11), torch.tensor([10]), Watching(11)))

    assert torch.equal(*logits)


def test_an_attention_that_does_not_want_it_is_not_told():
    decoder = TransformersDecoder(zoo.build("llama"))
    decoder.prepare(ResidualSimilarity())

    assert run(decoder, Watching(11, wants_residual_similarity=False)).cosines == {}


def test_layers_that_add_attention_and_mlp_at_once_are_refused_by_name():
    decoder = TransformersDecoder(zoo.build("gpt_neox"))

    assert "GPTNeoXForCausalLM does not add attention" in decoder.prepare(ResidualSimilarity())
    assert run(decoder, Watching(11)).cosines == {}


def test_an_attention_much_larger_than_the_stream_is_not_taken_for_the_next_part():
    """Then the stream behind it looks like what attention gave: the packaged model is so."""
    model = load_model("quire-tiny", dtype="float32")

    assert model.decoder.prepare(ResidualSimilarity()) is None
