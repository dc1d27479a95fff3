"""Request ids, counts of requests and the access log: the outermost ASGI middleware.

Every response has the header `x-request-id`: the id that the client sent, or a new one. The access
log has one line per request on standard error: no query string, no header, no body, and so no API
key and no prompt.

Refuses requests for other host names: protection of local servers against DNS rebinding.

A web page of another origin can change the address of its own host name to 127.0.0.1. Its requests
then have the same origin as the page, so that the browser does not ask for permission (CORS). Their
header `Host` has the name of the page.
"""

import logging
import re
import time
import uuid
from http import HTTPStatus
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.serve.config import is_loopback
from quire.serve.errors import bounded, error_response
from quire.serve.metrics.observer import HttpRequests


class LocalHosts:
    """ASGI middleware that accepts only `localhost` and loopback addresses as `Host`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = None if scope["type"] != "http" else _host(scope)
        if given is None or _is_local(given):
            await self._app(scope, receive, send)
            return
        message = (
            f"expected localhost or a loopback address in the header Host, got "
            f"{bounded(given, 100)!r}: this server has no API key and accepts requests of this "
            "machine only; use http://localhost, or start the server with --api-key or --host"
        )
        response = error_response(HTTPStatus.FORBIDDEN, message, path=scope["path"])
        await response(scope, receive, send)


def _host(scope: Scope) -> str | None:
    """The header `Host`; None if the request has none, as in HTTP/1.0."""
    values = [value for name, value in scope["headers"] if name == b"host"]
    return values[0].decode("latin-1") if values else None


def _is_local(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:  # not a host
        return False
    return name.endswith(".localhost") or is_loopback(name)


HEADER = "x-request-id"

QUIET_PATHS = frozenset({"/health", "/ready", "/ping", "/metrics"})
"""Paths of probes, which are logged only if they fail."""

CLIENT_CLOSED = 499
"""Status in the log if the client disconnected before the response began, as in nginx."""

_ID = re.compile(r"[A-Za-z0-9_.:/+=-]{1,128}", re.ASCII)
_CLIENT_ERROR, _SERVER_ERROR = 400, 500
_MAX_PATH = 200

logger = logging.getLogger("quire.access")


class AccessLog:
    """ASGI middleware that sets `request.state.request_id` and writes the access log."""

    def __init__(self, app: ASGIApp, counts: HttpRequests, *, writes: bool = True) -> None:
        self._app, self._counts, self._writes = app, counts, writes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"] = request_id = _request_id(scope)
        sent = _Sent(send, request_id)
        start_s = time.perf_counter()
        try:
            await self._app(scope, _Received(receive, sent), sent)
        finally:
            seconds = time.perf_counter() - start_s
            self._counts.add(scope, sent.status, seconds)
            if self._writes:
                _log(scope, sent, seconds)


class _Sent:
    """Adds the id to the response, and records its status and size."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send, self._request_id = send, request_id
        self.has_begun = self.client_closed = False
        self.status = CLIENT_CLOSED
        self.num_bytes = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_begun = True
            if not self.client_closed:
                self.status = message["status"]
            MutableHeaders(scope=message)[HEADER] = self._request_id
        elif message["type"] == "http.response.body":
            self.num_bytes += len(message.get("body", b""))
        await self._send(message)


class _Received:
    """Records that the client disconnected before the response began."""

    def __init__(self, receive: Receive, sent: _Sent) -> None:
        self._receive, self._sent = receive, sent

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self._sent.has_begun:
            self._sent.client_closed = True
        return message


def _request_id(scope: Scope) -> str:
    """The client's id if it is short and printable, else a new one."""
    for name, value in scope["headers"]:
        if name == HEADER.encode():
            text: str = value.decode("latin-1")
            if _ID.fullmatch(text):
                return text
    return new_request_id()


def new_request_id() -> str:
    """An id for a request without one."""
    return uuid.uuid4().hex


def _log(scope: Scope, sent: _Sent, seconds: float) -> None:
    path = scope["path"]
    if path in QUIET_PATHS and sent.status < _SERVER_ERROR:
        return
    # the dashboard reads these every second
    if path.startswith(("/dashboard", "/v1/kv/")) and sent.status < _CLIENT_ERROR:
        return
    state = scope["state"]
    client = scope.get("client") or ("-", 0)
    fields = {
        "method": scope["method"],
        "path": _shown(path),
        "status": sent.status,
        "seconds": round(seconds, 4),
        "bytes": sent.num_bytes,
        "client": client[0],
        "tenant": state.get("tenant") or "-",
        "request_id": state["request_id"],
        "response_id": state.get("response_id", "-"),
    }
    logger.info(
        "%(method)s %(path)s %(status)d in %(seconds).3f s, %(bytes)d B, client %(client)s, tenant "
        "%(tenant)s, request %(request_id)s, response %(response_id)s",
        fields,
        extra={"fields": fields},
    )


def _shown(path: str) -> str:
    shown = path[:_MAX_PATH].encode("ascii", "backslashreplace").decode()
    return "".join(letter if letter.isprintable() else "?" for letter in shown)
