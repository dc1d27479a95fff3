"""A wrapped model computes as before, and is restored when its cache is closed."""

from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, RwkvConfig, RwkvForCausalLM

from quire.errors import ConfigError, UnsupportedModel
from quire.hf import QuireCache
from quire.models.adapter import TransformersDecoder
from quire.models.verify import ReferenceBatch
from quire.models.wrapped import _refuse
from support import zoo

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


@pytest.fixture(params=ARCHITECTURES)
def model(request) -> PreTrainedModel:
    return zoo.build(request.param)


@torch.no_grad()
def test_model_is_unchanged_before_during_and_after_wrapping(model) -> None:
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


def test_later_wrapper_of_forward_is_kept() -> None:
    model = zoo.build("llama")
    with QuireCache(model):
        wrapped = model.forward

        def outer(*arguments, **options):
            return wrapped(*arguments, **options)

        model.forward = outer

    assert model.forward is outer
    assert torch.isfinite(model(ids()).logits).all()


def test_earlier_wrapper_of_forward_is_restored() -> None:
    model = zoo.build("llama")
    original = model.forward
    model.forward = lambda *arguments, **options: original(*arguments, **options)
    found = model.forward

    with QuireCache(model) as cache:
        model(ids(), past_key_values=cache)

    assert model.forward is found


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
    monkeypatch.setattr(
        ReferenceBatch,
        "attend",
        lambda batch, call, *states: attend(batch, replace(call, scale=1.0), *states),
    )

    with pytest.raises(UnsupportedModel, match="logits differ"):
        QuireCache(model)

    assert state(model) == found
