import copy
import inspect
import warnings
from dataclasses import fields, replace

import pytest
import torch
from transformers import (
    DynamicCache,
    LlamaForCausalLM,
    PreTrainedModel,
    RwkvConfig,
    RwkvForCausalLM,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from quire.errors import (
    ConfigError,
    OutOfPages,
    RequestError,
    UnknownName,
    UnsoundCombination,
    UnsupportedModel,
)
from quire.hf import DynamicBatch, QuireCache
from quire.hf.cache_rows import check_positions, count_new_tokens, wanted_columns
from quire.hf.evicting import rule_text
from quire.layout.eviction import SCHEDULES
from quire.models.adapter import TransformersDecoder
from quire.models.verify import ReferenceBatch
from quire.models.wrapped import _refuse, cache_argument, output_with_cache
from quire.policies.eviction import make_eviction
from support import zoo

IDS = torch.tensor([[3, 5, 7, 9] * 10])


@pytest.fixture(scope="module")
def model():
    return zoo.build("llama")


@pytest.fixture
def cache(model):
    with QuireCache(model) as cache:
        yield cache


def test_empty_cache_uses_no_memory_and_a_reset_one_accepts_another_batch(cache, model):
    assert (cache.kv_used_bytes, cache.kv_peak_bytes, cache.batch_size) == (0, 0, -1)
    assert cache.get_seq_length() == 0
    with pytest.raises(RequestError, match="empty"):
        cache.retained_positions(0, 0)
    with pytest.raises(ConfigError, match="created for"):
        zoo.build("llama")(IDS, past_key_values=cache)

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


def test_positions_continue_the_cached_ones_and_those_of_padding_are_ignored(model, cache):
    first = model(IDS[:, :30], past_key_values=cache, position_ids=torch.arange(30)[None])
    assert first.past_key_values is cache

    with pytest.raises(RequestError, match="consecutive position_ids from 30 in row 0"):
        model(IDS[:, 30:], past_key_values=cache, position_ids=torch.arange(10)[None])
    with pytest.raises(RequestError, match="holds 1 rows, the batch has 2"):
        model(IDS.repeat(2, 1), past_key_values=cache)
    with pytest.raises(UnsoundCombination, match="cannot be copied"):
        copy.deepcopy(cache)

    counts = count_new_tokens(torch.tensor([[0, 0, 1], [1, 1, 1]]), 3, 0, [0, 0])
    check_positions(torch.tensor([[1, 1, 0], [0, 1, 2]]), counts, [0, 0])
    check_positions(torch.tensor([[3, 4]]), count_new_tokens(None, 2, 3, [3, 3]), [3, 3])
    for positions in ([[0, 1, 2], [1, 2, 3]], [[0, 1, 2], [0, 2, 1]]):  # do not continue row 1
        with pytest.raises(RequestError, match="consecutive position_ids from 0 in row 1"):
            check_positions(torch.tensor(positions), count_new_tokens(None, 3, 0, [0, 0]), [0, 0])


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


def test_closed_cache_is_refused_and_a_collected_one_restores_its_model(model):
    cache = QuireCache(model)
    model(IDS, past_key_values=cache)
    cache.close()
    cache.close()

    with pytest.raises(ConfigError, match="closed"):
        model(IDS, past_key_values=cache)
    with QuireCache(model), pytest.raises(ConfigError, match="closed"):
        model(IDS, past_key_values=cache)

    model = zoo.build("llama")
    found = state(model)

    cache = QuireCache(model)
    assert state(model) != found
    del cache

    assert state(model) == found


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
    attributes = {
        f"{name}.{key}": copied(value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if key not in ("_parameters", "_buffers", "_modules")
    }
    buffers = {name: value.tolist() for name, value in model.named_buffers()}
    return attributes | buffers | {"attention": model.config._attn_implementation}


def copied(value: object) -> object:
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


def test_unsupported_models_and_refused_caches_change_no_model():
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


# ---- arguments of forwards -----------------------------------------------------------------------


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


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_forward_accepts_both_names_without_a_warning(model, name) -> None:
    expected = model(IDS).logits
    with QuireCache(model) as cache, warnings.catch_warnings():
        warnings.simplefilter("error")
        first = model(input_ids=IDS[:, :30], **{name: cache}).logits
        rest = model(input_ids=IDS[:, 30:], **{name: cache})
    assert torch.allclose(torch.cat([first, rest.logits], dim=1), expected, atol=1e-4)
    assert rest.past_key_values is cache


def test_generate_passes_the_one_name_of_the_cache(model):
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    expected = model.generate(IDS, **options)
    with QuireCache(model) as cache, warnings.catch_warnings():
        warnings.simplefilter("error")
        tokens = model.generate(IDS, **options, **{str(OWN): cache})
        columns = cache.get_seq_length()

    assert torch.equal(tokens, expected)
    assert columns == tokens.shape[1] - 1

    with QuireCache(model) as cache, pytest.raises(RequestError, match="not supported"):
        model(IDS, cache=cache, past_key_values=object())
    assert cache.is_linear == [False]  # a cache without layers is not of linear attention
    marker = object()
    output = output_with_cache(IDS, marker)

    names = {field.name for field in fields(CausalLMOutputWithPast)}
    assert names & {"cache", "past_key_values"} == {OWN}
    assert output[str(OWN)] is marker
    for name, expected in ((OWN, OWN), (OTHER, OTHER), ("state", None)):
        assert cache_argument(["input_ids", name]) == expected


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


@pytest.mark.parametrize(
    ("mask", "columns", "past_columns", "lengths", "expected"),
    [
        ([[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]], 4, 0, [0, 0, 0], [2, 4, 0]),
        (None, 3, 7, [7, 5], [3, 3]),
        ([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], 1, 4, [2, 4], [1, 1]),  # of all columns
    ],
)
def test_left_padding_is_not_counted(mask, columns, past_columns, lengths, expected) -> None:
    given = None if mask is None else torch.tensor(mask)
    assert count_new_tokens(given, columns, past_columns, lengths).tolist() == expected


@pytest.mark.parametrize(
    ("mask", "past_columns", "lengths"),
    [
        ([[1, 1, 0]], 0, [0]),  # on the right
        ([[0, 1, 0, 1]], 0, [0]),  # between tokens
        ([[1, 1, 0, 1]], 2, [2]),  # between an earlier forward's tokens and the new ones
        ([[1, 1, 0]], 2, [2]),  # no new token in a row with cached tokens
    ],
)
def test_padding_after_a_token_is_refused(mask, past_columns, lengths) -> None:
    tensor = torch.tensor(mask)
    columns = tensor.shape[1] - past_columns
    with pytest.raises(RequestError, match="padding_side = 'left'"):
        count_new_tokens(tensor, columns, past_columns, lengths)
    with pytest.raises(RequestError, match=r"1\] previous tokens, but \[2\] are cached"):
        count_new_tokens(torch.tensor([[0, 1, 1]]), 1, 2, [2])  # masks a cached token
    for given in (torch.ones(2, 2), torch.ones(1, 1, 3, 3), "causal"):
        with pytest.raises(RequestError, match=r"expected an attention_mask \[1, 3\]"):
            count_new_tokens(given, 3, 0, [0])


@pytest.mark.parametrize(
    ("keep", "columns"),
    [(0, [0, 1, 2, 3]), (1, [3]), (9, [0, 1, 2, 3]), (torch.tensor([0, -1]), [0, 3])],
)
def test_logits_to_keep_has_the_meaning_of_transformers(keep, columns) -> None:
    assert wanted_columns(keep, 4).tolist() == columns
    for refused in (torch.ones(2, 4, dtype=torch.bool), -1, None):  # per row
        with pytest.raises(RequestError, match="logits_to_keep"):
            wanted_columns(refused, 4)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (("recent", 512, None, None), "recent:cap=512"),
        (("recent:sinks=4", "25%", None, None), "recent:sinks=4,cap=25%"),
        (("recent", "2MiB", "decode", 8), "recent:cap=2MiB,when=decode,every=8"),
        (("recent:cap=100", None, None, 9), "recent:cap=100,every=9"),
        (("recent:cap=100", None, None, None), "recent:cap=100"),
        # a compression ratio is the evicted fraction of the prompt
        (("snapkv", *[None] * 3, 0.5), "snapkv:cap=50%"),
        (("h2o:recent=4", *[None] * 3, 0.9), "h2o:recent=4,cap=10%"),
        (("recent", *[None] * 3, 1 / 3), "recent:cap=66.666666667%"),
        (("recent", *[None] * 3, 0.99999), "recent:cap=0.001%"),
        *(((name, *[None] * 3, 0.0), "full") for name in ("recent", "full")),
        (("full", *[None] * 4), "full"),
    ],
)
def test_budget_ratio_and_schedule_become_policy_options(given, text) -> None:
    assert rule_text(*given) == text


