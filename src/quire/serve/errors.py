"""Errors in OpenAI's format: {"error": {"message", "type", "param", "code"}}.

    400 BadRequestError       an invalid request, or a request that can never fit the KV memory
    401 AuthenticationError   an unknown or missing API key
    404 NotFoundError         no such model, path or request
    413 ContentTooLargeError  a body over --max-body
    415 UnsupportedMediaTypeError   a Content-Type other than JSON
    429 RateLimitError        a rate limit of the tenant is used up
    431 RequestHeaderFieldsTooLargeError   too large request headers
    500 InternalServerError   a bug, or a request that failed during generation
    503 ServiceUnavailable    the engine has stopped, the server is shutting down, or too many
                              requests are waiting or streams of events are open

Responses with 429, and with 503 for a full queue, have the header Retry-After in seconds.

Quotes of a client's input are bounded: a large invalid request gets a small response.

Errors of pydantic in plain words: the invalid field of the body, the expected and given value.

Pydantic reports every branch of a union, and has the branch in the location of the error. Here a
union has one error, whose location only has fields of the body.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol, runtime_checkable

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from quire.errors import EngineDead, QueueFull, QuireError, RequestError
from quire.serve.rate_limits import RateLimited

JSON = dict[str, Any]

DONE = "data: [DONE]\n\n"

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode

_ESCAPED = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029, *range(0xD800, 0xE000))}
"""Line boundaries of Unicode, at which many clients split a stream, and halves of surrogate pairs,
which the arguments of a model's tool call can have and UTF-8 cannot encode."""


def event(body: JSON, name: str | None = None) -> str:
    """A server-sent event."""
    first = "" if name is None else f"event: {name}\n"
    return f"{first}data: {one_line(body)}\n\n"


def one_line(value: object) -> str:
    """JSON that UTF-8 can encode, without line boundaries, not even those of Unicode."""
    text = _encode(value)
    return text if text.isascii() else text.translate(_ESCAPED)


@runtime_checkable
class Format(Protocol):
    """Converts the bodies of one response. A stream gets its chunks in order."""

    id_prefix: str
    """Beginning of the ids of responses, which the access log and `/v1/kv/requests` show too."""

    needs_usage: bool
    """Whether a stream must contain the usage, for the last events."""

    needs_prompt_usage: bool
    """Whether each chunk must contain the tokens so far, for the first event."""

    def whole(self, body: JSON) -> JSON:
        """Convert the body of a response that is not streamed."""

    def chunk(self, body: JSON) -> list[str]:
        """Convert a chunk of a stream to events."""

    def error(self, body: JSON) -> list[str]:
        """Convert an error within a stream to events."""

    def end(self) -> list[str]:
        """Return the events at the end of a stream."""


class PlainFormat:
    """OpenAI's chats and completions, unchanged."""

    id_prefix = "chatcmpl-"
    needs_usage = needs_prompt_usage = False

    def whole(self, body: JSON) -> JSON:
        return body

    def chunk(self, body: JSON) -> list[str]:
        return [event(body)]

    def error(self, body: JSON) -> list[str]:
        return [event(body)]

    def end(self) -> list[str]:
        return [DONE]


MAX_MESSAGE_CHARACTERS = 600

_TYPES = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.UNAUTHORIZED: "AuthenticationError",
    HTTPStatus.FORBIDDEN: "PermissionDeniedError",
    HTTPStatus.NOT_FOUND: "NotFoundError",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "ContentTooLargeError",
    HTTPStatus.TOO_MANY_REQUESTS: "RateLimitError",
    HTTPStatus.INTERNAL_SERVER_ERROR: "InternalServerError",
    HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailable",
}


class FieldError(RequestError):
    """An invalid field of the body."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message, param=param)


class UnknownModel(RequestError):
    """The body names a model that is not served."""

    def __init__(self, name: str, served: str) -> None:
        super().__init__(
            f"The model `{bounded(name, 100)}` does not exist. This server serves `{served}`.",
            param="model",
        )


class Unauthorized(RequestError):
    """An unknown or missing API key."""


class Forbidden(RequestError):
    """A valid API key that gives no access to this path."""


class Draining(QuireError):
    """The server is shutting down: open requests continue, new requests are refused."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down and accepts no new requests: send it again")


class ShutDown(QuireError):
    """The server shut down before an open request had ended."""

    def __init__(self) -> None:
        super().__init__("the server has shut down before the request ended: send it again")


class ReplicaLost(QuireError):
    """The replica that ran a request has ended, and the request cannot be repeated."""


class TooManyStreams(QuireError):
    """Too many clients receive KV events."""

    def __init__(self, num_open: int, most: int, max_of_one: int) -> None:
        super().__init__(
            f"{num_open} streams of KV events are open, and at most {most}, {max_of_one} of one "
            "tenant, may be: close one, or poll /v1/kv/events"
        )


class UnknownRequest(RequestError):
    """No open or recently finished request of the client's tenant has this id."""

    def __init__(self, request_id: str, kind: str) -> None:
        super().__init__(
            f"there is no {kind} request `{bounded(request_id, 100)}`: see /v1/kv/requests",
            param="request_id",
        )


