"""A client of streamed completions: thousands of streams cost little.

The client often runs on the cores of the server. So a stream only stores the segments of its
response with their times, and reads them when the server has closed the connection.
"""

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

OK = 200
DONE = "[DONE]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """A response and the times of its segments, which are those of `time.perf_counter`.

    Attributes:
        sent_s: time when the request was sent.
        segments: parts of the response, headers included, with the times of their arrival.
        has_left: whether the client closed the connection.
    """

    sent_s: float
    segments: tuple[tuple[float, bytes], ...]
    has_left: bool

    @property
    def status(self) -> int:
        """HTTP status; 0: no response."""
        head = self._bytes[:12].split(b" ", 1)
        return int(head[1]) if len(head) > 1 else 0

    @property
    def body(self) -> str:
        """Body of a response that is not a stream."""
        return self._bytes.partition(b"\r\n\r\n")[2].decode()

    @property
    def _bytes(self) -> bytes:
        return b"".join(data for _, data in self.segments)

    def events(self) -> Iterator[tuple[float, str]]:
        """Yield the data of every server-sent event with the time when it was complete.

        The headers and the sizes of the chunks are lines of their own, none of which starts with
        "data:": Quire's server sends every event in one chunk.
        """
        rest = b""
        for now_s, segment in self.segments:
            *lines, rest = (rest + segment).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    yield now_s, line[5:].strip().decode()


class _Stream(asyncio.Protocol):
    """One request and its response.

    Args:
        request: bytes of the request.
        leaves_after: number of events after which the client disconnects; None: it stays.
    """

    def __init__(self, request: bytes, leaves_after: int | None) -> None:
        self._request, self._leaves_after = request, leaves_after
        self._transport: Any = None  # asyncio.WriteTransport
        self._num_events = 0
        self.segments: list[tuple[float, bytes]] = []
        self.has_left = False
        self.closed = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:  # those of uvloop have no common base class
        """Send the request."""
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Store a segment; disconnect after the events of the plan."""
        self.segments.append((perf_counter(), data))
        if self._leaves_after is not None:
            self._num_events += data.count(b"data:")
            if self._num_events >= self._leaves_after:
                self.has_left = True
                self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the response."""
        if not self.closed.done():
            self.closed.set_result(None)


async def stream(url: str, body: Mapping[str, Any], leaves_after: int | None = None) -> Response:
    """Send a request to /v1/completions and return its response when the connection is closed.

    Args:
        url: base URL of the server, without a path.
        body: JSON body of the request.
        leaves_after: number of events after which the client disconnects; None: it stays.

    Raises:
        OSError: the server cannot be reached.
    """
    address = urlsplit(url)
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    sent_s = perf_counter()
    transport, found = await asyncio.get_running_loop().create_connection(
        lambda: _Stream(head.encode() + content, leaves_after),
        address.hostname or "",
        address.port or 80,
    )
    try:
        await found.closed
    finally:
        transport.close()
    return Response(sent_s=sent_s, segments=tuple(found.segments), has_left=found.has_left)