@pytest.mark.parametrize("ratio", [0.1, 0.3, 0.7, 0.9])
def test_compression_ratio_keeps_exact_token_counts(ratio) -> None:
    cap = make_eviction(rule_text("recent", None, None, None, ratio)).cap
    sizes = {"page_tokens": 16, "page_bytes": 1, "fixed_bytes": 0}
    assert cap.resolve(300, **sizes) == round(300 * (1 - ratio))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (("recnt", 512, None, None), UnknownName, "did you mean recent"),
        (("recnt", None, None, None, 0.0), UnknownName, "did you mean recent"),
        (("recent", None, None, None, 1.0), ConfigError, "at least 0 and below 1, got 1.0"),
        (("recent", None, None, None, -0.1), ConfigError, "below 1, got -0.1"),
        (("recent", None, None, None, float("nan")), ConfigError, "below 1, got nan"),
        (("recent", 64, None, None, 0.5), ConfigError, "either budget=64 or compression_ratio"),
        (("recent:cap=64", None, None, None, 0.0), ConfigError, "either cap= in policy="),
        (("full", None, None, None, 0.5), ConfigError, "use an eviction policy"),
        (("full", None, "decode", None, 0.0), ConfigError, "when has no effect"),
        (("recent", 512, "now", None), UnknownName, "schedule 'now'"),
        (("recent:sink=4", 512, None, None), ConfigError, "sinks"),
        (("recent:cap=5", 512, None, None), ConfigError, "is repeated"),
        (("recent", None, None, None), ConfigError, "needs a cap"),
        (("full", 512, None, None), ConfigError, "full"),
        (("full", None, "decode", None), ConfigError, "when has no effect"),
        (("recent:sinks=70", 80, None, None), ConfigError, "needs 71"),
        (("recent", 64, None, 64), ConfigError, "1 <= every < cap"),
        ((7, 64, None, None), ConfigError, "expected policy to be a text such as"),
    ],
)
def test_invalid_options_are_refused_by_name(given, error, message) -> None:
    with pytest.raises(error, match=message):
        rule_text(*given)
