"""POST /v1/messages (Anthropic): its body as a chat, and the chat's output in its format."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from quire.serve.apis.convert import (
    EXTENSIONS,
    JSON,
    chat_of,
    format_of,
    text_of,
    text_of_part,
    usage_extensions,
)
from quire.serve.errors import FieldError, anthropic_error, event, one_line
from quire.serve.protocol import MAX_MESSAGES, MAX_STOPS, Body, ChatBody, Tools

NAMES: Mapping[str, str] = {
    "prompt": "messages",
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
}
"""Names in this API of the fields of a chat."""

_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": ["user", "assistant"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
    },
    "required": ["role", "content"],
}
_CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}
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
    output_config: dict[str, Any] | None = None

    def chat(self) -> ChatBody:
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
        for name in sorted((self.output_config or {}).keys() - {"format"}):
            raise FieldError(
                f"output_config.{name}",
                f"`output_config.{name[:40]}` is not supported: expected `format` only",
            )
        extra = dict(self.model_extra or {})
        values = {name: extra.pop(name) for name in EXTENSIONS & extra.keys()}
        choice = self.tool_choice or {}
        parallel = False if choice.get("disable_parallel_tool_use") else None
        values |= {
            "model": self.model,
            "messages": self._messages(),
            **(_CONTINUED if self._continues() else {}),
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
        if self.output_config is not None:
            values["response_format"] = format_of(self.output_config, "output_config.format")
        return chat_of(extra | values, NAMES)

    def origins(self) -> list[str]:
        system = [] if self.system is None else ["system"]
        return system + [turn.origin for turn in self._turns() for _ in turn.messages()]

    def _turns(self) -> "list[_Turn]":
        """The turns of the conversation: consecutive messages of one role are one turn.

        An empty last message of the assistant begins nothing, so it is left out.
        """
        turns: list[_Turn] = []
        for number, message in enumerate(self.messages):
            field = f"messages.{number}"
            role, content = message.get("role"), message.get("content")
            if role not in ("user", "assistant"):
                raise FieldError(f"{field}.role", f"{field}.role: expected user or assistant")
            if not turns or turns[-1].role != role:
                turns.append(_Turn(role, field))
            turns[-1].add(content, f"{field}.content")
        if turns[-1].is_empty and turns[-1].role == "assistant":
            turns.pop()
        return turns

    def _messages(self) -> list[JSON]:
        found: list[JSON] = []
        if self.system is not None:
            found.append({"role": "system", "content": text_of(self.system, "system", ("text",))})
        return found + [message for turn in self._turns() for message in turn.messages()]

    def _continues(self) -> bool:
        """Whether the output continues a last message of the assistant."""
        turns = self._turns()
        if not turns or turns[-1].role != "assistant":
            return False
        last = turns[-1]
        if last.calls:
            raise FieldError(
                last.origin,
                f"{last.origin}: a last message of the assistant is continued, but this one has "
                "`tool_use`: send the `tool_result` in a message of the user after it",
            )
        if last.text != last.text.rstrip():
            raise FieldError(
                last.origin,
                f"{last.origin}: final assistant content cannot end with trailing whitespace: "
                "remove it",
            )
        if (self.tool_choice or {}).get("type") in ("any", "tool"):
            raise FieldError(
                "tool_choice",
                f"tool_choice: a forced call cannot continue the text of {last.origin}: leave out "
                "that message, or set tool_choice to auto or none",
            )
        return True


@dataclass(slots=True)
class _Turn:
    """Consecutive messages of one role."""

    role: str
    origin: str  # path of the first message
    results: list[JSON] = field(default_factory=list)  # messages of a chat
    calls: list[JSON] = field(default_factory=list)  # in OpenAI's format
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "\n".join(text for text in self.texts if text)

    @property
    def is_empty(self) -> bool:
        return not (self.text or self.calls or self.results)

    def add(self, content: object, where: str) -> None:
        if isinstance(content, str):
            self.texts.append(content)
            return
        if not isinstance(content, list):
            raise FieldError(where, f"{where}: expected a string or a list")
        texts = []
        for number, block in enumerate(content):
            place = f"{where}.{number}"
            kind = block.get("type") if isinstance(block, dict) else None
            if kind == "tool_result":
                self.results.append(_result(block, place))
            elif kind == "tool_use":
                self.calls.append(_call(block, place))
            elif kind not in ("thinking", "redacted_thinking"):
                texts.append(text_of_part(block, place, ("text",)))
        if texts:
            self.texts.append("".join(texts))

    def messages(self) -> list[JSON]:
        """The messages of a chat: the results of tools, then the text and the calls."""
        if not self.texts and not self.calls and self.results:
            return self.results
        own: JSON = {"role": self.role, "content": self.text}
        return [*self.results, own | ({"tool_calls": self.calls} if self.calls else {})]


def _result(block: JSON, field: str) -> JSON:
    text = text_of(block.get("content") or "", f"{field}.content", ("text",))
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}


def _call(block: JSON, field: str) -> JSON:
    name, arguments = block.get("name"), block.get("input") or {}
    if not isinstance(name, str):
        raise FieldError(f"{field}.name", f"{field}.name: expected the name of a tool")
    if not isinstance(arguments, dict):
        raise FieldError(f"{field}.input", f"{field}.input: expected an object")
    function = {"name": name, "arguments": json.dumps(arguments)}
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
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise FieldError("tool_choice.type", "tool_choice.type: expected auto, any, tool or none")
    return _CHOICES[kind]


_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesFormat:
    """Converts one chat response to a message, or its chunks to typed events."""

    id_prefix = "msg_"
    needs_usage = needs_prompt_usage = True

    def __init__(self, stop_sequences: Sequence[str] = ()) -> None:
        self._stops = frozenset(stop_sequences)
        self._started = self._failed = False
        self._index = -1
        self._kind: str | None = None
        self._ending: JSON = {"stop_reason": "end_turn", "stop_sequence": None}
        self._usage: JSON = {"output_tokens": 0}
        self._has_calls = False

    # ---- whole ---------------------------------------------------------------------------------

    def whole(self, body: JSON) -> JSON:
        [choice] = body["choices"]
        message, content = choice["message"], []
        if message["content"]:
            content.append({"type": "text", "text": message["content"]})
        for call in message["tool_calls"] or ():
            content.append(_tool_use(call, _arguments(call["function"]["arguments"])))
            self._has_calls = True
        self._end_by(choice)
        return _message(body) | {
            "content": content,
            **self._ending,
            "usage": _usage(body["usage"]),
        }

    def _end_by(self, choice: JSON) -> None:
        stop = choice.get("stop_reason")
        by_stop = isinstance(stop, str) and stop in self._stops
        reason = _REASONS.get(choice["finish_reason"], "end_turn")
        if self._has_calls and reason == "end_turn":
            reason = "tool_use"
        self._ending = {
            "stop_reason": "stop_sequence" if by_stop else reason,
            "stop_sequence": stop if by_stop else None,
        }

    # ---- stream --------------------------------------------------------------------------------

    def chunk(self, body: JSON) -> list[str]:
        events = [] if self._started else self._start(body)
        if body.get("usage"):
            self._usage = _usage(body["usage"])
        for choice in body["choices"]:
            delta = choice["delta"]
            if delta.get("content"):
                events += self._add_text(delta["content"])
            for call in delta.get("tool_calls") or ():
                events += self._add_call(call)
            if choice["finish_reason"] is not None:
                self._end_by(choice)
        return events

    def error(self, body: JSON) -> list[str]:
        self._failed = True
        found = body["error"]
        return [event(anthropic_error(int(found["code"]), found["message"]), "error")]

    def end(self) -> list[str]:
        if self._failed:
            return []
        delta = self._event("message_delta", delta=self._ending, usage=self._usage)
        return [*self._close(), delta, self._event("message_stop")]

    def _start(self, body: JSON) -> list[str]:
        self._started = True
        message = _message(body) | {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(body["usage"]),
        }
        return [self._event("message_start", message=message)]

    def _event(self, kind: str, **values: Any) -> str:
        return event({"type": kind, **values}, kind)

    def _add_text(self, text: str) -> list[str]:
        events = []
        if self._kind != "text":
            events = [*self._close(), *self._open("text", {"type": "text", "text": ""})]
        return [*events, self._delta({"type": "text_delta", "text": text})]

    def _add_call(self, call: JSON) -> list[str]:
        events = []
        if "id" in call:
            self._has_calls = True
            events = [*self._close(), *self._open("tool_use", _tool_use(call, {}))]
        arguments = call["function"].get("arguments")
        if arguments:
            events.append(self._delta({"type": "input_json_delta", "partial_json": arguments}))
        return events

    def _open(self, kind: str, block: JSON) -> list[str]:
        self._index += 1
        self._kind = kind
        return [self._event("content_block_start", index=self._index, content_block=block)]

    def _delta(self, delta: JSON) -> str:
        return self._event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> list[str]:
        if self._kind is None:
            return []
        self._kind = None
        return [self._event("content_block_stop", index=self._index)]


def _message(body: JSON) -> JSON:
    return {
        "id": body["id"],
        "type": "message",
        "role": "assistant",
        "model": body["model"],
    }


def _tool_use(call: JSON, arguments: object) -> JSON:
    return {
        "type": "tool_use",
        "id": call["id"],
        "name": call["function"]["name"],
        "input": arguments,
    }


def _arguments(text: str) -> object:
    try:
        found = json.loads(text)
        one_line(found)
    except (ValueError, RecursionError):  # an output that ended early, or a number such as NaN
        return {}
    return found


def _usage(usage: JSON) -> JSON:
    cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached_tokens,  # the three sum to the prompt
        "output_tokens": usage["completion_tokens"],
        "cache_read_input_tokens": cached_tokens,
        "cache_creation_input_tokens": 0,
        **usage_extensions(usage),
    }
