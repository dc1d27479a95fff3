"""An HTTP request as a message between processes, and the parts of its response.

    gateway                          replica
      HttpCall        ------------>  respond(app, call)
      HttpPart ...    <------------    status, headers and first bytes; then further bytes

The headers come with the first bytes of the body, so that a request whose replica is lost before
its first output has sent nothing.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quire.config.generation_request import DEFAULT_TENANT
from quire.layout.values import find_fault
from quire.scale.routing.base import RoutedRequest
from quire.scale.routing.blocks import block_hashes

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Scope


Headers = tuple[tuple[bytes, bytes], ...]

REPLICA_HEADER = b"x-quire-replica"
"""Header with the name of a replica: of a response, that which ran the request; of a request, that
which is to run it, if it still exists."""

_OPEN_PARTS = 64
"""Parts that wait for the caller; then the application waits."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpCall:
    """A received HTTP request with its whole body."""

    method: str  # with the next four see ASGI
    path: str
    raw_path: bytes
    query_string: bytes
    scheme: str
    headers: Headers  # names in lower case, and values
    body: bytes
    client: tuple[str, int] | None = None  # address and port
    routed: RoutedRequest | None = None
    replica_id: str | None = None  # None: the router chooses

    def header(self, name: bytes) -> str | None:
        found = (value for key, value in self.headers if key == name)
        return next((value.decode("latin-1") for value in found), None)

    def without_body(self) -> "HttpCall":
        headers = tuple((name, value) for name, value in self.headers if name != b"content-length")
        return replace(self, body=b"", headers=headers)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpPart:
    """A part of a response."""

    body: bytes
    is_last: bool
    status: int | None = None  # in the first part only
    headers: Headers = ()  # in the first part only


async def respond(app: "ASGIApp", call: HttpCall) -> AsyncGenerator[HttpPart, None]:
    """Run an application for one request and yield the parts of its response.

    Closing the iterator disconnects: the application then cancels its requests.
    """
    exchange = _Exchange(call)
    task = asyncio.create_task(exchange.run(app))
    try:
        while (part := await exchange.parts.get()) is not None:
            yield part
        await task  # raises the error of an application that has sent no whole response
    finally:
        exchange.disconnected.set()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class _Exchange:
    """ASGI's side of one request."""

    def __init__(self, call: HttpCall) -> None:
        self._call = call
        self._start: Message | None = None
        self._has_read = self._has_ended = False
        self.parts: asyncio.Queue[HttpPart | None] = asyncio.Queue(_OPEN_PARTS)
        self.disconnected = asyncio.Event()

    async def run(self, app: "ASGIApp") -> None:
        try:
            await app(self._scope(), self._receive, self._send)
        except Exception:
            if not self._has_ended:
                raise
            logger.exception("%s %s failed after its response", self._call.method, self._call.path)
        finally:
            if not self.disconnected.is_set():
                await self.parts.put(None)

    def _scope(self) -> "Scope":
        call = self._call
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": call.method,
            "scheme": call.scheme,
            "path": call.path,
            "raw_path": call.raw_path,
            "query_string": call.query_string,
            "root_path": "",
            "headers": list(call.headers),
            "client": call.client,
            "server": None,
        }

    async def _receive(self) -> "Message":
        if not self._has_read:
            self._has_read = True
            return {"type": "http.request", "body": self._call.body, "more_body": False}
        await self.disconnected.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: "Message") -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        if self._start is not None and more and not body:
            return  # the headers wait for the first bytes
        part = HttpPart(body=bytes(body), is_last=not more)
        if self._start is not None:
            headers = tuple((bytes(name), bytes(value)) for name, value in self._start["headers"])
            part = replace(part, status=self._start["status"], headers=headers)
            self._start = None
        self._has_ended = not more
        await self.parts.put(part)


_SESSION_FIELDS = ("prompt_cache_key", "user", "safety_identifier")
_WORD_BYTES = 4
_MAX_ID = 2**63
_MAX_SESSION_CHARACTERS = 256


def routed_request(call: HttpCall, tenant: str, block_words: int) -> RoutedRequest:
    """What a router may know of a request; of one without a prompt only tenant and session."""
    body = _json_object(call)
    words = list(_words(body))
    salt = json.dumps([tenant, body.get("cache_salt"), body.get("model")])
    named = [call.header(b"x-session-id"), *(body.get(name) for name in _SESSION_FIELDS)]
    texts = (name[:_MAX_SESSION_CHARACTERS] for name in named if isinstance(name, str) and name)
    return RoutedRequest(
        prompt_blocks=block_hashes(words, block_words, salt),
        prompt_tokens=len(words),
        session=next(texts, None),
        tenant=tenant or DEFAULT_TENANT,
    )


def _json_object(call: HttpCall) -> Mapping[str, Any]:
    if call.method != "POST" or not call.body:
        return {}
    try:
        body = json.loads(call.body)
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) and find_fault(body) is None else {}


def _words(body: Mapping[str, Any]) -> Iterator[int]:
    # in the order in which chat templates write them
    for name in ("tools", "instructions", "system", "messages", "input", "prompt"):
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, list) and bool(value) and all(type(item) is int for item in value):
            yield from (abs(token_id) % _MAX_ID for token_id in value)
        else:
            yield from _words_of_text(_text(value))


def _text(value: Any) -> str:
    """The texts of a prompt in their order; roles and other strings are texts too."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return "\0".join(_text(inner) for inner in value.values())
    if isinstance(value, Sequence):
        return "\0".join(_text(inner) for inner in value)
    return json.dumps(value)


def _words_of_text(text: str) -> Iterator[int]:
    data = text.encode("utf-8", "surrogatepass")
    whole = len(data) - len(data) % _WORD_BYTES
    yield from memoryview(data[:whole]).cast("I")
    if whole < len(data):
        yield int.from_bytes(data[whole:], "little")
