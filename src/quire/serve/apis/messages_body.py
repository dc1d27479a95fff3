"""The body of POST /v1/messages (Anthropic), and its conversion to a chat."""

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from quire.serve.apis.convert import EXTENSIONS, JSON, chat_of, text_of, text_of_part
from quire.serve.chat_messages import MAX_MESSAGES
from quire.serve.errors import FieldError
from quire.serve.protocol import MAX_STOPS, Body, ChatBody, Tools

NAMES: Mapping[str, str] = {
    "prompt": "messages",
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
}
"""Names in this API of the fields of a chat."""

_BLOCKS = {"type": "array", "items": {"type": "object"}}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": ["user", "assistant"]},
        "content": {"anyOf": [{"type": "string"}, _BLOCKS]},
    },
    "required": ["role", "content"],
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessagesBody(Body):
    """POST /v1/messages: text and tools."""

    messages: Annotated[
        list[Annotated[dict[str, Any], WithJsonSchema(_MESSAGE)]],
        Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    ]
    max_tokens: int | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    tools: Tools | None = None
    tool_choice: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None

    def chat(self) -> ChatBody:
        """Convert the body to a chat.

        Raises:
            FieldError: a value that has no counterpart, or an invalid one.
        """
        if self.max_tokens is None:
            raise FieldError("max_tokens", "max_tokens: expected a number of tokens, got none")
        return self._chat()

    def prompt_chat(self) -> ChatBody:
        """The chat whose tokens /v1/messages/count_tokens counts."""
        return self._chat()

    def _chat(self) -> ChatBody:
        if (self.thinking or {}).get("type", "disabled") != "disabled":
            raise FieldError(
                "thinking",
                "`thinking` is not supported: use `chat_template_kwargs`, if the model's "
                "chat template has a variable for it",
            )
        extra = dict(self.model_extra or {})
        values = {name: extra.pop(name) for name in EXTENSIONS & extra.keys()}
        choice = self.tool_choice or {}
        parallel = False if choice.get("disable_parallel_tool_use") else None
        values |= {
            "model": self.model,
            "messages": self._messages(),
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences or None,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stream": self.stream,
            "tools": [_tool(t, i) for i, t in enumerate(self.tools)] if self.tools else None,
            "tool_choice": _choice(choice) if self.tool_choice else None,
            "parallel_tool_calls": parallel,
        }
        return chat_of(extra | values, NAMES)

    def _messages(self) -> list[JSON]:
        messages: list[JSON] = []
        if self.system is not None:
            text = text_of(self.system, "system", ("text",))
            messages.append({"role": "system", "content": text})
        for number, message in enumerate(self.messages):
            messages += _read(message, f"messages.{number}")
        return messages


def _read(message: JSON, field: str) -> list[JSON]:
    """A message, or a message and the results of tools that it contains."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise FieldError(f"{field}.role", f"{field}.role: expected user or assistant")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise FieldError(f"{field}.content", f"{field}.content: expected a string or a list")
    results, calls, texts = [], [], []
    for number, block in enumerate(content):
        place = f"{field}.content.{number}"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result":
            results.append(_result(block, place))
        elif kind == "tool_use":
            calls.append(_call(block))
        elif kind not in ("thinking", "redacted_thinking"):
            texts.append(text_of_part(block, place, ("text",)))
    own: JSON = {"role": role, "content": "".join(texts) if texts or not calls else None}
    if calls:
        own["tool_calls"] = calls
    return [*results, *([own] if texts or calls or not results else [])]


def _result(block: JSON, field: str) -> JSON:
    text = text_of(block.get("content", ""), f"{field}.content", ("text",))
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}


def _call(block: JSON) -> JSON:
    function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
    return {"id": block.get("id"), "type": "function", "function": function}


def _tool(tool: JSON, number: int) -> JSON:
    if tool.get("type", "custom") != "custom":
        raise FieldError(
            f"tools.{number}.type",
            f"tools.{number}.type: expected custom, got {str(tool['type'])[:40]}; tools that the "
            "server runs are not supported",
        )
    function = {k: tool[k] for k in ("name", "description") if tool.get(k) is not None}
    return {
        "type": "function",
        "function": function | {"parameters": tool.get("input_schema") or {"type": "object"}},
    }


def _choice(choice: JSON) -> str | JSON:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind not in _CHOICES:
        raise FieldError("tool_choice.type", "tool_choice.type: expected auto, any, tool or none")
    return _CHOICES[str(kind)]
