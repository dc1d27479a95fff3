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
"""

import math
from collections.abc import Mapping
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from quire.errors import EngineDead, QueueFull, QuireError, RequestError
from quire.serve.formats import DONE, event
from quire.serve.rate_limits import RateLimited

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

    def __init__(self, num_open: int, most: int, most_of_one: int) -> None:
        super().__init__(
            f"{num_open} streams of KV events are open, and at most {most}, {most_of_one} of one "
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


def bounded(text: str, most_characters: int = MAX_MESSAGE_CHARACTERS) -> str:
    """Truncate a text and escape characters that UTF-8 cannot encode."""
    if len(text) > most_characters:
        text = f"{text[:most_characters]}... ({len(text):,} characters)"
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
    """Headers of the response to an error, such as the time to wait."""
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
    """Response for an error, with a bounded message.

    Args:
        status: its status.
        message: its message.
        param: name of the invalid field.
        headers: further headers.
        path: path of the request, which determines the format.
    """
    if path.startswith(ANTHROPIC_PATHS):
        return JSONResponse(anthropic_error(int(status), message), int(status), headers)
    return JSONResponse(_body(status, message, param), int(status), headers)


def refusal_response(error: QuireError, path: str) -> JSONResponse:
    """Response for a Quire error.

    Args:
        error: the error.
        path: path of the request, which determines the format.
    """
    param = getattr(error, "param", None)
    return error_response(_status(error), str(error), param, _headers(error), path=path)


RESPONSES_PATH = "/v1/responses"
"""Path whose streams have typed events, also for errors."""


def error_events(error: QuireError, path: str) -> bytes:
    """The last events of a stream that an error ends, in the format of its API.

    For streams whose writer is gone, such as that of a lost replica.

    Args:
        error: the error.
        path: path of the request, which determines the format.
    """
    if path.startswith(ANTHROPIC_PATHS):
        return event(anthropic_error(int(_status(error)), str(error)), "error").encode()
    if path.startswith(RESPONSES_PATH):
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
