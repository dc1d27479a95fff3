"""Tool calls in messages: from a model's text to OpenAI's format, and from there to templates."""

import json
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import RequestError
from quire.serve.tools.definitions import ToolChoice
from quire.serve.tools.json_text import CallStart
from quire.serve.tools.parser import Content, ToolParser
from quire.serve.tools.parsers import MistralParser

MessagePart = dict[str, Any]

_MISTRAL_ID = 9  # characters: the templates of Mistral refuse other ids
_ALPHABET = string.ascii_letters + string.digits


def new_call_id(parser: ToolParser) -> str:
    """A random id of a call, in the format that the model's template accepts."""
    if isinstance(parser, MistralParser):
        return "".join(secrets.choice(_ALPHABET) for _ in range(_MISTRAL_ID))
    return f"call_{secrets.token_hex(12)}"


@dataclass(slots=True, kw_only=True)
class CallWriter:
    """Writes the tool calls of one output as OpenAI's deltas or message.

    Attributes:
        parser: parser of the output.
        choice: the tools of the request.
        new_id: creates ids of calls.
    """

    parser: ToolParser
    choice: ToolChoice
    new_id: Callable[[ToolParser], str] = new_call_id
    _num_calls: int = 0

    def deltas(self, text: str, *, is_last: bool) -> list[MessagePart]:
        """Deltas of the message for new text.

        Args:
            text: new text of the output.
            is_last: whether the output ends with it.
        """
        events = self.parser.push(text) + (self.parser.finish() if is_last else [])
        deltas: list[MessagePart] = []
        for event in events:
            if isinstance(event, Content):
                deltas.append({"content": event.text})
                continue
            self._num_calls += isinstance(event, CallStart)
            if self._num_calls == 1 or self.choice.parallel:
                deltas.append({"tool_calls": [self._call(event)]})
        return deltas

    def message(self, text: str) -> MessagePart:
        """The `content` and `tool_calls` of a message, from its whole text."""
        content, calls = "", []
        for delta in self.deltas(text, is_last=True):
            content += delta.get("content", "")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    calls.append({key: call[key] for key in ("id", "type", "function")})
                else:
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        return {"content": content or (None if calls else ""), "tool_calls": calls or None}

    def finish_reason(self, reason: str | None) -> str | None:
        """The finish reason of the choice: `tool_calls` if the model chose to call tools.

        A named choice ends with `stop`, as in OpenAI's API.
        """
        calls = self._num_calls and self.choice.mode != "named"
        return "tool_calls" if reason == "stop" and calls else reason

    def _call(self, event: Any) -> MessagePart:
        index = self._num_calls - 1
        if not isinstance(event, CallStart):
            return {"index": index, "function": {"arguments": event.text}}
        return {
            "index": index,
            "id": self.new_id(self.parser),
            "type": "function",
            "function": {"name": event.name, "arguments": ""},
        }


# ---- messages for templates ----------------------------------------------------------------------


def with_read_calls(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A message for a chat template: arguments of calls as objects, which templates expect.

    Args:
        message: a message; only `tool_calls` changes.
        number: index of the message, for errors.

    Raises:
        RequestError: `tool_calls` is not in OpenAI's format, or arguments are no JSON object.
    """
    calls = message.get("tool_calls")
    if calls is None:
        return dict(message)
    where = f"messages.{number}.tool_calls"
    if not isinstance(calls, list):
        raise RequestError(f"expected {where} to be a list", param=where)
    read = [_with_read_arguments(call, f"{where}.{index}") for index, call in enumerate(calls)]
    return {key: value for key, value in message.items() if key != "tool_calls"} | (
        {"tool_calls": read} if read else {}
    )


def _with_read_arguments(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if (
        not isinstance(call, Mapping)
        or not isinstance(function, Mapping)
        or not isinstance(function.get("name"), str)
    ):
        raise RequestError(
            f'expected {where} to be {{"id", "type": "function", "function": {{"name", '
            '"arguments"}}',
            param=where,
        )
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        raise RequestError(
            f"expected the arguments of {where} to be a JSON object, as text",
            param=f"{where}.function.arguments",
        )
    return dict(call) | {"function": dict(function) | {"arguments": arguments}}
