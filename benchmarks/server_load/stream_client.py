"""A client of streamed completions on a plain socket: thousands of them cost little."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from time import perf_counter

DONE = "[DONE]"
_REFUSED = (429, 503)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientPlan:
    """What one client sends.

    Attributes:
        body: JSON body of the request.
        starts_s: seconds after the start of the round.
        leaves_after: number of events after which the client disconnects; None: it stays.
    """

    body: dict[str, object]
    starts_s: float
    leaves_after: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientResult:
    """What one client received.

    Attributes:
        outcome: finished, disconnected (by the client), refused (status 429 or 503), or lost.
        status: HTTP status; 0: no response.
        tokens: tokens of the usage, or events if the client disconnected.
        ttft_s: seconds from sending the request to the first event; None: no event.
        e2e_s: seconds from sending the request to the last event.
        problem: description of a lost request.
    """

    outcome: str
    status: int = 0
    tokens: int = 0
    ttft_s: float | None = None
    e2e_s: float = 0.0
    problem: str = ""


async def run_client(
    host: str, port: int, plan: ClientPlan, zero_s: float, patience_s: float
) -> ClientResult:
    """Send the request, read its stream, and disconnect when the plan says so."""
    await asyncio.sleep(max(0.0, zero_s + plan.starts_s - perf_counter()))
    try:
        return await asyncio.wait_for(_streamed(host, port, plan), patience_s)
    except TimeoutError:
        return ClientResult(outcome="lost", problem=f"no end within {patience_s:g} s")
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        return ClientResult(outcome="lost", problem=f"{type(error).__name__}: {error}")


async def _streamed(host: str, port: int, plan: ClientPlan) -> ClientResult:
    sent_s = perf_counter()
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(_request(host, port, plan.body))
        await writer.drain()
        status = await _status(reader)
        if status != 200:
            outcome = "refused" if status in _REFUSED else "lost"
            return ClientResult(outcome=outcome, status=status, problem=f"status {status}")
        return await _read_stream(reader, plan, sent_s)
    finally:
        writer.close()


def _request(host: str, port: int, body: dict[str, object]) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def _status(reader: asyncio.StreamReader) -> int:
    head = await reader.readuntil(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1])


async def _read_stream(
    reader: asyncio.StreamReader, plan: ClientPlan, sent_s: float
) -> ClientResult:
    ttft_s, tokens, num_events, ends = None, 0, 0, False
    async for event in _events(reader):
        if event == DONE:
            ends = True
            break
        num_events += 1
        if ttft_s is None:
            ttft_s = perf_counter() - sent_s
        found = json.loads(event)
        if "error" in found:
            return ClientResult(outcome="lost", status=200, problem=str(found["error"]))
        tokens = (found.get("usage") or {}).get("completion_tokens", tokens)
        if num_events == plan.leaves_after:
            return ClientResult(outcome="disconnected", status=200, tokens=tokens, ttft_s=ttft_s)
    e2e_s = perf_counter() - sent_s
    expected = plan.body["max_tokens"]
    if not ends or tokens != expected:
        problem = f"{tokens} of {expected} tokens, {'' if ends else 'no '}[DONE]"
        return ClientResult(outcome="lost", status=200, problem=problem)
    return ClientResult(outcome="finished", status=200, tokens=tokens, ttft_s=ttft_s, e2e_s=e2e_s)


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[str]:
    """Data of the events of a chunked response: the server sends each event in one chunk."""
    while line := await reader.readline():
        if line.startswith(b"data: "):
            yield line[6:].decode().strip()
