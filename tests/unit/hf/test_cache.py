"""`QuireCache`: refused arguments, reported properties, and the model that it wraps."""

import copy
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, RwkvConfig, RwkvForCausalLM

from quire.errors import (
    ConfigError,
    OutOfPages,
    RequestError,
    UnknownName,
    UnsoundCombination,
    UnsupportedModel,
)
from quire.hf import QuireCache
from quire.layout.eviction import SCHEDULES
from quire.models.adapter import TransformersDecoder
from quire.models.verify import ReferenceBatch
from quire.models.wrapped import _refuse
from support import zoo

IDS = torch.tensor([[3, 5, 7, 9] * 10])


@pytest.fixture(scope="module")
def model():
    return zoo.build("llama")


@pytest.fixture
def cache(model):
    with QuireCache(model) as cache:
        yield cache


def test_empty_cache_uses_no_memory_and_belongs_to_its_model(cache) -> None:
    assert (cache.kv_used_bytes, cache.kv_peak_bytes, cache.batch_size) == (0, 0, -1)
    assert cache.get_seq_length() == 0
    with pytest.raises(RequestError, match="empty"):
        cache.retained_positions(0, 0)
    with pytest.raises(ConfigError, match="created for"):
        zoo.build("llama")(IDS, past_key_values=cache)


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
    with pytest.raises(RequestError, match="holds 1 rows, the batch has 2"):
        model(IDS.repeat(2, 1), past_key_values=cache)
    with pytest.raises(UnsoundCombination, match="cannot be copied"):
        copy.deepcopy(cache)


def test_forward_accepts_positional_arguments_and_can_return_a_tuple(model, cache) -> None:
    assert model(IDS[:, :30], torch.ones(1, 30), None, cache).past_key_values is cache
    options = {"return_dict": False, "logits_to_keep": 1}
    logits, returned = model(IDS[:, 30:], past_key_values=cache, **options)
    assert logits.shape == (1, 1, zoo.VOCAB_SIZE)
    assert returned is cache


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


def test_closed_cache_is_refused(model) -> None:
    cache = QuireCache(model)
    model(IDS, past_key_values=cache)
    cache.close()
    cache.close()

    with pytest.raises(ConfigError, match="closed"):
        model(IDS, past_key_values=cache)
    with QuireCache(model), pytest.raises(ConfigError, match="closed"):
        model(IDS, past_key_values=cache)


def test_too_small_memory_or_max_tokens_is_refused_with_the_needed_bytes(model) -> None:
    with pytest.raises(ConfigError, match=r"4,096 B, but one token in each of 1 row"):
        QuireCache(model, memory=4096, page_tokens=64).run_forward({"input_ids": IDS})
    with QuireCache(model, memory=8192, page_tokens=4) as cache:
        with pytest.raises(OutOfPages, match=r"40 tokens: [\d,]+ B more .* 8,192 of 8,192 B are f"):
            model(IDS, past_key_values=cache)

        assert cache.get_seq_length() == 0
        assert model(IDS[:, :8], past_key_values=cache).logits.isfinite().all()
    with pytest.raises(ConfigError, match="B are free on"):
        QuireCache(model, memory="900TiB").run_forward({"input_ids": IDS})
    too_long = pytest.raises(RequestError, match="max_tokens=39")
    with QuireCache(model, max_tokens=39) as cache, too_long:
        model(IDS, past_key_values=cache)


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


ARCHITECTURES = ("llama", "gemma3", "gpt2", "phi3_longrope")


