"""Connections: the server's socket, timeouts of slow clients, and the limit on body sizes.

A connection with incomplete request headers or an incomplete body uses a file descriptor and
memory as long as it is open.
"""

import asyncio
import os
import socket
from http import HTTPStatus
from typing import Any

import h11
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from quire.errors import ConfigError
from quire.kernels.memory import return_freed_memory
from quire.layout.sizes import format_size
from quire.serve.access import HEADER, new_request_id
from quire.serve.errors import error_response

MAX_HEADER_BYTES = 1 << 16
"""Limit of the request line and headers of one request."""

_TOO_LARGE_HEADERS = (
    f"the request headers exceed {MAX_HEADER_BYTES:,} B: send fewer or shorter headers"
)


def _requested_path(connection: h11.Connection) -> str:
    """Path in the first line of a request that could not be read; empty without one."""
    words = connection.trailing_data[0][:MAX_HEADER_BYTES].split(b" ", 2)
    return words[1].decode("latin-1") if len(words) == 3 else ""


class StreamingConnection(h11.Connection):
    """HTTP/1.1 state of a connection, with a short way for the chunks of a stream.

    h11 runs its state machine for every chunk, which costs more than all other work on a chunk of
    one token. A chunk never changes the state, so that only the others need the machine.
    """

    _is_chunked = False

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]  # h11 has overloads
        """Bytes to send for an event; see h11."""
        if self._is_chunked and isinstance(event, h11.Data) and self.our_state is h11.SEND_BODY:
            data = event.data
            return b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        sent = super().send(event)
        if isinstance(event, h11.Response):
            self._is_chunked = _CHUNKED in (sent or b"").lower()
        return sent


_CHUNKED = b"\r\ntransfer-encoding: chunked\r\n"

# Timeouts of HTTP connections whose client does not finish a request.


class TimedConnection(H11Protocol):
    """Uvicorn's HTTP/1.1 protocol with a timeout for incoming requests.

    Headers must be complete within `header_timeout_s` of the connection, or of the first byte of a
    further request. Pauses within a body have the same limit. If the response was sent before the
    end of the body, as for a refused body, the rest is discarded for at most that time.
    """

    def __init__(self, *arguments: object, header_timeout_s: float, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        self.conn = StreamingConnection(h11.SERVER, MAX_HEADER_BYTES)
        self._timeout_s = header_timeout_s
        self._deadline: asyncio.TimerHandle | None = None
        self._expects = ""

    def connection_made(self, transport: Any) -> None:  # those of uvloop have no common base class
        """Start the timeout for request headers."""
        super().connection_made(transport)
        self._update()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timeout."""
        self._clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Process received bytes of a request."""
        if self._expects == "body":
            self._clear()  # the timeout of a body restarts with every received segment
        super().data_received(data)
        self._update()

    def on_response_complete(self) -> None:
        """Expect the rest of the body if the response was sent before its end."""
        super().on_response_complete()
        self._update()

    def _update(self) -> None:
        """Start, keep or stop the timeout, depending on the expected part of the request."""
        expects = "" if self.transport.is_closing() else self._expected()
        if expects == self._expects and self._deadline is not None:
            return
        self._clear()
        if expects:
            self._expects = expects
            self._deadline = self.loop.call_later(self._timeout_s, self._close)

    def _expected(self) -> str:
        """Expected part of the request: "headers", "body", "rest", or "" for none."""
        if self.conn.their_state is h11.IDLE:
            is_first = self.cycle is None
            return "headers" if is_first or self.conn.trailing_data[0] else ""
        if self.conn.their_state is not h11.SEND_BODY:
            return ""
        return "rest" if self.cycle.response_complete else "body"

    def send_400_response(self, msg: str) -> None:
        """Refuse a message that is not valid HTTP, or whose headers are too large, as JSON."""
        status = HTTPStatus.BAD_REQUEST
        if len(self.conn.trailing_data[0]) > MAX_HEADER_BYTES:
            status, msg = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, _TOO_LARGE_HEADERS
        body = error_response(status, msg, path=_requested_path(self.conn)).body
        headers = [("content-type", "application/json"), ("connection", "close")]
        headers.append((HEADER, new_request_id()))
        headers.append(("content-length", str(len(body))))
        events = (
            h11.Response(status_code=int(status), headers=headers, reason=status.phrase.encode()),
            h11.Data(data=bytes(body)),
            h11.EndOfMessage(),
        )
        for event in events:
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _clear(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline, self._expects = None, ""

    def _close(self) -> None:
        self._clear()
        self.logger.info("closed a connection that did not finish its request in time")
        self.transport.abort()


# Refuses bodies that are too large, and returns the memory of large bodies to the system.

LARGE_BODY_BYTES = 1 << 20
"""After a request with a larger body, freed memory is returned to the system."""


class BodyTooLarge(HTTPException):
    """Status 413: a body has more bytes than `--max-body`."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the body is larger than {max_bytes:,} B ({format_size(max_bytes)}): send a smaller "
            "body, or start the server with a larger --max-body",
        )


class BodyLimit:
    """ASGI middleware that limits headers and bodies, also without Content-Length."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request; a body whose Content-Length is too large is not read."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if _header_bytes(scope) > MAX_HEADER_BYTES:
            status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            response = error_response(status, _TOO_LARGE_HEADERS, path=scope["path"])
            await response(scope, receive, send)
            return
        if _announced_bytes(scope) > self._max_bytes:
            refusal = BodyTooLarge(self._max_bytes)
            status = HTTPStatus(refusal.status_code)
            response = error_response(status, refusal.detail, path=scope["path"])
            await response(scope, receive, send)
            return
        counted = _Counted(receive, self._max_bytes)
        await self._app(scope, counted, send)
        if counted.num_bytes > LARGE_BODY_BYTES:
            return_freed_memory()


class _Counted:
    """Counts the received bytes of a body, for bodies without a Content-Length."""

    def __init__(self, receive: Receive, max_bytes: int) -> None:
        self._receive, self._max_bytes = receive, max_bytes
        self.num_bytes = 0

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self.num_bytes += len(message.get("body", b""))
            if self.num_bytes > self._max_bytes:
                raise BodyTooLarge(self._max_bytes)
        return message


def _header_bytes(scope: Scope) -> int:
    headers = sum(len(name) + len(value) for name, value in scope["headers"])
    return headers + len(scope["raw_path"] or b"") + len(scope["query_string"])


def _announced_bytes(scope: Scope) -> int:
    lengths = [value for name, value in scope["headers"] if name == b"content-length"]
    # 20 digits are over any limit, and Python refuses to read 4,301
    return int(lengths[0][:20]) if lengths and lengths[0].isdigit() else 0


# The server's socket: bound before the model is loaded, so that a port in use is reported at once.


def bind(host: str, port: int) -> socket.socket:
    """Create a socket that is bound but does not accept connections yet."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # on other systems it lets two processes bind one port
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind((host, port))
    except (OSError, TypeError, UnicodeError) as error:  # the latter two: not a valid host name
        bound.close()
        raise _cannot_listen(host, port, error) from error
    return bound


def listen(bound: socket.socket, *, scheme: str = "http") -> str:
    """Start to accept connections and return the URL of the API."""
    host, port = bound.getsockname()[:2]
    try:
        bound.listen()
    except OSError as error:
        raise _cannot_listen(host, port, error) from error
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}:{port}/v1"


def _cannot_listen(host: str, port: int, error: Exception) -> ConfigError:
    reason = getattr(error, "strerror", None) or error
    return ConfigError(
        f"cannot listen on {host} port {port}: {reason}; choose another --host or --port (0 "
        "selects a free port)"
    )
