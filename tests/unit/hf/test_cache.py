"""`QuireCache`: refused arguments, and reported properties."""

import copy

import pytest
import torch

from quire.errors import (
    ConfigError,
    OutOfPages,
    RequestError,
    UnknownName,
    UnsoundCombination,
)
from quire.hf import QuireCache
from quire.layout.eviction import SCHEDULES
from support import zoo

IDS = torch.tensor([[3, 5, 7, 9] * 10])


@pytest.fixture(scope="module")
def model():
    return zoo.build("llama")


@pytest.fixture
def cache(model):
    with QuireCache(model) as cache:
        yield cache


def test_empty_cache_uses_no_memory(cache) -> None:
    assert (cache.kv_used_bytes, cache.kv_peak_bytes, cache.batch_size) == (0, 0, -1)
    assert cache.get_seq_length() == 0
    with pytest.raises(RequestError, match="empty"):
        cache.retained_positions(0, 0)


def test_reset_cache_accepts_another_batch(model, cache) -> None:
    expected = model(IDS).logits
    model(IDS.repeat(2, 1), past_key_values=cache)
    cache.reset()

    assert (cache.kv_used_bytes, cache.get_seq_length()) == (0, 0)
    assert torch.allclose(model(IDS, past_key_values=cache).logits, expected, atol=1e-4)
    assert cache.kv_peak_bytes > 0
    cache.reset()
    assert model(IDS.repeat(5, 1), past_key_values=cache).logits.shape[0] == 5


@pytest.mark.parametrize("when", SCHEDULES)
@pytest.mark.parametrize(
    "options", [{"budget": "50%"}, {"budget": "1%"}, {"compression_ratio": 0.9}], ids=str
)
@pytest.mark.parametrize("policy", ["snapkv", "lagkv", "rkv:budget=pyramid"])
def test_short_prompt_under_a_budget_in_percent_is_generated_like_without(
    model, policy, options, when
) -> None:
    for tokens in (1, 3, 20):
        ids = IDS[:, :tokens]
        sampled = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        expected = model.generate(ids, **sampled)
        with QuireCache(model, policy, when=when, memory="8MiB", verify=False, **options) as cache:
            assert torch.equal(model.generate(ids, cache=cache, **sampled), expected)


def test_positions_must_continue_the_cached_ones(model, cache) -> None:
    first = model(IDS[:, :30], past_key_values=cache, position_ids=torch.arange(30)[None])
    assert first.past_key_values is cache

    with pytest.raises(RequestError, match="consecutive position_ids from 30 in row 0"):
        model(IDS[:, 30:], past_key_values=cache, position_ids=torch.arange(10)[None])


def test_return_dict_false_returns_a_tuple(model, cache) -> None:
    logits, returned = model(IDS, past_key_values=cache, return_dict=False, logits_to_keep=1)

    assert logits.shape == (1, 1, zoo.VOCAB_SIZE)
    assert returned is cache


def test_forward_accepts_positional_arguments(model, cache) -> None:
    out = model(IDS, torch.ones_like(IDS), None, cache)

    assert out.past_key_values is cache


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_cache": False}, "exclude each other"),
        ({"output_attentions": True}, "output_attentions=True is not supported"),
        ({"output_hidden_states": True}, "output_hidden_states=True is not supported"),
        ({"labels": IDS}, "labels"),
        ({"inputs_embeds": torch.zeros(1, 40, 32), "input_ids": None}, "inputs_embeds"),
        ({"input_ids": IDS[0]}, r"\[rows, columns\]"),
    ],
)
def test_unsupported_forward_options_are_refused(model, cache, options, message) -> None:
    with pytest.raises(RequestError, match=message):
        model(**{"input_ids": IDS, "past_key_values": cache, **options})


def test_different_batch_size_is_refused(model, cache) -> None:
    model(IDS, past_key_values=cache)

    with pytest.raises(RequestError, match="holds 1 rows, the batch has 2"):
        model(IDS.repeat(2, 1), past_key_values=cache)


def test_cache_of_another_model_is_refused(cache) -> None:
    with pytest.raises(ConfigError, match="created for"):
        zoo.build("llama")(IDS, past_key_values=cache)


def test_closed_cache_is_refused(model) -> None:
    cache = QuireCache(model)
    model(IDS, past_key_values=cache)
    cache.close()
    cache.close()

    with pytest.raises(ConfigError, match="closed"):
        model(IDS, past_key_values=cache)
    with QuireCache(model), pytest.raises(ConfigError, match="closed"):
        model(IDS, past_key_values=cache)


def test_a_copy_is_refused(cache) -> None:
    with pytest.raises(UnsoundCombination, match="cannot be copied"):
        copy.deepcopy(cache)


def test_too_small_memory_is_refused_with_the_needed_bytes(model) -> None:
    with pytest.raises(ConfigError, match=r"4,096 B, but one token in each of 1 row"):
        QuireCache(model, memory=4096, page_tokens=64).run_forward({"input_ids": IDS})
    with QuireCache(model, memory=8192, page_tokens=4) as cache:
        with pytest.raises(
            OutOfPages, match=r"40 tokens: [\d,]+ B more .* 8,192 of 8,192 B are free"
        ):
            model(IDS, past_key_values=cache)

        assert cache.get_seq_length() == 0
        assert model(IDS[:, :8], past_key_values=cache).logits.isfinite().all()
    with pytest.raises(ConfigError, match="B are free on"):
        QuireCache(model, memory="900TiB").run_forward({"input_ids": IDS})


def test_sequence_longer_than_max_tokens_is_refused(model) -> None:
    cache = QuireCache(model, max_tokens=39)

    with pytest.raises(RequestError, match="max_tokens=39"):
        model(IDS, past_key_values=cache)
    cache.close()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"policy": "h3o", "budget": 64}, UnknownName, "did you mean h2o"),
        ({"policy": "recent:sinks=30", "budget": 36, "every": 8}, ConfigError, "needs 31"),
        ({"policy": "recent", "budget": "1KiB", "every": 8}, ConfigError, "cap"),
    ],
)
def test_invalid_eviction_rule_is_refused(model, options, error, message) -> None:
    with pytest.raises(error, match=message), QuireCache(model, **options) as cache:
        model(IDS, past_key_values=cache)


@torch.inference_mode()
def test_cache_works_with_and_without_inference_mode(model) -> None:
    cache = QuireCache(model)
    first = model(IDS[:, :20], past_key_values=cache).logits
    with torch.inference_mode(mode=False):
        second = model(IDS[:, 20:], past_key_values=cache).logits
    whole = torch.cat([first, second], dim=1)

    assert not second.requires_grad
    assert torch.allclose(whole, model(IDS).logits, atol=1e-4)
    cache.close()