def state(model: PreTrainedModel) -> dict[str, object]:
    """All state of a model that wrapping could change."""
    attributes = {
        f"{name}.{key}": copied(value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if key not in ("_parameters", "_buffers", "_modules")
    }
    buffers = {name: value.tolist() for name, value in model.named_buffers()}
    return attributes | buffers | {"attention": model.config._attn_implementation}


def copied(value: object) -> object:
    """A comparable copy of a value."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return dict(value) if isinstance(value, dict) else value


def ids(count: int = 40) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(2, zoo.VOCAB_SIZE, (1, count), generator=generator)


@torch.no_grad()
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_model_is_unchanged_before_during_and_after_wrapping(name) -> None:
    model = zoo.build(name)
    expected, found = model(ids()).logits, state(model)

    with QuireCache(model, max_tokens=64) as cache:
        model(ids(), past_key_values=cache)
        between = model(ids()).logits
        original = model(ids(), past_key_values=DynamicCache()).logits

    assert state(model) == found
    assert torch.equal(between, expected)
    assert torch.equal(original, expected)
    assert torch.equal(model(ids()).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize("policy", ["expected_attention", "triattention", "h2o:budget=squeeze"])
def test_policy_hooks_are_removed_on_close(policy) -> None:
    model = zoo.build("llama")
    found = state(model)

    with QuireCache(model, policy, 24, every=4, when="prefill_end") as cache:
        model(ids(), past_key_values=cache)
        assert cache.kv_used_bytes > 0
        heads = [head for layer in (0, 1) for head in cache.retained_positions(0, layer)]
        assert min(map(len, heads)) < 40

    assert state(model) == found


@torch.no_grad()
def test_two_caches_of_one_model_are_independent() -> None:
    model = zoo.build("llama")
    found = state(model)
    full = QuireCache(model)
    small = QuireCache(model, "recent", 24, every=8)

    expected = model(ids()).logits
    evicted = model(ids(), past_key_values=small).logits
    small.close()
    whole = model(ids(), past_key_values=full).logits
    full.close()

    assert torch.allclose(whole, expected, atol=1e-4)
    assert not torch.allclose(evicted, expected, atol=1e-4)
    assert state(model) == found


def test_garbage_collected_cache_restores_its_model() -> None:
    model = zoo.build("llama")
    found = state(model)

    cache = QuireCache(model)
    assert state(model) != found
    del cache

    assert state(model) == found


def test_wrappers_of_forward_are_kept_or_restored() -> None:
    model = zoo.build("llama")
    with QuireCache(model):
        wrapped = model.forward
        model.forward = outer = lambda *arguments, **options: wrapped(*arguments, **options)
    assert model.forward is outer
    assert torch.isfinite(model(ids()).logits).all()

    with QuireCache(model) as cache:  # with an earlier wrapper
        model(ids(), past_key_values=cache)
    assert model.forward is outer


def test_unsupported_models_are_refused() -> None:
    rwkv = RwkvForCausalLM(RwkvConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2))

    with pytest.raises(UnsupportedModel, match="not a cache"):
        QuireCache(rwkv.eval())
    with pytest.raises(UnsupportedModel, match=r"takes no cache.*use quire\.LLM"):
        QuireCache(zoo.build("openai_gpt"))
    with pytest.raises(ConfigError, match="got Linear"):
        _refuse(torch.nn.Linear(1, 1))
    with pytest.raises(ConfigError, match=r"model.eval\(\)"):
        QuireCache(zoo.build("llama").train())
    with pytest.raises(ConfigError, match="belongs to a Quire engine"):
        QuireCache(TransformersDecoder(zoo.build("llama")).model)


def test_refused_cache_leaves_the_model_unchanged() -> None:
    mistral, phi3 = zoo.build("mistral"), zoo.build("phi3_longrope")
    found = state(mistral), state(phi3)

    with pytest.raises(ConfigError, match="sliding window"):
        QuireCache(mistral, "recent", 24, every=8)
    with pytest.raises(ConfigError, match="max_tokens="):
        QuireCache(phi3)

    assert (state(mistral), state(phi3)) == found


def test_model_with_different_paged_logits_is_refused(monkeypatch) -> None:
    model = zoo.build("llama")
    found = state(model)
    attend = ReferenceBatch.attend

    def changed(batch, call, *states):
        return attend(batch, replace(call, scale=1.0), *states)

    monkeypatch.setattr(ReferenceBatch, "attend", changed)

    with pytest.raises(UnsupportedModel, match="logits differ"):
        QuireCache(model)

    assert state(model) == found
