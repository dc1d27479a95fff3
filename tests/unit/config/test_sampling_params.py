"""Sampling options: validation, and defaults for unset options."""

import pickle
from dataclasses import dataclass

import numpy as np
import pytest

from quire.config.sampling_params import SamplingParams
from quire.errors import RequestError


@dataclass(frozen=True)
class Defaults:
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


NAN, INF = float("nan"), float("inf")
WRONG = {
    "max_tokens": [-1, 2.0, True, None, 0],
    "temperature": [NAN, INF, -0.1, "hot", False, 1e-320, 1e-40, 1e300],
    "top_k": [-2, 1.5],
    "top_p": [0.0, 1.01],
    "min_p": [-0.1, 2, 1e-300],
    "repetition_penalty": [0.0, INF, 1e-320, 1e-7, 1e7],
    "length_penalty": [1e5, -1e5],
    "presence_penalty": [2.1, None],
    "frequency_penalty": [-2.1],
    "logit_bias": [{1: 1e-320}, {1: 101.0}, {-1: 1.0}, {"1": 1.0}, [1]],
    "allowed_token_ids": [[], [1.0], "12"],
    "bad_token_ids": [[[]], [1]],
    "stop": ["", ["a", ""], [1], 5],
    "stop_token_ids": [5, [-1]],
    "ignore_eos": [1],
    "logprobs": [-1],
    "prompt_logprobs": ["all"],
    "seed": [2**64, 0.5],
}


def test_invalid_option_is_refused_by_name():
    for name, value in [(name, value) for name, values in WRONG.items() for value in values]:
        with pytest.raises(RequestError, match=name):
            SamplingParams(**{name: value})


def test_error_names_the_expected_and_the_given_value():
    with pytest.raises(RequestError, match="min_tokens"):
        SamplingParams(max_tokens=4, min_tokens=5)
    with pytest.raises(RequestError) as refusal:
        SamplingParams(top_p=1.5)
    assert str(refusal.value) == "top_p must be a finite number in (0, 1], got 1.5"


def test_values_are_python_tuples_and_numbers_of_their_own():
    bias = {1: 2.0}
    lists = {"stop_token_ids": [3, 4], "bad_token_ids": [[1], [2, 3]], "allowed_token_ids": {7}}
    given = {"max_tokens": np.int64(8), "temperature": np.float32(0.5), "top_p": 1}
    params = SamplingParams(stop="END", logit_bias=bias, **lists, **given)
    bias[1] = -2.0

    assert (params.stop, params.stop_token_ids) == (("END",), (3, 4))
    assert (params.bad_token_ids, params.allowed_token_ids) == (((1,), (2, 3)), (7,))
    numbers = (params.max_tokens, params.temperature, params.top_p)
    assert [type(number) for number in numbers] == [int, float, float]
    assert params.logit_bias == {1: 2.0}


def test_equal_options_hash_equal_and_can_be_pickled():
    first = SamplingParams(logit_bias={1: 2.0}, stop="x")
    assert {first: "seen"}[SamplingParams(logit_bias={1: 2}, stop=["x"])] == "seen"
    assert pickle.loads(pickle.dumps(first)) == first
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0


@pytest.mark.parametrize(
    ("model", "given", "used", "text"),
    [
        ({}, {}, (0.2, 0.9), "temperature 0.2 (Quire's default), top_p 0.9 (Quire's default)"),
        ({"top_p": 0.8}, {}, (0.2, 0.8), "0.2 (Quire's default), top_p 0.8 (the model's)"),
        ({}, {"top_p": 0.5}, (0.2, 0.5), "temperature 0.2 (Quire's default), top_p 0.5"),
        ({}, {"temperature": 1.0}, (1.0, 1.0), "temperature 1"),
        ({}, {"temperature": 0.0, "top_p": 0.5}, (0.0, 0.5), "temperature 0, top_p 0.5"),
        ({"temperature": 0.0}, {}, (0.0, 1.0), "temperature 0 (the model's)"),
        ({"temperature": 0.6, "top_p": 0.95}, {}, (0.6, 0.95), "top_p 0.95 (the model's)"),
        ({}, {"use_beam_search": True, "beam_width": 2}, (0.0, 1.0), "temperature 0"),
    ],
)
def test_response_has_a_temperature_if_the_model_names_none(model, given, used, text):
    defaults, params = Defaults(**model), SamplingParams(**given)
    resolved = params.with_response_defaults(defaults).resolve(defaults)
    assert (resolved.temperature, resolved.top_p) == used
    assert params.response_text(defaults, ("temperature", "top_p")).endswith(text)


MODEL = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.05}
NEUTRAL = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


@pytest.mark.parametrize(
    ("given", "model", "expected"),
    [
        ({"top_p": 0.5, "max_tokens": 9}, MODEL, MODEL | {"top_p": 0.5, "max_tokens": 9}),
        ({}, {}, NEUTRAL),
        # an explicit zero overrides the model's default
        ({"temperature": 0, "top_k": 0}, {"temperature": 1.0, "top_k": 50}, NEUTRAL),
    ],
)
def test_unset_options_are_resolved_from_the_model_defaults(given, model, expected):
    resolved = SamplingParams(**given).resolve(Defaults(**model))
    assert resolved == SamplingParams(**expected)
    assert resolved.greedy == (resolved.temperature == 0)
    assert resolved.edits_logits == (resolved.repetition_penalty != 1)


@pytest.mark.parametrize("temperature", [None, 0, 1e-6])
def test_unset_or_near_zero_temperature_is_greedy(temperature):
    assert SamplingParams(temperature=temperature).greedy
    assert not SamplingParams(temperature=1e-4).greedy


@pytest.mark.parametrize(
    "option",
    [
        *({"allowed_token_ids": [1]}, {"bad_token_ids": [[1]]}, {"logit_bias": {1: 1.0}}),
        *({"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"frequency_penalty": -0.1}),
    ],
    ids=str,
)
def test_masks_biases_and_penalties_edit_the_logits(option):
    assert SamplingParams(**option).edits_logits


@pytest.mark.parametrize(
    "options",
    [
        *({"allowed_token_ids": [9, 10]}, {"bad_token_ids": [[1], [2, 10]]}),
        *({"logit_bias": {10: 1.0}}, {"stop_token_ids": [10]}),
        *({"logprobs": 11}, {"prompt_logprobs": 11}),
    ],
    ids=str,
)
def test_token_id_outside_the_vocabulary_is_refused(options):
    params = SamplingParams(**options)
    params.validate_for(11)
    with pytest.raises(RequestError, match=next(iter(options))):
        params.validate_for(10)
