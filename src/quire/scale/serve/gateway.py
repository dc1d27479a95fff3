"""The gateway of replicas: an ASGI application that forwards every request to one of them.

    client ---> Gateway ---> Replicas.forward(call) ---> replica: the application of `quire serve`
                   ^------------- parts of the response ------'

If a replica is lost before the first output of a request, the gateway sends the request again, and
the router chooses another replica. Generation changes nothing outside of its replica, so a second
run is safe. Comments that keep a stream open are no output. A stream that has begun ends with an
error event.

The metrics of several replicas are one text: each sample gets the label `replica`.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Protocol, runtime_checkable

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.scale.http_call import REPLICA_HEADER, Headers, HttpCall, HttpPart, routed_request
from quire.serve.access import HEADER, new_request_id
from quire.serve.connection import BodyLimit, BodyTooLarge
from quire.serve.embedded import (
    ReplicaLost,
    Unauthorized,
    error_events,
    error_response,
    refusal_response,
)
from quire.serve.tenant_keys import TenantKeys, authorization_of

LABEL = "replica"
METRICS_PATH = "/metrics"
_SMALL_BODY_BYTES = 1 << 16
"""Larger bodies are parsed in a thread, so that other requests do not wait."""
_REQUEST_ID = HEADER.encode()

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Family:
    comments: list[str] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)


def merged_metrics(texts: Mapping[str, str]) -> str:
    """Merge metrics in Prometheus' text format.

    Prometheus needs all samples of a metric together, so they are sorted by metric, not by replica.
    """
    families: dict[str, _Family] = {}
    for replica, text in texts.items():
        label = f'{LABEL}="{_escaped(replica)}"'
        family = families.setdefault("", _Family())
        for line in text.splitlines():
            if line.startswith("# "):
                family = families.setdefault(line.split(" ", 3)[2], _Family())
                if line not in family.comments:
                    family.comments.append(line)
            elif line:
                family.samples.append(_with_label(line, label))
    lines = (line for found in families.values() for line in (*found.comments, *found.samples))
    return "".join(f"{line}\n" for line in lines)


def _with_label(sample: str, label: str) -> str:
    """Add a label to a line such as `name 1.0` or `name{a="b"} 1.0`."""
    name, brace, rest = sample.partition("{")
    if brace and " " not in name:
        return f"{name}{{{label}{'' if rest.startswith('}') else ','}{rest}"
    name, _, value = sample.partition(" ")
    return f"{name}{{{label}}} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


@runtime_checkable
class Replicas(Protocol):
    """The replicas of a gateway."""

    def forward(self, call: HttpCall) -> AsyncGenerator[HttpPart, None]:
        """Yield the response of one replica; closing the iterator cancels it."""

    async def ask_all(self, call: HttpCall) -> Sequence[tuple[str, HttpPart]]:
        """The names of all replicas and their whole responses."""


class Gateway:
    """ASGI application that forwards requests to replicas."""

    def __init__(
        self, replicas: Replicas, keys: TenantKeys, *, retries: int, block_words: int
    ) -> None:
        self._replicas, self._keys = replicas, keys
        self._retries, self._block_words = retries, block_words

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _run_lifespan(receive, send)
        elif scope["type"] == "http":
            await self._run(scope, receive, send)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            call = await self._call(scope, receive)
        except BodyTooLarge as error:
            status = HTTPStatus(error.status_code)
            refusal = error_response(status, error.detail, path=scope["path"])
            await refusal(scope, receive, send)
            return
        if call is None:  # the client disconnected
            return
        if call.path == METRICS_PATH:
            await self._send_metrics(call, send)
            return
        forward = asyncio.create_task(self._forward(call, send))
        watch = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((forward, watch), return_when=asyncio.FIRST_COMPLETED)
            if forward.done():
                await forward
        finally:
            forward.cancel()
            watch.cancel()
            await asyncio.gather(forward, watch, return_exceptions=True)

    async def _call(self, scope: Scope, receive: Receive) -> HttpCall | None:
        """The request with its body; without it if its key is refused, as the replica will say."""
        call = _call_of(scope)
        try:
            tenant = self._keys.tenant_of(authorization_of(scope))
        except Unauthorized:
            return call.without_body()
        body = await _body(receive)
        if body is None:
            return None
        call = replace(call, body=body)
        if len(body) <= _SMALL_BODY_BYTES:
            return replace(call, routed=routed_request(call, tenant, self._block_words))
        routed = await asyncio.to_thread(routed_request, call, tenant, self._block_words)
        return replace(call, routed=routed)

    async def _forward(self, call: HttpCall, send: Send) -> None:
        reply = _Reply(call.path, send)
        for attempt in range(self._retries + 1):
            try:
                async with aclosing(self._replicas.forward(call)) as parts:
                    async for part in parts:
                        await reply.add(part)
                return
            except ReplicaLost as error:
                if reply.has_output or attempt == self._retries:
                    await reply.fail(error)
                    return
                logger.warning(
                    "%s %s, request %s: %s; sending it to another replica",
                    *(call.method, call.path, call.header(_REQUEST_ID), error),
                )

    async def _send_metrics(self, call: HttpCall, send: Send) -> None:
        reply = _Reply(call.path, send)
        try:
            found = await self._replicas.ask_all(_plain_metrics(call))
        except ReplicaLost as error:
            await reply.fail(error)
            return
        refused = next((part for _, part in found if part.status != HTTPStatus.OK), None)
        if refused is not None:
            await reply.add(refused)
            return
        body = merged_metrics({name: part.body.decode() for name, part in found}).encode()
        first = found[0][1]
        headers = MutableHeaders(raw=list(first.headers))
        headers["content-length"] = str(len(body))
        await reply.add(replace(first, body=body, headers=tuple(headers.raw)))


class _Reply:
    """The response to the client, over one or more attempts."""

    def __init__(self, path: str, send: Send) -> None:
        self._path, self._send = path, send
        self._start: tuple[int | None, bytes] | None = None  # status and type, once sent
        self.has_output = False

    async def add(self, part: HttpPart) -> None:
        """The start of a second attempt continues the response of the first one."""
        if part.status is not None:
            await self._begin(part)
        self.has_output |= part.is_last or not _is_comment(part.body)
        await self._body(part.body, is_last=part.is_last)

    async def _begin(self, part: HttpPart) -> None:
        start = part.status, _content_type(part.headers)
        if self._start is None:
            self._start = start
            # the proxy of Ray adds the id of the request itself
            headers = [header for header in part.headers if header[0] != _REQUEST_ID]
            start_message = {"status": part.status, "headers": headers}
            await self._send({"type": "http.response.start"} | start_message)
        elif start != self._start:
            self.has_output = True  # no third attempt
            raise ReplicaLost(f"the repeated request was refused with status {part.status}")

    async def fail(self, error: ReplicaLost) -> None:
        """End the response with an error: as a whole response, or as an event of a stream."""
        if self._start is None:
            await self.add(_part_of(refusal_response(error, self._path)))
        elif self._start[1].startswith(b"text/event-stream"):
            await self._body(error_events(error, self._path), is_last=True)
        else:
            raise error

    async def _body(self, body: bytes, *, is_last: bool) -> None:
        message = {"type": "http.response.body", "body": body, "more_body": not is_last}
        await self._send(message)


def guarded(gateway: Gateway, max_body_bytes: int) -> ASGIApp:
    """A gateway that refuses large headers and bodies before it reads them."""
    return BodyLimit(gateway, max_body_bytes)


def _call_of(scope: Scope) -> HttpCall:
    headers: Headers = tuple((bytes(name), bytes(value)) for name, value in scope["headers"])
    if not any(name == _REQUEST_ID for name, _ in headers):  # equal in all attempts
        headers = (*headers, (_REQUEST_ID, new_request_id().encode()))
    client = scope.get("client")
    call = HttpCall(
        method=scope["method"],
        path=scope["path"],
        raw_path=scope.get("raw_path") or scope["path"].encode(),
        query_string=scope.get("query_string", b""),
        scheme=scope.get("scheme", "http"),
        headers=headers,
        body=b"",
        client=None if client is None else (client[0], client[1]),
    )
    return replace(call, replica_id=call.header(REPLICA_HEADER))


async def _body(receive: Receive) -> bytes | None:
    """The body of a request; None if the client disconnects."""
    body = bytearray()
    while (message := await receive())["type"] == "http.request":
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(body)
    return None


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _run_lifespan(receive: Receive, send: Send) -> None:
    while True:
        message: Message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


def _plain_metrics(call: HttpCall) -> HttpCall:
    """A request for metrics in the text format, which `merged_metrics` reads."""
    others = (header for header in call.headers if header[0] != b"accept")
    return replace(call, headers=(*others, (b"accept", b"text/plain")))


def _is_comment(body: bytes) -> bool:
    return all(line.startswith(b":") or not line for line in body.split(b"\n"))


def _content_type(headers: Headers) -> bytes:
    found = (value for name, value in headers if name.lower() == b"content-type")
    return next(found, b"")


def _part_of(response: Response) -> HttpPart:
    return HttpPart(
        body=bytes(response.body),
        is_last=True,
        status=response.status_code,
        headers=tuple(response.raw_headers),
    )
