"""The body of POST /v1/responses, and its conversion to a chat."""

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from quire.serve.apis.convert import EXTENSIONS, JSON, chat_of, format_of, text_of
from quire.serve.chat_messages import MAX_MESSAGES
from quire.serve.errors import FieldError
from quire.serve.fields import MOST_EXTRA_FIELDS
from quire.serve.protocol import MAX_TOP_LOGPROBS, Body, ChatBody, Tools

NAMES: Mapping[str, str] = {
    "messages": "input",
    "prompt": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning",
}
"""Names in this API of the fields of a chat."""

_TEXTS = ("input_text", "output_text", "text", "refusal")
_STATE = {
    "previous_response_id": "send the whole conversation in `input`",
    "conversation": "send the whole conversation in `input`",
    "prompt": "send the text in `input`",
}
"""Fields that need stored responses or prompts, and what to do instead."""

_ROLES = {"developer": "system"}

_Located = tuple[str, JSON]
"""A message with the field that it was made of."""


class ResponsesBody(Body):
    """POST /v1/responses: text and function calls; nothing is stored."""

    input: str | Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    truncation: str | None = None
    metadata: Annotated[dict[str, Any], Field(max_length=MOST_EXTRA_FIELDS)] | None = None
    store: bool | None = None
    background: bool | None = None
    include: list[str] | None = None
    user: str | None = None

    def chat(self) -> ChatBody:
        """Convert the body to a chat.

        Raises:
            FieldError: a value that has no counterpart, or an invalid one.
        """
        self._refuse_state()
        extra = dict(self.model_extra or {})
        values = {name: extra.pop(name) for name in EXTENSIONS & extra.keys()}
        if self.truncation not in (None, "auto", "disabled"):
            raise FieldError("truncation", "truncation: expected auto or disabled")
        if self.truncation == "auto":
            values.setdefault("truncate_prompt_tokens", -1)
        values |= {
            "model": self.model,
            "messages": [message for _, message in self._messages()],
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stream": self.stream,
            "response_format": format_of(self.text, "text.format"),
            "tools": None if self.tools is None else [_tool(t, i) for i, t in _numbered(self)],
            "tool_choice": _choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": (self.reasoning or {}).get("effort"),
            "logprobs": True if self.top_logprobs else None,
            "top_logprobs": self.top_logprobs or None,
        }
        return chat_of(extra | values, NAMES)

    def _refuse_state(self) -> None:
        for name, instead in _STATE.items():
            if (self.model_extra or {}).get(name) is not None:
                raise FieldError(name, f"`{name}` is not supported: nothing is stored; {instead}")
        if self.background:
            raise FieldError("background", "`background` is not supported: stream the response")
        if self.include:
            raise FieldError("include", "`include` is not supported: leave it out")

    def origins(self) -> list[str]:
        """The field that each message of the chat was made of."""
        return [field for field, _ in self._messages()]

    def _messages(self) -> list[_Located]:
        messages: list[_Located] = []
        if self.instructions is not None:
            messages.append(("instructions", _message("system", self.instructions)))
        if isinstance(self.input, str):
            return [*messages, ("input", _message("user", self.input))]
        for number, item in enumerate(self.input):
            _append(messages, item, f"input.{number}")
        if not messages:
            raise FieldError("input", "input: expected a text or at least one item, got none")
        return messages


def _numbered(body: ResponsesBody) -> enumerate[JSON]:
    return enumerate(body.tools or ())


def _message(role: str, text: str) -> JSON:
    return {"role": role, "content": text}


def _append(messages: list[_Located], item: JSON, field: str) -> None:
    """Add an item; a call belongs to the assistant's message before it."""
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str):
            raise FieldError(f"{field}.role", f"{field}.role: expected a role such as user")
        text = text_of(item.get("content"), f"{field}.content", _TEXTS)
        messages.append((field, _message(_ROLES.get(role, role), text)))
    elif kind == "function_call":
        if not messages or messages[-1][1]["role"] != "assistant":
            messages.append((field, {"role": "assistant", "content": None}))
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        messages[-1][1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = item.get("output")
        has_parts = isinstance(output, str | list)
        text = text_of(output, f"{field}.output", _TEXTS) if has_parts else json.dumps(output)
        message = {"role": "tool", "tool_call_id": item.get("call_id"), "content": text}
        messages.append((field, message))
    elif kind != "reasoning":  # of an earlier response; templates do not use it
        raise FieldError(
            f"{field}.type",
            f"{field}.type: expected message, function_call or function_call_output, got "
            f"{str(kind)[:40]}",
        )


def _tool(tool: JSON, number: int) -> JSON:
    if tool.get("type") != "function":
        raise FieldError(
            f"tools.{number}.type",
            f"tools.{number}.type: expected function, got {str(tool.get('type'))[:40]}; tools that "
            "the server runs are not supported",
        )
    keys = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {k: tool[k] for k in keys if tool.get(k) is not None}}


def _choice(choice: str | JSON | None) -> str | JSON | None:
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice
