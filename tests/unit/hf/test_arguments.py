"""Arguments of `QuireCache` and of forwards with one: names, masks, positions, policy texts."""

import inspect
import warnings
from dataclasses import fields

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from quire.errors import ConfigError, RequestError, UnknownName
from quire.hf import DynamicBatch, QuireCache
from quire.hf.cache_rows import check_positions, count_new_tokens, wanted_columns
from quire.hf.evicting import make_rule
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


def test_the_cache_has_one_name(model) -> None:
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


def test_positions_of_padding_are_ignored_and_those_of_one_row_apply_to_all_rows() -> None:
    counts = count_new_tokens(torch.tensor([[0, 0, 1], [1, 1, 1]]), 3, 0, [0, 0])
    check_positions(torch.tensor([[1, 1, 0], [0, 1, 2]]), counts, [0, 0])
    check_positions(torch.tensor([[3, 4]]), count_new_tokens(None, 2, 3, [3, 3]), [3, 3])
    for positions in ([[0, 1, 2], [1, 2, 3]], [[0, 1, 2], [0, 2, 1]]):  # do not continue row 1
        with pytest.raises(RequestError, match="consecutive position_ids from 0 in row 1"):
            check_positions(torch.tensor(positions), count_new_tokens(None, 3, 0, [0, 0]), [0, 0])


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
    ],
)
def test_budget_and_schedule_become_policy_options(given, text) -> None:
    assert make_rule(*given).text == text


@pytest.mark.parametrize(
    ("policy", "ratio", "text"),
    [
        ("snapkv", 0.5, "snapkv:cap=50%"),
        ("h2o:recent=4", 0.9, "h2o:recent=4,cap=10%"),
        ("recent", 1 / 3, "recent:cap=66.666666667%"),
        ("recent", 0.99999, "recent:cap=0.001%"),
        ("recent", 0.0, "full"),
        ("full", 0.0, "full"),
        ("full", None, "full"),
    ],
)
def test_compression_ratio_is_the_evicted_fraction_of_the_prompt(policy, ratio, text) -> None:
    assert make_rule(policy, None, None, None, ratio).text == text


@pytest.mark.parametrize("ratio", [0.1, 0.3, 0.7, 0.9])
def test_compression_ratio_keeps_exact_token_counts(ratio) -> None:
    cap = make_rule("recent", None, None, None, ratio).cap
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
        make_rule(*given)
