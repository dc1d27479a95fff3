"""Streams requests of token ids to a server at once, and times the events of each response."""

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from benchmarks.serve.connection import Connections, ServerError
from quire.errors import RequestError

_OK = 200


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The response to one request.

    Attributes:
        start_s: time when it was sent; times are those of `time.perf_counter`.
        first_s: time of the first event with text.
        end_s: time of the last event.
        output_tokens: tokens by the server's usage.
        text: the output.
    """

    start_s: float
    first_s: float = 0.0
    end_s: float = 0.0
    output_tokens: int = 0
    text: str = ""

    @property
    def ttft_s(self) -> float:
        """Seconds from sending to the first token."""
        return self.first_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Outcomes in the order of the requests, and the seconds from the first to the last event."""

    outcomes: tuple[Outcome, ...]
    duration_s: float


@dataclass(slots=True)
class EventReader:
    """Splits a stream of server-sent events into the JSON of each event."""

    rest: bytes = field(default=b"")

    def add(self, data: bytes) -> Iterator[str]:
        """Yield the contents of the events that this segment completes."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode()


def read_stream(segments: Iterable[tuple[float, bytes]], outcome: Outcome) -> None:
    """Read a streamed response of /v1/completions.

    Args:
        segments: parts of the body with the times of their arrival.
        outcome: receives times, text and tokens.

    Raises:
        RequestError: the stream ends with an error, or has no usage.
    """
    reader = EventReader()
    for now_s, segment in segments:
        outcome.end_s = now_s
        for content in reader.add(segment):
            chunk = {} if content == "[DONE]" else json.loads(content)
            if chunk.get("error"):
                raise RequestError(f"a request of the server failed: {chunk['error']}")
            if chunk.get("usage"):
                outcome.output_tokens = chunk["usage"]["completion_tokens"]
            text = "".join(choice["text"] for choice in chunk.get("choices", ()))
            outcome.first_s = outcome.first_s or (now_s if text else 0.0)
            outcome.text += text
    if not outcome.output_tokens:
        raise RequestError("a response of the server has no usage")


def stream_all(url: str, prompts: Sequence[Sequence[int]], output_tokens: int) -> Run:
    """Send all prompts at once to /v1/completions, greedy and with full length.

    Raises:
        RequestError: a request failed.
    """
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_stream_all(url, prompts, output_tokens))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Event loop of uvloop if it is installed: the client runs on the cores of the server."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _stream_all(url: str, prompts: Sequence[Sequence[int]], output_tokens: int) -> Run:
    connections = Connections(urlsplit(url))
    sampling = {"max_tokens": output_tokens, "temperature": 0.0, "ignore_eos": True}
    body = {**sampling, "stream": True, "stream_options": {"include_usage": True}}

    async def one(prompt: Sequence[int]) -> Outcome:
        data = json.dumps(body | {"prompt": list(prompt)}).encode()
        outcome = Outcome(start_s=time.perf_counter())
        async with connections.connection() as connection:
            reply = await connection.exchange(
                "POST", "/v1/completions", {"content-type": "application/json"}, data
            )
        if reply.status != _OK:
            raise RequestError(f"a request of the server failed: {reply.body.decode()}")
        read_stream(reply.segments, outcome)
        return outcome

    try:
        outcomes = await asyncio.gather(*map(one, prompts))
    except ServerError as error:
        raise RequestError(f"a request of the server failed: {error}") from error
    finally:
        connections.close()
    start_s = min(outcome.start_s for outcome in outcomes)
    return Run(outcomes=tuple(outcomes), duration_s=max(o.end_s for o in outcomes) - start_s)
