"""What a Python caller hands in, as types: refused by name where Python would stumble later.

Everything here takes `object`, because what a caller really gives is what is to be found out.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from quire.config.sampling_params import SamplingParams
from quire.errors import RequestError


def as_prompts(prompts: object) -> list[object]:
    """One prompt or many as a list; what is neither stays one, for `as_token_ids` to refuse."""
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        return [prompts]
    many = list(prompts)
    return [many] if many and isinstance(many[0], Integral) else many


def as_token_ids(prompt: object) -> list[int]:
    """A prompt that is not text.

    Raises:
        RequestError: it is no list; what it holds is checked when it is submitted.
    """
    if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Sequence):
        raise RequestError(
            f"expected a prompt (a text or a list of token ids), got {type(prompt).__name__}"
            + _hint(prompt)
        )
    return list(prompt)


def as_options(sampling: object, count: int) -> list[SamplingParams | None]:
    """Sampling options, one for each of `count` prompts; None where none are given.

    Raises:
        RequestError: neither one SamplingParams nor a list of `count` of them.
    """
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling] * count
    given = sampling if isinstance(sampling, Sequence) else [sampling]
    options: list[SamplingParams | None] = []
    for params in given:
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"expected SamplingParams, got {type(params).__name__}; "
                "write SamplingParams(max_tokens=16)"
            )
        options.append(params)
    if len(options) != count:
        raise RequestError(f"expected one SamplingParams or {count} of them, got {len(options)}")
    return options


def as_policies(evict: object, count: int) -> list[str | None]:
    """Eviction policies, one for each of `count` prompts; None where none are given.

    Raises:
        RequestError: neither one text nor a list of `count` texts.
    """
    if evict is None or isinstance(evict, str):
        return [evict] * count
    policies: list[str | None] = []
    for text in evict if isinstance(evict, Sequence) else [evict]:
        if text is not None and not isinstance(text, str):
            raise RequestError(f"expected evict to be a text such as 'h2o:cap=512', got {text!r}")
        policies.append(text)
    if len(policies) != count:
        raise RequestError(f"expected one eviction policy or {count} of them, got {len(policies)}")
    return policies


@dataclass(frozen=True, slots=True)
class Place:
    """A request's place in line.

    Attributes:
        priority: lower goes first.
        deadline_s: seconds from now in which its answer is wanted; None: whenever it comes.
    """

    priority: int = 0
    deadline_s: float | None = None


NO_PLACE = Place()


def as_places(priority: object, deadline_s: object, count: int) -> list[Place]:
    """Places in line, one for each of `count` prompts.

    Raises:
        RequestError: neither one number nor a list of `count` of them.
    """
    priorities = _as_numbers("priority", priority, count, Integral)
    deadlines = _as_numbers("deadline_s", deadline_s, count, Real, type(None))
    return [
        Place(p, None if d is None else float(d))
        for p, d in zip(priorities, deadlines, strict=True)
    ]


def _as_numbers(name: str, given: object, count: int, *kinds: type) -> list[Any]:
    many = [given] * count
    if isinstance(given, Sequence) and not isinstance(given, str):
        many = list(given)
    if len(many) != count:
        raise RequestError(f"expected one {name} or {count} of them, got {len(many)}")
    for value in many:
        if isinstance(value, bool) or not isinstance(value, kinds):
            whole = "a whole number" if Integral in kinds else "a number"
            raise RequestError(f"expected {name} to be {whole}, got {value!r}")
    return many


def _hint(prompt: object) -> str:
    if isinstance(prompt, bytes | bytearray):
        return "; decode it"
    return "; give it as .tolist()" if hasattr(prompt, "tolist") else ""
