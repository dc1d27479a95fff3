"""Parses the prompts of a line of `quire batch`."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from quire.config.generation_request import OPTION_KINDS
from quire.config.sampling_params import SamplingParams
from quire.errors import RequestError
from quire.serve.fields import nearest, shown_name

_MAX_CHARACTERS = 80
_FIELDS = {
    *("id", "prompt", "messages"),
    *(field.name for field in fields(SamplingParams)),
    *OPTION_KINDS,
}
"""Fields of a plain line."""


def read_prompts(value: Any, prefix: str, *, several: bool) -> list[str | list[int]]:
    """Parse the prompts of a line, each a text or token ids."""
    is_list = isinstance(value, list) and bool(value) and isinstance(value[0], str | list)
    if not is_list:
        return [read_prompt(value, prefix)]
    if not several:
        raise RequestError(
            "expected one prompt, got a list of prompts: write one line per prompt, or a line with "
            "url /v1/completions and a body"
        )
    if len({isinstance(prompt, str) for prompt in value}) > 1:
        raise RequestError(
            "expected a prompt or a list of prompts of one kind, texts or lists of token ids, got "
            f"{shown(value)}"
        )
    return [read_prompt(prompt, prefix) for prompt in value]


def read_prompt(value: Any, prefix: str) -> str | list[int]:
    """Parse one prompt."""
    if isinstance(value, str) and (prefix or value):
        return prefix + value
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return value
    raise RequestError(
        f"expected a prompt: a text or a list of token ids, not empty, got {shown(value)}"
    )


def no_prompt(line: Mapping[str, Any]) -> str:
    """The error text of a plain line with neither prompt nor messages, or with both.

    It names the first unknown field, since that may be a misspelled prompt.
    """
    message = "expected either a prompt or messages in the line"
    unknown = [name for name in line if name not in _FIELDS]
    if "prompt" in line or not unknown:
        return message
    near = nearest(unknown[0], tuple(sorted(_FIELDS)))
    hint = "" if near is None else f": did you mean `{near}`?"
    return f"{message}; unknown field `{shown_name(unknown[0])}`{hint}"


def shown(value: Any) -> str:
    """Format a value for an error message, truncated to 80 characters."""
    text = repr(value)
    return text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 3] + "..."
