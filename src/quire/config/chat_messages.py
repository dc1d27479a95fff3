"""Messages of chats: one reader for the server, `quire batch` and the Python API."""

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from quire.errors import RequestError
from quire.layout.values import find_fault

ContentFormat = Literal["auto", "string", "openai"]
"""What a chat template gets as `content`: a text, OpenAI's list of parts, or what it reads."""

Message = dict[str, Any]

Content = str | list[Message]

MAX_EXTRA_FIELDS = 64
"""Limit of the names of other fields in the messages of a chat: each may be a misspelled one."""

_FIELDS = ("role", "content")

_NEAR = 0.8
_MAX_SHOWN = 80
_MAX_NAME = 64


def read_messages(messages: object) -> list[Message]:
    """Check messages and convert them for chat templates.

    The content of the result is a text or a list of {"type": "text", "text": ...}, and arguments of
    tool calls are objects, which templates expect. Fields that are None are left out; other fields
    are unchanged. The result is accepted as input.

    Args:
        messages: {"role": ..., "content": ...} each, in OpenAI's format, oldest first.

    Raises:
        RequestError: names the invalid field, such as messages.0.content.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError(f"expected a list of messages, got {_shown(messages)}", param="messages")
    if not messages:
        raise RequestError("expected at least one message, got none", param="messages")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise _wrong(f"messages.{number}", "an object with role and content", message)
    _refuse_misspelled(messages)
    return [_read(message, f"messages.{number}") for number, message in enumerate(messages)]


def text_part(text: str) -> Message:
    """A content part."""
    return {"type": "text", "text": text}


def texts_of(message: Message) -> list[str]:
    """The texts of the content of a message that was read."""
    content = message["content"]
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def _refuse_misspelled(messages: Sequence[Mapping[str, Any]]) -> None:
    first: dict[str, int] = {}  # index of the first message with a name
    for number, message in enumerate(messages):
        for name in message:
            if name not in _FIELDS:
                first.setdefault(str(name), number)
    if len(first) > MAX_EXTRA_FIELDS:
        raise RequestError(
            f"expected at most {MAX_EXTRA_FIELDS} unknown fields in messages, got {len(first)}: "
            "leave them out",
            param="messages",
        )
    for name, number in first.items():
        squashed = name[: _MAX_NAME + 1].lower().replace("_", "").replace("-", "")
        near = difflib.get_close_matches(squashed, _FIELDS, n=1, cutoff=_NEAR)
        if near and len(name) <= _MAX_NAME:
            shown = f"messages.{number}.{name.encode('ascii', 'backslashreplace').decode()}"
            raise RequestError(f"unknown field `{shown}`: did you mean `{near[0]}`?", param=shown)


def _read(message: Mapping[str, Any], where: str) -> Message:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise _wrong(f"{where}.role", "a role such as user", role)
    if content is None and role in ("assistant", "tool", "function"):  # tool calls and results
        content = ""
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        content = [_part(part, f"{where}.content.{index}") for index, part in enumerate(content)]
    elif not isinstance(content, str):
        raise _wrong(f"{where}.content", "a string or a list of text parts", content)
    read = {name: value for name, value in message.items() if value is not None}
    read["content"] = content
    calls = read.pop("tool_calls", None)
    return read | ({"tool_calls": _calls(calls, f"{where}.tool_calls")} if calls else {})


def _part(part: object, where: str) -> Message:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(kind, str) and kind != "text":
        raise RequestError(
            f"{where}.type: expected text, got {kind[:40]}: images, audio and files are not "
            "supported",
            param=f"{where}.type",
        )
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind is None or not isinstance(text, str):
        raise _wrong(where, 'a part such as {"type": "text", "text": "Hi"}', part)
    return text_part(text)


def _calls(calls: object, where: str) -> list[Message]:
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise _wrong(where, "a list", calls)
    return [_call(call, f"{where}.{index}") for index, call in enumerate(calls)]


def _call(call: object, where: str) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if (
        not isinstance(call, Mapping)
        or not isinstance(function, Mapping)
        or not isinstance(function.get("name"), str)
    ):
        shape = '{"id", "type": "function", "function": {"name", "arguments"}}'
        raise _wrong(where, shape, call)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        # an output that ended early has arguments that are no JSON: the template gets their text
        is_usable = isinstance(parsed, Mapping) and find_fault(parsed) is None
        arguments = parsed if is_usable else arguments
    if not isinstance(arguments, Mapping | str):
        raise _wrong(f"{where}.function.arguments", "a JSON object, or its text", arguments)
    return dict(call) | {"function": dict(function) | {"arguments": arguments}}


def _wrong(where: str, expected: str, got: object) -> RequestError:
    return RequestError(f"{where}: expected {expected}, got {_shown(got)}", param=where)


def _shown(value: object) -> str:
    text = "none" if value is None else repr(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."
