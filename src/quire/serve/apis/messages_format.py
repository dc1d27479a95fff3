"""Writes a chat in the format of /v1/messages (Anthropic)."""

import json
from collections.abc import Sequence
from typing import Any

from quire.serve.errors import anthropic_error
from quire.serve.formats import JSON, event, one_line

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesFormat:
    """Converts one chat response to a message, or its chunks to typed events.

    Args:
        stop_sequences: of the request; the message names the one that ended it.
    """

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
        """Convert the body of a chat."""
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
        """Convert a chunk of a chat to events."""
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
        """Convert an error within a stream."""
        self._failed = True
        found = body["error"]
        return [event(anthropic_error(int(found["code"]), found["message"]), "error")]

    def end(self) -> list[str]:
        """Return the events that end the open block and the message."""
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
    }
