"""Residual cosine similarity before and after attention, for many architectures."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from quire.layout.statistics import ResidualSimilarity
from quire.models.adapter import TransformersDecoder
from quire.models.loader import load_model
from support import zoo
from support.flat import Recorder, sequences

NEXT_MODULE = {
    **dict.fromkeys(("llama", "phi3", "granite", "mixtral", "llama4"), "post_attention_layernorm"),
    **dict.fromkeys(("gemma2", "gemma3", "gemma4"), "pre_feedforward_layernorm"),
    "gpt_oss": "post_attention_layernorm",
    "olmo2": "mlp",
    "gpt2": "ln_2",
    "opt": "final_layer_norm",
}


def blocks(model):
    base = model.base_model
    base = getattr(base, "model", base)
    return getattr(base, "layers", None) or getattr(base, "h", None) or base.decoder.layers


def run(decoder, *, wants=True):
    """Logits of the last token, and residual similarities by layer."""
    (tokens,), recorder = sequences(11, vocab_size=zoo.VOCAB_SIZE), Recorder(range(11), wants=wants)
    logits = decoder.forward(tokens, torch.arange(11), torch.tensor([10]), recorder)
    return logits, recorder.cosines


@pytest.mark.parametrize("name", NEXT_MODULE)
def test_residual_similarity_compares_the_stream_before_and_after_attention(name):
    model = zoo.build(name)
    decoder, before, after = TransformersDecoder(model), {}, {}
    assert decoder.prepare(ResidualSimilarity()) is None

    def record(number, into, module, args, kwargs):
        into[number] = (args[0] if args else kwargs["hidden_states"]).reshape(11, -1)

    for number, block in enumerate(blocks(model)):
        for module, into in ((block, before), (block.get_submodule(NEXT_MODULE[name]), after)):
            module.register_forward_pre_hook(partial(record, number, into), with_kwargs=True)
    _, cosines = run(decoder)

    assert list(cosines) == list(range(decoder.spec.num_layers))
    for layer, found in cosines.items():
        expected = F.cosine_similarity(before[layer], after[layer], dim=-1)
        torch.testing.assert_close(found, expected)
        assert found.max() < 0.999  # attention changes the stream


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_recording_does_not_change_logits_and_is_done_only_if_wanted(name):
    plain, watched = (TransformersDecoder(zoo.build(name)) for _ in range(2))
    watched.prepare(ResidualSimilarity())

    assert torch.equal(run(plain)[0], run(watched)[0])
    assert run(watched, wants=False)[1] == {}


def test_parallel_attention_and_mlp_is_refused_by_name():
    decoder = TransformersDecoder(zoo.build("gpt_neox"))

    refused = decoder.prepare(ResidualSimilarity())
    assert "GPTNeoXForCausalLM does not add the output of attention" in refused
    assert run(decoder)[1] == {}
    # in the packaged model the stream after attention is close to the attention output
    model = load_model("quire-tiny", dtype="float32")
    assert model.decoder.prepare(ResidualSimilarity()) is None
