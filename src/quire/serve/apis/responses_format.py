"""Writes a chat in the format of /v1/responses."""

from collections.abc import Mapping
from typing import Any

from quire.serve.apis.responses_body import ResponsesBody
from quire.serve.formats import JSON, event

_LENGTH = {"reason": "max_output_tokens"}


class ResponsesFormat:
    """Converts one chat response to a response object, or its chunks to typed events.

    Args:
        body: body of the request, whose options the response repeats.
    """

    id_prefix = "resp_"
    needs_usage, needs_prompt_usage = True, False

    def __init__(self, body: ResponsesBody) -> None:
        self._request = body
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
        """Convert the body of a chat."""
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
        return {
            "id": self._id,
            "object": "response",
            **self._created,
            "status": status,
            "error": error,
            "incomplete_details": _LENGTH if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "output": self._items,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": request.temperature,
            "text": request.text or {"format": {"type": "text"}},
            "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
            "tools": request.tools or [],
            "top_p": request.top_p,
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
        """Convert a chunk of a chat to events."""
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
        """Return the events that end the open item and the response."""
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
        """End the open item."""
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
        "kv_peak_bytes": usage["kv_peak_bytes"],
        "evicted_tokens": usage["evicted_tokens"],
    }