class RequestFailed(QuireError):
    """An accepted request ended with an error."""


def bounded(text: str, max_characters: int = MAX_MESSAGE_CHARACTERS) -> str:
    """Truncate a text and escape characters that UTF-8 cannot encode."""
    if len(text) > max_characters:
        text = f"{text[:max_characters]}... ({len(text):,} characters)"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def error_body(error: QuireError) -> dict[str, object]:
    """Response body for a Quire error."""
    return _body(_status(error), str(error), getattr(error, "param", None))


def install_error_handlers(app: FastAPI) -> None:
    """Install handlers that return errors in the format of the API."""
    app.add_exception_handler(QuireError, _handle_quire_error)
    app.add_exception_handler(HTTPException, _handle_http_exception)
    app.add_exception_handler(Exception, _handle_bug)


def _status(error: QuireError) -> HTTPStatus:
    match error:
        case Unauthorized():
            return HTTPStatus.UNAUTHORIZED
        case Forbidden():
            return HTTPStatus.FORBIDDEN
        case UnknownModel() | UnknownRequest():
            return HTTPStatus.NOT_FOUND
        case RequestError():
            return HTTPStatus.BAD_REQUEST
        case RateLimited():
            return HTTPStatus.TOO_MANY_REQUESTS
        case EngineDead() | ReplicaLost() | Draining() | ShutDown() | QueueFull():
            return HTTPStatus.SERVICE_UNAVAILABLE
        case TooManyStreams():
            return HTTPStatus.SERVICE_UNAVAILABLE
        case _:
            return HTTPStatus.INTERNAL_SERVER_ERROR


def _headers(error: QuireError) -> dict[str, str]:
    if isinstance(error, RateLimited):
        return dict(error.headers)
    if isinstance(error, Unauthorized):
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, QueueFull):
        return {"Retry-After": str(math.ceil(error.retry_after_s))}
    return {}


def _body(status: HTTPStatus, message: str, param: str | None = None) -> dict[str, object]:
    kind = _TYPES.get(status, f"{status.phrase.title().replace(' ', '')}Error")
    error = {"message": bounded(message), "type": kind, "param": param, "code": int(status)}
    return {"error": error}


ANTHROPIC_PATHS = "/v1/messages"
"""Prefix of the paths whose errors have the format of Anthropic."""

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(status: int, message: str) -> dict[str, object]:
    """Body of an error in the format of Anthropic's API."""
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": bounded(message)}}


def error_response(
    status: HTTPStatus,
    message: str,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
    *,
    path: str = "",
) -> JSONResponse:
    """Response for an error, with a bounded message."""
    if path.startswith(ANTHROPIC_PATHS):
        return JSONResponse(anthropic_error(int(status), message), int(status), headers)
    return JSONResponse(_body(status, message, param), int(status), headers)


def refusal_response(error: QuireError, path: str) -> JSONResponse:
    """Response for a Quire error."""
    param = getattr(error, "param", None)
    return error_response(_status(error), str(error), param, _headers(error), path=path)


def error_events(error: QuireError, path: str) -> bytes:
    """The last events of a stream that an error ends, in the format of its API.

    For streams whose writer is gone, such as that of a lost replica.
    """
    if path.startswith(ANTHROPIC_PATHS):
        return event(anthropic_error(int(_status(error)), str(error)), "error").encode()
    if path.startswith("/v1/responses"):  # typed events, also for errors
        body = {"type": "error", "code": "server_error", "message": bounded(str(error))}
        return event(body | {"param": None}, "error").encode()
    return (event(error_body(error)) + DONE).encode()


async def _handle_quire_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, QuireError)
    return refusal_response(error, request.url.path)


async def _handle_http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    status, path = HTTPStatus(error.status_code), request.url.path
    message = _routing_message(request, status, error) or error.detail
    return error_response(status, message, headers=error.headers, path=path)


def _routing_message(request: Request, status: HTTPStatus, error: HTTPException) -> str | None:
    """Message for a path or method that the server does not have; None for other errors."""
    if error.detail != status.phrase:
        return None
    path = bounded(request.url.path, 100)
    if status is HTTPStatus.NOT_FOUND:
        return f"this server has no path {path}: see /docs for its API"
    if status is HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (error.headers or {}).get("Allow", "another method")
        return f"{path} does not take {request.method}: use {allowed}"
    return None


async def _handle_bug(request: Request, error: Exception) -> JSONResponse:
    message = f"{type(error).__name__} inside the server; see the server log"
    return error_response(HTTPStatus.INTERNAL_SERVER_ERROR, message, path=request.url.path)


MAX_VALIDATION_ERRORS = 4
MAX_SHOWN = 60  # characters of a value that is wrong
_MAX_PATH = 100  # characters of a path: clients choose the keys
_COUNTED = re.compile(r"should have (at (?:least|most) \d+ items?)")
_EXPECTED = "Input should be "

_KEY = "[key]"  # pydantic's marker for an invalid key of an object


