"""The adapter equals Transformers' own attention for every test architecture."""

import threading

import pytest
import torch
from torch import Tensor

from quire.errors import InvariantError, UnsupportedModel
from quire.models.adapter import TransformersDecoder
from quire.models.base import AttentionCall
from quire.models.bridge import attend_through_bridge
from support import zoo
from support.flat import flat_logits, sequences

TOLERANCE = 1e-4


def reference_logits(name: str, prompts: list[Tensor]) -> list[Tensor]:
    model = zoo.build(name)
    with torch.inference_mode():
        return [model(prompt.unsqueeze(0)).logits[0] for prompt in prompts]


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_ragged_chunked_batches_give_transformers_logits(name: str) -> None:
    prompts = sequences(21, 13, 1, 17, vocab_size=zoo.VOCAB_SIZE)
    decoder = TransformersDecoder(zoo.build(name))

    ours = flat_logits(decoder, prompts, chunk_tokens=[6, 5, 1, 1, 64])

    for actual, expected in zip(ours, reference_logits(name, prompts), strict=True):
        torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)


def test_lm_head_runs_on_sampled_rows_only() -> None:
    model = zoo.build("llama")
    decoder, head_inputs = TransformersDecoder(model), []
    model.lm_head.register_forward_hook(lambda _, args, __: head_inputs.append(args[0].shape))

    logits = run(decoder, Recorder(), num_tokens=7, sample_rows=[6, 2])

    assert head_inputs == [(1, 2, decoder.spec.hidden_size)]
    assert logits.shape == (2, zoo.VOCAB_SIZE)


def test_batch_without_sampled_rows_has_no_logits() -> None:
    logits = run(TransformersDecoder(zoo.build("llama")), Recorder(), sample_rows=[])

    assert logits.shape == (0, zoo.VOCAB_SIZE)


def test_model_without_logits_to_keep_computes_all_rows() -> None:
    model = zoo.build("gemma2")  # its final softcap must be applied
    whole = TransformersDecoder(zoo.build("gemma2"))
    forward = model.forward
    model.forward = lambda input_ids, position_ids, use_cache, return_dict: forward(
        input_ids=input_ids,
        position_ids=position_ids,
        use_cache=use_cache,
        return_dict=return_dict,
    )

    logits = run(TransformersDecoder(model), Recorder(), num_tokens=5, sample_rows=[4, 1])

    torch.testing.assert_close(
        logits, run(whole, Recorder(), num_tokens=5, sample_rows=[4, 1]), atol=1e-6, rtol=0
    )


def test_one_model_in_two_threads_keeps_requests_separate() -> None:
    decoder = TransformersDecoder(zoo.build("llama"))
    prompts = sequences(18, 18, vocab_size=zoo.VOCAB_SIZE)
    alone = [flat_logits(decoder, [prompt], chunk_tokens=[4])[0] for prompt in prompts]
    together: dict[int, Tensor] = {}

    def work(number: int) -> None:
        together[number] = flat_logits(decoder, [prompts[number]], chunk_tokens=[4])[0]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert all(torch.equal(together[number], alone[number]) for number in range(2))


def test_bridge_is_cleared_after_a_failed_forward() -> None:
    model = zoo.build("llama")
    decoder = TransformersDecoder(model)

    with pytest.raises(ZeroDivisionError):
        run(decoder, Failing())

    with pytest.raises(InvariantError, match="only in forwards of a Quire decoder"):
        model(torch.tensor([[1, 2, 3]]))


def test_model_can_have_one_decoder_only() -> None:
    model = zoo.build("llama")
    TransformersDecoder(model)

    with pytest.raises(InvariantError, match="got one that has a decoder"):
        TransformersDecoder(model)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"indices": torch.zeros(1)}, "indices"),
        ({"is_causal": False}, "passes is_causal=False"),
    ],
)
def test_unknown_attention_options_are_refused(options: dict[str, object], word: str) -> None:
    model = zoo.build("llama")
    module = model.model.layers[0].self_attn
    TransformersDecoder(model)
    module.quire_bridge.attention = Recorder()
    states = torch.zeros(1, 4, 2, 8)

    with pytest.raises(UnsupportedModel, match=word):
        attend_through_bridge(module, states, states, states, None, **options)


def test_fewer_values_than_keys_are_refused() -> None:
    model = zoo.build("llama")
    module = model.model.layers[0].self_attn
    TransformersDecoder(model)
    module.quire_bridge.attention = Recorder()
    states = torch.zeros(1, 4, 2, 8)

    with pytest.raises(UnsupportedModel, match="as many values as keys"):
        attend_through_bridge(module, states, states, states[:, :, :1], None)


def test_default_scale_follows_from_head_dim() -> None:
    model, recorder = zoo.build("llama"), Recorder()
    module = model.model.layers[1].self_attn
    TransformersDecoder(model)
    module.quire_bridge.attention = recorder
    states = torch.zeros(1, 4, 2, 16)

    out, weights = attend_through_bridge(module, states, states, states, None, output_router=True)

    assert recorder.calls == [AttentionCall(1, 0.25, None, None, None)]
    assert out.shape == (1, 2, 4, 16)
    assert weights is None


class Recorder:
    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.calls.append(call)
        return query.clone()


class Failing:
    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        raise ZeroDivisionError


def run(
    decoder: TransformersDecoder,
    attention: Recorder | Failing,
    *,
    num_tokens: int = 4,
    sample_rows: list[int] | None = None,
) -> Tensor:
    rows = [0] if sample_rows is None else sample_rows
    (prompt,) = sequences(num_tokens, vocab_size=zoo.VOCAB_SIZE)
    return decoder.forward(
        prompt, torch.arange(num_tokens), torch.tensor(rows, dtype=torch.int64), attention
    )
