"""Checks of single sampling options: each returns the converted value or raises an error."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Integral, Real
from typing import cast

from quire.config.structured_outputs import as_structured_outputs
from quire.errors import RequestError

LEAST_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-6, 1e6
"""Range of repetition penalties: logits divided or multiplied by them are finite in float32."""

MAX_PENALTY = 2.0
"""Maximum magnitude of presence and frequency penalties (OpenAI's range)."""

MAX_LOGIT_BIAS = 100.0
"""Maximum magnitude of a logit bias (OpenAI's range)."""

MAX_CHOICES = 128
"""Maximum number of sequences for one prompt, as in OpenAI's API."""

LARGEST_COUNT = 2**31 - 1
"""Maximum count and token id: sums and products of them fit in int64."""

LEAST_NORMAL = 2.0**-126
"""The smallest normal float32. A sampler in float32 may treat smaller numbers as 0."""

LARGEST_NUMBER = (2 - 2.0**-23) * 2.0**127
"""The largest float32."""

MAX_LENGTH_PENALTY = 10.0
"""Maximum magnitude of a length penalty: a length to this power is a finite float64 above 0."""


def _refuse(name: str, expected: str, value: object) -> RequestError:
    return RequestError(f"{name} must be {expected}, got {value!r}", param=name)


def _integer(low: int, high: int = LARGEST_COUNT) -> Callable[[str, object], int]:
    span = f"an integer in [{low}, {high}]"

    def check(name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise _refuse(name, span, value)
        number = int(value)
        if not low <= number <= high:
            raise _refuse(name, span, value)
        return number

    return check


def _number(
    low: float, high: float = LARGEST_NUMBER, *, above_low: bool = False
) -> Callable[[str, object], float]:
    bracket = "(" if above_low else "["
    end = "inf)" if high == LARGEST_NUMBER else f"{high:g}]"
    span = f"a finite number in {bracket}{low:g}, {end}"
    normal = f"{span}, 0 or at least {LEAST_NORMAL:.3g} in magnitude (float32)"

    def check(name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise _refuse(name, span, value)
        try:
            number = float(value)
        except OverflowError:  # a large integer
            number = math.inf
        if not low <= number <= high or number == math.inf or (above_low and number == low):
            raise _refuse(name, span, value)
        if 0 < abs(number) < LEAST_NORMAL:
            raise _refuse(name, normal, value)
        return number

    return check


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _refuse(name, "true or false", value)
    return value


def _early_stopping(name: str, value: object) -> bool | str:
    if value is True or value is False or value == "never":
        return value
    raise _refuse(name, 'true, false or "never"', value)


def _pooling(name: str, value: object) -> str:
    if isinstance(value, str) and value in ("last", "mean"):
        return value
    raise _refuse(name, '"last" or "mean"', value)


def _texts(name: str, value: object) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, Iterable):
        raise _refuse(name, "a string or a list of strings", value)
    listed = tuple(texts)
    if not all(isinstance(text, str) and text for text in listed):
        raise _refuse(name, "a string or a list of strings, none of them empty", value)
    return listed


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise _refuse(name, "a list of token ids", value)
    token_ids = tuple(value)
    if _are_token_ids(token_ids):
        return token_ids
    return tuple(_token_id(name, token) for token in token_ids)


def _are_token_ids(values: Collection[object]) -> bool:
    """Whether all values are token ids. Fast, since a list may be as long as the vocabulary."""
    if set(map(type, values)) != {int}:
        return False
    numbers = cast("Collection[int]", values)
    return min(numbers) >= 0 and max(numbers) <= LARGEST_COUNT


def _some_token_ids(name: str, value: object) -> tuple[int, ...]:
    token_ids = _token_ids(name, value)
    if not token_ids:
        raise _refuse(name, "a list with at least one token id", value)
    return token_ids


def _sequences(name: str, value: object) -> tuple[tuple[int, ...], ...]:
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise _refuse(name, "a list of lists of token ids", value)
    return tuple(_some_token_ids(name, sequence) for sequence in value)


def _biases(name: str, value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise _refuse(name, "a mapping from token id to bias", value)
    if _are_token_ids(value.keys()) and all(map(_is_plain_bias, value.values())):
        return {token: float(bias) for token, bias in value.items()}
    return {_token_id(name, token): _bias(name, bias) for token, bias in value.items()}


def _is_plain_bias(value: object) -> bool:
    if type(value) is not float and type(value) is not int:
        return False
    return LEAST_NORMAL <= abs(value) <= MAX_LOGIT_BIAS or value == 0


_token_id = _integer(0)
_bias = _number(-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
_penalty = _number(-MAX_PENALTY, MAX_PENALTY)

OPTIONAL = frozenset(
    {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "logit_bias"}
    | {"allowed_token_ids", "logprobs", "prompt_logprobs", "seed", "best_of", "beam_width"}
    | {"structured_outputs", "pooling"}
)
"""Options for which None means unset."""

FIELD_CHECKS: dict[str, Callable[[str, object], object]] = {
    "max_tokens": _integer(0),
    "min_tokens": _integer(0),
    "temperature": _number(0.0),
    "top_k": _integer(-1),
    "top_p": _number(0.0, 1.0, above_low=True),
    "min_p": _number(0.0, 1.0),
    "repetition_penalty": _number(LEAST_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
    "presence_penalty": _penalty,
    "frequency_penalty": _penalty,
    "logit_bias": _biases,
    "allowed_token_ids": _some_token_ids,
    "bad_token_ids": _sequences,
    "structured_outputs": as_structured_outputs,
    "stop": _texts,
    "stop_token_ids": _token_ids,
    "include_stop_str_in_output": _flag,
    "ignore_eos": _flag,
    "logprobs": _integer(0),
    "prompt_logprobs": _integer(0),
    "pooling": _pooling,
    "seed": _integer(-(2**63), 2**64 - 1),
    "skip_special_tokens": _flag,
    "n": _integer(1, MAX_CHOICES),
    "best_of": _integer(1, MAX_CHOICES),
    "use_beam_search": _flag,
    "beam_width": _integer(1, MAX_CHOICES),
    "length_penalty": _number(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
    "early_stopping": _early_stopping,
}
