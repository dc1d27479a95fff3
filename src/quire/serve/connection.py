"""Connections: the socket, clients that do not finish, bodies that are too large.

A connection that sends no whole request headers, or only a part of the body that they announce,
costs a file descriptor and memory for as long as it is open.
"""

import asyncio
import os
import socket
from http import HTTPStatus

import h11
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from quire.engine.host_memory import return_freed_memory
from quire.errors import ConfigError
from quire.layout.sizes import format_size
from quire.serve.errors import error_response

# HTTP connections that are closed when a client does not finish what it has begun to send.


class TimedConnection(H11Protocol):
    """Uvicorn's HTTP/1.1 protocol with a limit on the time that a request takes to arrive.

    Headers must be there `header_timeout_s` after the connection is made, or after the first byte
    of a further request. A body may pause for as long. What is left of a body whose response has
    been sent already, such as a refused one, is discarded for as long.

    Args:
        arguments: as uvicorn gives them.
        header_timeout_s: see above.
        options: as uvicorn gives them.
    """

    def __init__(self, *arguments: object, header_timeout_s: float, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        self._timeout_s = header_timeout_s
        self._deadline: asyncio.TimerHandle | None = None
        self._expects = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Expect request headers."""
        super().connection_made(transport)
        self._update()

    def connection_lost(self, exc: Exception | None) -> None:
        """Expect nothing any more."""
        self._clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read a part of a request."""
        if self._expects == "body":
            self._clear()  # a body has as long again after every part
        super().data_received(data)
        self._update()

    def on_response_complete(self) -> None:
        """Expect the rest of the body, where the response was sent before its end."""
        super().on_response_complete()
        self._update()

    def _update(self) -> None:
        """Start, keep or end the time for what is expected now."""
        expects = "" if self.transport.is_closing() else self._expected()
        if expects == self._expects and self._deadline is not None:
            return
        self._clear()
        if expects:
            self._expects = expects
            self._deadline = self.loop.call_later(self._timeout_s, self._close)

    def _expected(self) -> str:
        """What the client has begun to send: "headers", "body", "rest" or nothing."""
        if self.conn.their_state is h11.IDLE:
            is_first = self.cycle is None
            return "headers" if is_first or self.conn.trailing_data[0] else ""
        if self.conn.their_state is not h11.SEND_BODY:
            return ""
        return "rest" if self.cycle.response_complete else "body"

    def _clear(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline, self._expects = None, ""

    def _close(self) -> None:
        self._clear()
        self.logger.info("closed a connection that did not finish its request in time")
        self.transport.abort()


# ---- body limit ----------------------------------------------------------------------------------

# Refuses bodies that are too large, and returns the memory that a large one took.

LARGE_BODY_BYTES = 1 << 20
"""After a request with a larger body, freed memory is returned to the system."""


class BodyTooLarge(HTTPException):
    """Status 413: a body has more bytes than `--max-body`."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the body is larger than {most_bytes:,} B ({format_size(most_bytes)}): send a smaller "
            "one, or start the server with a larger --max-body",
        )


class BodyLimit:
    """ASGI middleware around the whole application.

    Args:
        app: the application.
        most_bytes: of a body, however it is sent.
    """

    def __init__(self, app: ASGIApp, most_bytes: int) -> None:
        self._app, self._most_bytes = app, most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; a body that is announced as too large is not read."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if _announced_bytes(scope) > self._most_bytes:
            refusal = BodyTooLarge(self._most_bytes)
            response = error_response(HTTPStatus(refusal.status_code), refusal.detail)
            await response(scope, receive, send)
            return
        counted = _Counted(receive, self._most_bytes)
        await self._app(scope, counted, send)
        if counted.num_bytes > LARGE_BODY_BYTES:
            return_freed_memory()


class _Counted:
    """Counts the bytes of a body as they come, for a body whose length is not announced."""

    def __init__(self, receive: Receive, most_bytes: int) -> None:
        self._receive, self._most_bytes = receive, most_bytes
        self.num_bytes = 0

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self.num_bytes += len(message.get("body", b""))
            if self.num_bytes > self._most_bytes:
                raise BodyTooLarge(self._most_bytes)
        return message


def _announced_bytes(scope: Scope) -> int:
    lengths = [value for name, value in scope["headers"] if name == b"content-length"]
    return int(lengths[0]) if lengths and lengths[0].isdigit() else 0


# ---- listen --------------------------------------------------------------------------------------

# The server's socket: bound before the model is loaded, so that a taken port is told at once.


def bind(host: str, port: int) -> socket.socket:
    """A socket that has its address and does not accept connections yet.

    Args:
        host: address to listen on.
        port: port to listen on; 0 takes a free one.

    Raises:
        ConfigError: nothing can listen there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # elsewhere it lets two processes have one port
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind((host, port))
    except (OSError, TypeError, UnicodeError) as error:  # the latter: no host has such a name
        bound.close()
        raise _cannot_listen(host, port, error) from error
    return bound


def listen(bound: socket.socket) -> str:
    """Accept connections from now on; the URL of the API.

    Raises:
        ConfigError: another process listens there since the socket was bound.
    """
    host, port = bound.getsockname()[:2]
    try:
        bound.listen()
    except OSError as error:
        raise _cannot_listen(host, port, error) from error
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


def _cannot_listen(host: str, port: int, error: Exception) -> ConfigError:
    reason = getattr(error, "strerror", None) or error
    return ConfigError(
        f"cannot listen on {host} port {port}: {reason}; choose another --host or --port (0 takes "
        "a free port)"
    )
