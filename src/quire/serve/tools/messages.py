"""Tool calls in messages: from a model's text to OpenAI's format."""

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire.serve.tools.definitions import ToolChoice
from quire.serve.tools.json_text import CallStart
from quire.serve.tools.parser import Content, ToolParser

MessagePart = dict[str, Any]

_MISTRAL_ID = 9  # characters: the templates of Mistral refuse other ids
_ALPHABET = string.ascii_letters + string.digits


def new_call_id(model_parser: str | None = None) -> str:
    """A random id of a call, in the format that the model's template accepts.

    Args:
        model_parser: name of the model's parser, also if a forced call needs another one.
    """
    if model_parser == "mistral":
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
    new_id: Callable[[], str] = new_call_id
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
            "id": self.new_id(),
            "type": "function",
            "function": {"name": event.name, "arguments": ""},
        }
