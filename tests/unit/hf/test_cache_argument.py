"""Forwards take a cache as `cache` (Transformers 5.24) or `past_key_values` (before)."""

import inspect
import warnings
from dataclasses import fields

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from quire.errors import RequestError
from quire.hf import DynamicBatch, QuireCache
from quire.models.wrapped import cache_argument, output_with_cache
from support import zoo

IDS = torch.tensor([[3, 5, 7, 9] * 10])
OWN = cache_argument(inspect.signature(LlamaForCausalLM.forward).parameters)
OTHER = "past_key_values" if OWN == "cache" else "cache"


class Renamed(LlamaForCausalLM):
    """A model whose forward has the cache under the other version's name."""


if OTHER == "cache":

    def _renamed(self, input_ids=None, attention_mask=None, position_ids=None, cache=None, **rest):  # type: ignore[no-untyped-def]
        rest["past_key_values"] = cache
        return LlamaForCausalLM.forward(self, input_ids, attention_mask, position_ids, **rest)

else:

    def _renamed(  # type: ignore[no-untyped-def]
        self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **rest
    ):
        rest["cache"] = past_key_values
        return LlamaForCausalLM.forward(self, input_ids, attention_mask, position_ids, **rest)


Renamed.forward = _renamed


@pytest.fixture(scope="module")
def model():
    return zoo.build("llama")


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_forward_accepts_both_names_without_a_warning(model, name) -> None:
    expected = model(IDS).logits
    with QuireCache(model) as cache, warnings.catch_warnings():
        warnings.simplefilter("error")
        first = model(input_ids=IDS[:, :30], **{name: cache}).logits
        rest = model(input_ids=IDS[:, 30:], **{name: cache})

    assert torch.allclose(torch.cat([first, rest.logits], dim=1), expected, atol=1e-4)
    assert rest.past_key_values is cache


def test_generate_passes_the_cache_by_the_name_of_its_version(model) -> None:
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    expected = model.generate(IDS, **options)
    with QuireCache(model) as cache, warnings.catch_warnings():
        warnings.simplefilter("error")
        tokens = model.generate(IDS, **options, **{str(OWN): cache})
        columns = cache.get_seq_length()

    assert torch.equal(tokens, expected)
    assert columns == tokens.shape[1] - 1


def test_cache_without_layers_does_not_pass_for_linear_attention(model) -> None:
    with QuireCache(model) as cache:
        assert cache.is_linear == [False]


def test_second_cache_under_the_other_name_is_refused(model) -> None:
    with QuireCache(model) as cache, pytest.raises(RequestError, match="not supported"):
        model(IDS, cache=cache, past_key_values=object())


def test_output_has_the_cache_under_one_name() -> None:
    marker = object()
    output = output_with_cache(IDS, marker)

    names = {field.name for field in fields(CausalLMOutputWithPast)}
    assert names & {"cache", "past_key_values"} == {OWN}
    assert output[str(OWN)] is marker


def test_argument_is_read_from_the_parameters() -> None:
    assert cache_argument(["input_ids", "cache"]) == "cache"
    assert cache_argument(["input_ids", "past_key_values"]) == "past_key_values"
    assert cache_argument(["input_ids", "state"]) is None


@pytest.mark.parametrize("kind", [LlamaForCausalLM, Renamed])
def test_dynamic_batch_accepts_both_names_without_a_warning(model, kind) -> None:
    own = kind(model.config).eval()
    own.load_state_dict(model.state_dict())
    own.generation_config.eos_token_id = None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = DynamicBatch(own, batch_size=2)
        handle = batch.submit(IDS[0].tolist(), max_new_tokens=4)
        batch.run()

    expected = IDS
    for _ in range(4):
        following = model(expected).logits[:, -1:].argmax(-1)
        expected = torch.cat([expected, following], dim=1)
    assert list(handle.token_ids) == expected[0, IDS.shape[1] :].tolist()
