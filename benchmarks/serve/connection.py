"""HTTP/1.1 connections to the measured server, with as little work of the client as possible.

The client often runs on the cores of the server. A connection only stores the segments of a chunked
response with their times, and decodes them when the last one has arrived. h11 reads the headers;
its state machine for chunks would delay the segments of other connections that end at the same
time.
"""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult

import h11

_LAST_CHUNK = b"0\r\n\r\n"


class ServerError(Exception):
    """The server closed the connection, or sent something that is not HTTP."""


@dataclass(slots=True)
class Reply:
    """A response.

    Attributes:
        status: HTTP status.
        segments: parts of the body with the times of their arrival.
    """

    status: int
    segments: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        """The whole body."""
        return b"".join(data for _, data in self.segments)


class ChunkedBody:
    """Decodes the chunked transfer coding of a body (RFC 9112, section 7.1)."""

    def __init__(self) -> None:
        self._unread = b""
        self._in_trailer = False
        self.has_ended = False

    def add(self, data: bytes) -> bytes:
        """Return the contents of the chunks that these bytes complete.

        Raises:
            ServerError: the bytes are not chunks.
        """
        self._unread += data
        contents: list[bytes] = []
        while (chunk := self._next()) is not None:
            contents.append(chunk)
        if self._in_trailer:
            self._read_trailer()
        return b"".join(contents)

    def _next(self) -> bytes | None:
        """Remove the next whole chunk and return its content; None without one."""
        line, separator, rest = self._unread.partition(b"\r\n")
        if self._in_trailer or not separator:
            return None
        size = _size_of(line)
        if size == 0:
            self._in_trailer, self._unread = True, rest
            return None
        if len(rest) < size + 2:
            return None
        if rest[size : size + 2] != b"\r\n":
            raise ServerError("the response is not valid HTTP: a chunk is longer than its size")
        self._unread = rest[size + 2 :]
        return rest[:size]

    def _read_trailer(self) -> None:
        while not self.has_ended and b"\r\n" in self._unread:
            line, _, self._unread = self._unread.partition(b"\r\n")
            self.has_ended = not line


