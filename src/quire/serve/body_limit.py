"""Refuses bodies that are too large, and returns the memory that a large one took."""

from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.engine.host_memory import return_freed_memory
from quire.layout.sizes import format_size
from quire.serve.errors import error_response

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
