"""The adapter equals Transformers' own attention for every test architecture."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from quire.errors import InvariantError, UnsupportedModel
from quire.models.adapter import TransformersDecoder
from quire.models.base import AttentionCall
from quire.models.bridge import attend_through_bridge
from support import zoo
from support.flat import flat_logits, plain_logits, sequences


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_ragged_chunked_batches_give_transformers_logits(name: str) -> None:
    prompts = sequences(21, 13, 1, 17, vocab_size=zoo.VOCAB_SIZE)
    ours = flat_logits(TransformersDecoder(zoo.build(name)), prompts, chunk_tokens=[6, 5, 1, 1, 64])
    for actual, expected in zip(ours, plain_logits(zoo.build(name), *prompts), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def test_lm_head_runs_on_sampled_rows_only() -> None:
    model = zoo.build("llama")
    decoder, head_inputs = TransformersDecoder(model), []
    model.lm_head.register_forward_hook(lambda _, args, __: head_inputs.append(args[0].shape))

    logits = run(decoder, Recorder(), num_tokens=7, sample_rows=[6, 2])

    assert head_inputs == [(1, 2, decoder.spec.hidden_size)]
    assert logits.shape == (2, zoo.VOCAB_SIZE)
    assert run(decoder, Recorder(), sample_rows=[]).shape == (0, zoo.VOCAB_SIZE)


def test_model_without_logits_to_keep_computes_all_rows() -> None:
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


def test_bridge_is_cleared_after_a_failed_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build("llama")
    monkeypatch.setattr(Recorder, "attend", lambda *_: 1 // 0)

    with pytest.raises(ZeroDivisionError):
        run(TransformersDecoder(model), Recorder())

    with pytest.raises(InvariantError, match="only in forwards of a Quire decoder"):
        model(torch.tensor([[1, 2, 3]]))


def test_model_can_have_one_decoder_only() -> None:
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


@pytest.mark.parametrize(
    ("options", "num_values", "word"),
    [
        ({"position_bias": torch.zeros(1)}, 2, "position_bias"),
        ({"indices": torch.zeros(1)}, 2, "indices"),
        ({"is_causal": False}, 2, "passes is_causal=False"),
        ({}, 1, "as many values as keys"),
    ],
)
def test_unknown_attention_options_are_refused(attention, options, num_values, word: str) -> None:
    states = torch.zeros(1, 4, 2, 8)
    with pytest.raises(UnsupportedModel, match=word):
        attend_through_bridge(attention, states, states, states[:, :, :num_values], None, **options)


def test_default_scale_follows_from_head_dim(attention) -> None:
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