class InvalidBody(HTTPException):
    """A JSON body with invalid fields."""

    def __init__(self, fields: Sequence["InvalidField"]) -> None:
        super().__init__(HTTPStatus.BAD_REQUEST)
        self.fields = fields

    @classmethod
    def of(cls, error: ValidationError, body: object) -> "InvalidBody":
        found = error.errors(include_url=False, include_context=False)
        located = [part | {"loc": ("body", *part["loc"])} for part in found]
        return cls(invalid_fields(located, {"body": body}))


@dataclass(frozen=True, slots=True, kw_only=True)
class InvalidField:
    """An invalid field."""

    path: str  # such as messages.0.content; empty for the body itself
    message: str

    def __str__(self) -> str:
        return f"{self.path or 'body'}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Located:
    """An error of pydantic with its location in the body."""

    error: Mapping[str, Any]
    path: tuple[str, ...]
    union: tuple[str, ...] | None  # path of the outermost union around the field


def install_validation_handlers(app: FastAPI) -> None:
    """Install handlers that return errors of validation in the format of the API."""
    app.add_exception_handler(RequestValidationError, _handle_validation_error)
    app.add_exception_handler(InvalidBody, _handle_validation_error)


async def _handle_validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError | InvalidBody)
    if isinstance(error, InvalidBody):
        fields = error.fields
    else:
        fields = invalid_fields(error.errors(), {"body": error.body})
    parts = [str(field) for field in fields[:MAX_VALIDATION_ERRORS]]
    if len(fields) > len(parts):
        parts.append(f"and {len(fields) - len(parts)} more")
    path = request.url.path
    return error_response(
        HTTPStatus.BAD_REQUEST, "; ".join(parts), fields[0].path or None, path=path
    )


def invalid_fields(errors: Sequence[Mapping[str, Any]], value: object) -> list[InvalidField]:
    """The invalid fields of a value, each with one error."""
    unions: dict[object, list[_Located]] = {}
    for number, error in enumerate(errors):
        found = _located(error, value)
        unions.setdefault(number if found.union is None else found.union, []).append(found)
    return [_field(branches) for branches in unions.values()]


def _located(error: Mapping[str, Any], value: object) -> _Located:
    """Separate the fields in the location of an error from pydantic's names of branches."""
    path: list[str] = []
    union = None
    location, is_missing = error["loc"], error["type"] == "missing"
    for index, step in enumerate(location, start=1):
        if (isinstance(value, dict) and step in value) or (
            isinstance(value, list) and isinstance(step, int) and step < len(value)
        ):
            value = value[step]
        elif step == _KEY:
            continue
        elif location[0] == "body" and not (is_missing and index == len(location)):
            union = tuple(path) if union is None else union
            continue
        path.append(str(step))
    return _Located(error=error, path=tuple(path), union=union)


def _field(branches: Sequence[_Located]) -> InvalidField:
    """The error of the branch of a union that fits the value best."""
    deepest = max(len(branch.path) for branch in branches)
    best = [branch for branch in branches if len(branch.path) == deepest]
    kinds_fit = [branch for branch in best if not branch.error["msg"].startswith(_EXPECTED)]
    first = (kinds_fit or best)[0]
    errors = [branch.error for branch in best if branch.path == first.path]
    message = _what_is_wrong(first.error) if kinds_fit else _not_expected(errors)
    return InvalidField(path=bounded(".".join(first.path[1:]), _MAX_PATH), message=message)


def _what_is_wrong(error: Mapping[str, Any]) -> str:
    """Rewrite pydantic's message as expected and given value; a long value is truncated."""
    text = str(error["msg"]).removeprefix("Value error, ")
    if error.get("type") == "missing":
        return "required" if len(error["loc"]) > 1 else "expected a JSON object, got nothing"
    counted = _COUNTED.search(text)
    if counted and isinstance(error.get("input"), list | dict):
        return f"expected {counted[1]}, got {len(error['input']):,}"
    return text


def _not_expected(errors: Sequence[Mapping[str, Any]]) -> str:
    """The message for a value of which all branches of a union expect another kind."""
    *others, last = dict.fromkeys(_expected(error) for error in errors)
    expected = f"{', '.join(others)} or {last}" if others else last
    return f"expected {expected}, got {_shown(errors[0].get('input'))}"


def _expected(error: Mapping[str, Any]) -> str:
    # the value is no JSON object
    if error.get("type") in ("model_attributes_type", "model_type", "dict_type"):
        return "a JSON object"
    expected = str(error["msg"]).removeprefix(_EXPECTED).partition(", ")[0]
    return f"a number {expected}" if expected.startswith(("less", "greater")) else expected


def _shown(given: object) -> str:
    if isinstance(given, list | dict):
        return "a list" if isinstance(given, list) else "an object"
    if isinstance(given, str):  # truncated first: the value may have megabytes
        return bounded(json.dumps(given[: MAX_SHOWN + 1], ensure_ascii=False), MAX_SHOWN)
    return bounded(json.dumps(given, default=repr), MAX_SHOWN)
