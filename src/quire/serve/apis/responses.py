"""POST /v1/responses (OpenAI): its body as a chat, and the chat's output in its format."""

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from quire.config.sampling_params import SamplingDefaults, SamplingParams
from quire.serve.apis.convert import EXTENSIONS, JSON, chat_of, format_of, text_of, usage_extensions
from quire.serve.errors import FieldError, event
from quire.serve.fields import MAX_EXTRA_FIELDS
from quire.serve.protocol import MAX_MESSAGES, MAX_TOP_LOGPROBS, Body, ChatBody, Tools

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
    metadata: Annotated[dict[str, Any], Field(max_length=MAX_EXTRA_FIELDS)] | None = None
    store: bool | None = None
    background: bool | None = None
    include: list[str] | None = None
    user: str | None = None

    @property
    def requested_tokens(self) -> int | None:
        """The limit of the output, by its name here or in the chat API."""
        extra = self.model_extra or {}
        names = ("max_tokens", "max_completion_tokens")
        return self.max_output_tokens or next(filter(None, map(extra.get, names)), None)

    def chat(self) -> ChatBody:
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
            "tools": None
            if self.tools is None
            else [_tool(t, i) for i, t in enumerate(self.tools)],
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
        messages.append((field, _message("system" if role == "developer" else role, text)))
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


_LENGTH = {"reason": "max_output_tokens"}


class ResponsesFormat:
    """Converts one chat response to a response object, or its chunks to typed events."""

    id_prefix = "resp_"
    needs_usage, needs_prompt_usage = True, False

    def __init__(self, body: ResponsesBody, defaults: SamplingDefaults) -> None:
        self._request = body
        requested = SamplingParams(temperature=body.temperature, top_p=body.top_p)
        self._sampling = requested.with_response_defaults(defaults).resolve(defaults)
        self._id = ""
        self._number = 0
        self._created: JSON = {}
        self._items: list[JSON] = []
        self._open: int | None = None
        self._finish_reason: str | None = None
        self._usage: JSON | None = None
        self._failed = False

    # ---- whole ---------------------------------------------------------------------------------

    def whole(self, body: JSON) -> JSON:
        self._begin(body)
        [choice] = body["choices"]
        message = choice["message"]
        if message["content"]:
            self._items.append(self._message(message["content"]))
        for call in message["tool_calls"] or ():
            self._items.append(_call(call["id"], call["function"]))
        self._finish_reason, self._usage = choice["finish_reason"], body["usage"]
        return self._response(self._status())

    def _begin(self, body: JSON) -> None:
        self._id = body["id"]
        self._created = {"created_at": body["created"], "model": body["model"]}

    def _response(self, status: str, error: JSON | None = None) -> JSON:
        request = self._request
        limited = (self._usage or {}).get("max_tokens")  # by the context or the KV memory
        return {
            "id": self._id,
            "object": "response",
            **self._created,
            "status": status,
            "error": error,
            "incomplete_details": _LENGTH if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": limited or request.requested_tokens,
            "metadata": request.metadata or {},
            "output": self._items,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": self._sampling.temperature,
            "text": request.text or {"format": {"type": "text"}},
            "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
            "tools": request.tools or [],
            "top_p": self._sampling.top_p,
            "truncation": request.truncation or "disabled",
            "usage": None if self._usage is None else _usage(self._usage),
        }

    def _status(self) -> str:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _message(self, text: str, status: str = "completed") -> JSON:
        content = [] if status == "in_progress" else [_text_part(text)]
        return {
            "type": "message",
            "id": f"msg_{self._id.partition('_')[2]}_{len(self._items)}",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    # ---- stream --------------------------------------------------------------------------------

    def chunk(self, body: JSON) -> list[str]:
        events = self._start(body) if not self._id else []
        self._usage = body.get("usage") or self._usage
        for choice in body["choices"]:
            delta = choice["delta"]
            if delta.get("content"):
                events += self._add_text(delta["content"])
            for call in delta.get("tool_calls") or ():
                events += self._add_call(call)
            self._finish_reason = choice["finish_reason"] or self._finish_reason
        return events

    def error(self, body: JSON) -> list[str]:
        """Convert an error within a stream: the response has failed."""
        self._failed = True
        error = body["error"]
        code = "server_error" if error["code"] >= 500 else "invalid_prompt"
        shown = {"code": code, "message": error["message"]}
        return [self._event("response.failed", response=self._response("failed", shown))]

    def end(self) -> list[str]:
        if self._failed:
            return []
        events = self._close()
        status = self._status()
        return [*events, self._event(f"response.{status}", response=self._response(status))]

    def _start(self, body: JSON) -> list[str]:
        self._begin(body)
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=self._response("in_progress")) for kind in kinds]

    def _event(self, kind: str, **values: Any) -> str:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number - 1, **values}, kind)

    def _add_text(self, text: str) -> list[str]:
        events = []
        if self._open is None or self._items[self._open]["type"] != "message":
            events = self._close()
            events += self._open_item(self._message("", "in_progress"))
            self._items[-1]["content"] = [_text_part("")]
            part = self._place() | {"content_index": 0, "part": _text_part("")}
            events.append(self._event("response.content_part.added", **part))
        self._items[-1]["content"][0]["text"] += text
        place = self._place() | {"content_index": 0, "delta": text, "logprobs": []}
        return [*events, self._event("response.output_text.delta", **place)]

    def _add_call(self, call: JSON) -> list[str]:
        function, events = call["function"], []
        if "id" in call:
            events = self._close()
            begun = _call(call["id"], {"name": function["name"], "arguments": ""}, "in_progress")
            events += self._open_item(begun)
        arguments = function.get("arguments") or ""
        if not arguments:
            return events
        self._items[-1]["arguments"] += arguments
        name = "response.function_call_arguments.delta"
        return [*events, self._event(name, **self._place(), delta=arguments)]

    def _open_item(self, item: JSON) -> list[str]:
        self._items.append(item)
        self._open = len(self._items) - 1
        return [self._event("response.output_item.added", output_index=self._open, item=item)]

    def _place(self) -> JSON:
        return {"item_id": self._items[-1]["id"], "output_index": self._open}

    def _close(self) -> list[str]:
        if self._open is None:
            return []
        item, place = self._items[self._open], self._place()
        events = []
        if item["type"] == "message":
            part = item["content"][0]
            ended = place | {"content_index": 0}
            done = self._event("response.output_text.done", **ended, text=part["text"], logprobs=[])
            events += [done, self._event("response.content_part.done", **ended, part=part)]
        else:
            values = place | {"name": item["name"], "arguments": item["arguments"]}
            events.append(self._event("response.function_call_arguments.done", **values))
        item["status"] = "completed"
        index, self._open = self._open, None
        done_item = self._event("response.output_item.done", output_index=index, item=item)
        return [*events, done_item]


def _text_part(text: str) -> JSON:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call(call_id: str, function: Mapping[str, str], status: str = "completed") -> JSON:
    return {
        "type": "function_call",
        "id": f"fc_{call_id}",
        "call_id": call_id,
        "name": function["name"],
        "arguments": function["arguments"],
        "status": status,
    }


def _usage(usage: JSON) -> JSON:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
        **usage_extensions(usage),
    }
