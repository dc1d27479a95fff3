"""Lines of `quire batch` for a server: the HTTP request of a line, and the record of a response.

The server checks the options of a line, so that lines for any OpenAI-compatible server are valid.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.batch.lines import BatchError, LineFormat, LineHead, LineKind, json_object
from quire.batch.prompts import no_prompt, shown
from quire.batch.records import Record, error_record

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
_KINDS: Mapping[str, LineKind] = {CHAT: "chat"}
_GENERATES = (COMPLETIONS, CHAT)
_PATH = re.compile(r"/v1/[!-~]{1,2000}")  # printable ASCII without spaces
OK = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLine:
    """The request of one line.

    Attributes:
        head: identity of the line.
        path: path of the API, such as /v1/completions.
        body: body of the request.
    """

    head: LineHead
    path: str
    body: Mapping[str, Any]

    @property
    def content(self) -> bytes:
        """The body as JSON."""
        return json.dumps(self.body).encode()


def server_line(
    raw: bytes, number: int, form: LineFormat, model: str, defaults: Mapping[str, Any]
) -> ServerLine:
    """The request of a line.

    Args:
        raw: the line.
        number: number of the line, from 1.
        form: format of plain lines.
        model: model of lines that name none.
        defaults: options of completions and chats that do not set them.

    Raises:
        BatchError: the line is no request.
    """
    value = json_object(raw, number)
    line = (
        _openai(value, number) if "body" in value or "url" in value else _plain(value, number, form)
    )
    if line.body.get("stream"):
        raise BatchError("stream=True is not supported in a batch: leave it out", line.head)
    own = {"model": model} | (dict(defaults) if line.path in _GENERATES else {})
    if "max_completion_tokens" in line.body:
        own.pop("max_tokens", None)
    return ServerLine(head=line.head, path=line.path, body=own | dict(line.body))


def _openai(value: Mapping[str, Any], number: int) -> ServerLine:
    url, name, body = value.get("url"), value.get("custom_id"), value.get("body")
    kind = _KINDS.get(url, "completions") if isinstance(url, str) else "completions"
    head = LineHead(number=number, kind=kind, name=name if isinstance(name, str) else None)
    if not isinstance(url, str) or not _PATH.fullmatch(url):
        raise BatchError(
            f"expected url as a path of ASCII characters such as {COMPLETIONS}, got {shown(url)}",
            head,
        )
    if value.get("method", "POST") != "POST":
        raise BatchError(f"expected method POST, got {shown(value['method'])}", head)
    if not isinstance(name, str) or not name:
        raise BatchError(f"expected a string as custom_id, got {shown(name)}", head)
    if not isinstance(body, dict):
        raise BatchError(f"expected a JSON object as body, got {shown(body)}", head)
    return ServerLine(head=head, path=url, body=body)


def _plain(value: Mapping[str, Any], number: int, form: LineFormat) -> ServerLine:
    name = value.get("id")
    head = LineHead(number=number, name=None if name is None else str(name))
    if form.prompt_key != "prompt":
        value = {"prompt": value.get(form.prompt_key)}
    if ("prompt" in value) == ("messages" in value):
        raise BatchError(no_prompt(value), head)
    body = {key: given for key, given in value.items() if key != "id"}
    if "messages" in body:
        return ServerLine(head=head, path=CHAT, body=body)
    if not body["prompt"]:
        raise BatchError(f"expected a prompt, got {shown(body['prompt'])}", head)
    if isinstance(body["prompt"], str):
        body["prompt"] = form.prefix + body["prompt"]
    return ServerLine(head=head, path=COMPLETIONS, body=body)


# ---- records -------------------------------------------------------------------------------------


def response_record(
    line: ServerLine, status: int, content: bytes, request_id: str | None, *, with_prompt: bool
) -> Record:
    """The record of a response.

    Args:
        line: the line.
        status: HTTP status.
        content: body of the response.
        request_id: `x-request-id` of the response.
        with_prompt: include the prompt of a plain line.
    """
    body = _json(content)
    if not isinstance(body, dict):
        body = {"error": {"message": str(body)[:500], "type": "invalid_response"}}
        status = status if status != OK else 502
    message = None if status == OK else _message(body)
    if line.head.kind != "plain":
        error = None if message is None else {"code": f"status_{status}", "message": message}
        return {
            "id": f"batch_req_{line.head.number}",
            "line": line.head.number,
            "custom_id": line.head.name,
            "response": {
                "status_code": status,
                "request_id": request_id or f"req_{line.head.number}",
                "body": body,
            },
            "error": error,
        }
    if message is not None:
        return error_record(line.head, message)
    return _plain_record(line, body, with_prompt=with_prompt)


def _plain_record(line: ServerLine, body: Mapping[str, Any], *, with_prompt: bool) -> Record:
    choices = [
        {"text": _text(choice), "finish_reason": choice.get("finish_reason")}
        for choice in body.get("choices") or ()
    ]
    if not choices:
        return error_record(line.head, "the response has no choices")
    name = line.head.name if line.head.name is not None else f"line-{line.head.number}"
    requested = {key: line.body[key] for key in ("prompt", "messages") if key in line.body}
    return {
        "id": name,
        "line": line.head.number,
        **(requested if with_prompt else {}),
        **choices[0],
        **({"choices": choices} if len(choices) > 1 else {}),
        "usage": body.get("usage"),
        "error": None,
    }


def finish_reason(record: Record) -> str:
    """Finish reason of the first choice of a record; "error" for an error record."""
    if record["error"] is not None:
        return "error"
    if "response" not in record:
        return str(record["finish_reason"])
    choices = record["response"]["body"].get("choices") or [{}]
    return str(choices[0].get("finish_reason") or "stop")


def tokens(record: Record) -> tuple[int, int]:
    """Prompt and output tokens of a record, by the usage of the response."""
    body = record["response"]["body"] if "response" in record else record
    usage = body.get("usage") or {}
    return int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)


def _text(choice: Mapping[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    return str((choice.get("message") or {}).get("content") or "")


def _message(body: Mapping[str, Any]) -> str:
    error = body.get("error", body)
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _json(content: bytes) -> object:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return content.decode(errors="replace")