def _size_of(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    if not digits or digits.strip(b"0123456789abcdefABCDEF"):
        raise ServerError(f"the response is not valid HTTP: chunk size {line[:20]!r}")
    return int(digits, 16)


class Connection(asyncio.Protocol):
    """One connection; it serves one request at a time.

    Args:
        host: value of the header Host.
        clock: returns seconds.
    """

    def __init__(self, host: str, clock: Callable[[], float]) -> None:
        self._host, self._clock = host, clock
        self._http = h11.Connection(h11.CLIENT)
        self._transport: Any = None  # asyncio.WriteTransport
        self._unread: list[tuple[float, bytes]] = []
        self._reply: Reply | None = None
        self._chunks: ChunkedBody | None = None  # None: h11 reads the body
        self._tail = b""  # last bytes of the response: a segment may end within the last chunk
        self._done: asyncio.Future[Reply] | None = None

    async def exchange(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes = b""
    ) -> Reply:
        """Send a request and return the whole response.

        Raises:
            ServerError: the server closed the connection, or the response is not valid HTTP.
        """
        assert self._transport is not None, "the connection is made"
        fields = {"host": self._host, "content-length": str(len(body))} | dict(headers)
        request = h11.Request(method=method, target=path, headers=list(fields.items()))
        self._done = asyncio.get_running_loop().create_future()
        data = self._http.send(request) or b""
        data += self._http.send(h11.Data(data=body)) or b""
        self._transport.write(data + (self._http.send(h11.EndOfMessage()) or b""))
        reply = await self._done
        self._reply, self._done = None, None
        return reply

    @property
    def can_continue(self) -> bool:
        """Whether another request can be sent."""
        if self._chunks is None:
            is_read = self._http.their_state is h11.DONE
        else:
            is_read = self._chunks.has_ended
        return is_read and self._http.our_state is h11.DONE and self.is_open

    @property
    def is_open(self) -> bool:
        """Whether neither side has closed the connection."""
        return self._transport is not None and not self._transport.is_closing()

    def next_request(self) -> None:
        """Prepare for another request."""
        self._http, self._chunks = h11.Connection(h11.CLIENT), None

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    # ---- asyncio.Protocol ----------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:  # those of uvloop have no common base class
        """Store the transport."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Store a segment; parse the segments once the response may be complete."""
        self._unread.append((self._clock(), data))
        self._tail = (self._tail + data[-len(_LAST_CHUNK) :])[-len(_LAST_CHUNK) :]
        if self._chunks is None or self._tail == _LAST_CHUNK:
            self._parse()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request in progress."""
        self._unread.append((self._clock(), b""))  # the end of the stream
        self._parse()
        self._fail(ServerError("the server closed the connection"))

    def _parse(self) -> None:
        unread, self._unread = self._unread, []
        try:
            for now_s, data in unread:
                self._read(now_s, data)
        except h11.RemoteProtocolError as error:
            self._fail(ServerError(f"the response is not valid HTTP: {error}"))
        except ServerError as error:
            self._fail(error)

    def _read(self, now_s: float, data: bytes) -> None:
        if self._chunks is None:
            self._http.receive_data(data)
            self._take_events(now_s)
            data = self._http.trailing_data[0]  # what followed the headers of a chunked body
        if self._chunks is not None:
            self._take_chunks(self._chunks, now_s, data)

    def _take_chunks(self, chunks: ChunkedBody, now_s: float, data: bytes) -> None:
        content = chunks.add(data)
        if content and self._reply is not None:
            self._reply.segments.append((now_s, content))
        if chunks.has_ended:
            self._end()

    def _take_events(self, now_s: float) -> None:
        while self._chunks is None:
            event = self._http.next_event()
            if isinstance(event, h11.Response):
                self._reply = Reply(event.status_code)
                if (b"transfer-encoding", b"chunked") in event.headers:
                    self._chunks = ChunkedBody()
            elif isinstance(event, h11.Data) and self._reply is not None:
                self._reply.segments.append((now_s, bytes(event.data)))
            elif isinstance(event, h11.EndOfMessage) and self._reply is not None:
                self._end()
                return
            elif not isinstance(event, h11.InformationalResponse):
                return  # more data is needed, or the connection is closed

    def _end(self) -> None:
        if self._done is not None and not self._done.done() and self._reply is not None:
            self._done.set_result(self._reply)

    def _fail(self, error: ServerError) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


class Connections:
    """Connections to one server, which are used again.

    Args:
        url: URL of the server.
        clock: returns seconds.
    """

    def __init__(self, url: SplitResult, clock: Callable[[], float] = time.perf_counter) -> None:
        self._url, self._clock = url, clock
        self._idle: list[Connection] = []
        self._tls = ssl.create_default_context() if url.scheme == "https" else None

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """A connection for one request; it is closed if the request fails.

        Raises:
            ServerError: the server cannot be reached.
        """
        found = self._take_idle() or await self._connect()
        try:
            yield found
        finally:
            if found.can_continue:
                found.next_request()
                self._idle.append(found)
            else:
                found.close()

    def close(self) -> None:
        """Close the idle connections."""
        for found in self._idle:
            found.close()
        self._idle.clear()

    def _take_idle(self) -> Connection | None:
        while self._idle:
            found = self._idle.pop()
            if found.is_open:
                return found
        return None

    async def _connect(self) -> Connection:
        host, secure = self._url.hostname or "", self._tls
        port = self._url.port or (80 if secure is None else 443)
        shown = self._url.netloc.rpartition("@")[2]
        try:
            _, found = await asyncio.get_running_loop().create_connection(
                lambda: Connection(shown, self._clock), host, port, ssl=secure
            )
        except OSError as error:
            raise ServerError(f"{host} port {port} cannot be reached: {error}") from error
        return found
