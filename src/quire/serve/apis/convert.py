"""Parts that both conversions to chats share."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from quire.errors import RequestError
from quire.serve.errors import FieldError, InvalidBody
from quire.serve.protocol import ChatBody, GenerationBody

JSON = dict[str, Any]

EXTENSIONS = frozenset(
    {"priority", "deadline_s", "cache_salt", "evict", "kv_budget", "min_tokens", "ignore_eos"}
    | {"limit_max_tokens", "sparse", "speculative"}
    | {"min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty"}
    | {"logit_bias", "bad_words", "structured_outputs", "truncate_prompt_tokens"}
    | {"chat_template_kwargs"}
)
"""Fields of chats that the bodies of other APIs accept with the same meaning."""

assert GenerationBody.model_fields.keys() >= EXTENSIONS - {"chat_template_kwargs"}


def usage_extensions(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Quire's fields in the usage of a chat; the limit of `max_tokens` if there was one."""
    names = (
        *("kv_peak_bytes", "evictions", "evicted_tokens", "recomputed_tokens"),
        *("max_tokens", "max_tokens_limit"),
    )
    return {name: usage[name] for name in names if name in usage}


def chat_of(values: Mapping[str, Any], names: Mapping[str, str]) -> ChatBody:
    """Create the body of a chat.

    Raises:
        FieldError: an invalid value, with the client's name of the field.
    """
    given = {name: value for name, value in values.items() if value is not None}
    try:
        chat = ChatBody(**given)
    except ValidationError as error:
        first = InvalidBody.of(error, given).fields[0]
        head, dot, rest = first.path.partition(".")
        path = names.get(head, head) + dot + rest
        raise FieldError(path, f"{path}: {first.message}") from None
    if (chat.n or 1) > 1:
        raise FieldError("n", f"n: expected 1, got {chat.n}: this API returns one completion")
    return chat


_WRAPPED = re.compile(r"^(tools\.\d+|response_format)\.(?:function|json_schema)\b")
"""Objects of chats whose fields are one level higher in other APIs."""


@contextmanager
def naming(names: Mapping[str, str], origins: Callable[[], list[str]] = list) -> Iterator[None]:
    """Name the client's fields in errors of a chat."""
    try:
        yield
    except RequestError as error:
        error.param = error.param and _WRAPPED.sub(r"\1", error.param)
        head, dot, rest = (error.param or "").partition(".")
        number = rest.partition(".")[0]
        if head == "messages" and number.isdecimal() and (fields := origins()):
            head, name, rest = f"messages.{number}", fields[int(number)], rest[len(number) :]
            dot = ""
        else:
            name = names.get(head, head)
        if name != head:
            error.param = name + dot + rest
            error.args = (re.sub(rf"\b{re.escape(head)}\b", name, str(error)),)
        raise


def format_of(options: JSON | None, field: str) -> JSON | None:
    """The `format` of an API's output options, whose schema is one level higher than in chats."""
    found = (options or {}).get("format")
    if found is None:
        return None
    if not isinstance(found, dict):
        raise FieldError(field, f"{field}: expected an object with a type")
    if found.get("type") != "json_schema":
        return found
    schema = {key: value for key, value in found.items() if key != "type"}
    return {"type": "json_schema", "json_schema": schema}


def text_of(content: object, field: str, kinds: tuple[str, ...]) -> str:
    """The text of a string or of a list of text parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise FieldError(field, f"{field}: expected a string or a list of text parts")
    return "".join(
        text_of_part(part, f"{field}.{number}", kinds) for number, part in enumerate(content)
    )


def text_of_part(part: object, field: str, kinds: tuple[str, ...]) -> str:
    """The text of a text part."""
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
    if kind not in kinds or not isinstance(text, str):
        shown = kind if isinstance(kind, str) else "no type"
        raise FieldError(
            field,
            f"{field}: expected a part of type {' or '.join(kinds)} with a text, got {shown[:40]}; "
            "images, audio and files are not supported",
        )
    return text
