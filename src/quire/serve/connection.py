"""HTTP connections that are closed when a client does not finish what it has begun to send.

A connection that sends no whole request headers, or only a part of the body that they announce,
costs a file descriptor and memory for as long as it is open.
"""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


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
