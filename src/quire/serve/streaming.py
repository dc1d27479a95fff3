"""Sends outputs to the client: as one response, or streamed as server-sent events."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from quire.config.structured_outputs import FIELD
from quire.errors import QuireError, RequestError
from quire.sampling.grammar_matcher import TOO_LARGE
from quire.sampling.output_stream import OutputStream
from quire.sampling.outputs import OutputDelta, RequestOutput, Usage, joined
from quire.sampling.sampler import NO_TOKEN_LEFT
from quire.serve.errors import Format, PlainFormat, RequestFailed, error_body, one_line
from quire.serve.logprobs import prompt_logprobs
from quire.serve.protocol import StreamOptions
from quire.serve.responses import Envelope, Writer, token_counts, usage_body
from quire.serve.submission import Submission

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # no buffering in proxies


class _Events(StreamingResponse):
    """A streamed response that cancels its requests when sending ends, for any reason."""

    def __init__(self, events: AsyncIterator[str], response: "GenerationResponse") -> None:
        super().__init__(events, media_type="text/event-stream", headers=_HEADERS)
        self._response = response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        alive = _KeptAlive(send, self._response.keep_alive_s)
        try:
            await super().__call__(scope, receive, alive)
        finally:
            alive.stop()
            self._response.end()


class _KeptAlive:
    """Sends a comment whenever a stream has sent nothing for some time."""

    def __init__(self, send: Send, interval_s: float) -> None:
        self._send, self._interval_s = send, interval_s
        self._last_s = 0.0
        self._task: asyncio.Task[None] | None = None

    async def __call__(self, message: Message) -> None:
        await self._send(message)
        self._last_s = asyncio.get_running_loop().time()
        if message["type"] == "http.response.start" and self._interval_s:
            self._task = asyncio.create_task(self._comment())
        elif not message.get("more_body", True):
            self.stop()

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _comment(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            left_s = self._last_s + self._interval_s - loop.time()
            if left_s > 0:
                await asyncio.sleep(left_s)
                continue
            self._last_s = loop.time()
            comment = {"type": "http.response.body", "body": b": keep-alive\n\n", "more_body": True}
            await self._send(comment)


@dataclass(slots=True, kw_only=True)
class GenerationResponse:
    """The response of one HTTP request. Its requests are cancelled if the client disconnects."""

    submission: Submission
    writers: Sequence[Writer]
    envelope: Envelope
    choices_per_prompt: int  # the choices of a prompt are consecutive
    options: StreamOptions
    interval: int = 1  # tokens of an event, except the first and the last one
    keep_alive_s: float = 0.0  # between comments in a stream without output; 0: none
    scores_prompt: bool = False  # whether the body of a chat contains the scores of the prompt
    form: Format = field(default_factory=PlainFormat)
    _usages: dict[str, Usage] = field(default_factory=dict)
    _num_tokens: int = 0
    _cached_tokens: int = 0

    async def whole(self, request: Request) -> Response:
        try:
            outputs = await collected(self.submission.outputs, request)
            self._num_tokens = sum(output.usage.completion_tokens for output in outputs)
        finally:
            self.end()
        choices = [
            self._writers_of(number)[choice.index].whole(output, choice)
            for number, output in enumerate(outputs)
            for choice in output.choices
        ]
        usage = usage_body([output.usage for output in outputs])
        body = self.envelope.body(choices, usage)
        if self.scores_prompt:
            scores = outputs[0].prompt_logprobs or ()
            body["prompt_logprobs"] = prompt_logprobs(self.writers[0].pieces, scores)
        return Response(one_line(self.form.whole(body)), media_type="application/json")

    def streamed(self) -> StreamingResponse:
        self.submission.outputs.wake_interval = self.interval
        return _Events(self._events(), self)

    def end(self) -> None:
        """Cancel requests that have not ended, and return tokens that were not generated."""
        self.submission.settle(self._num_tokens)

    async def _events(self) -> AsyncIterator[str]:
        """Yield the events; those that are ready at once are one text, which is sent once."""
        form, outputs, texts = self.form, self.submission.outputs, list[str]()
        writers = {
            request_id: self._writers_of(number)
            for number, request_id in enumerate(outputs.request_ids)
        }
        try:
            async for delta in outputs:
                texts += self._texts(writers, [delta, *outputs.ready()])
                if texts and not outputs.has_ended:
                    yield "".join(texts)
                    texts.clear()
            if self.options.include_usage or form.needs_usage:
                in_order = [self._usages[name] for name in self.submission.outputs.request_ids]
                texts += form.chunk(self.envelope.chunk_body([], usage_body(in_order)))
        except QuireError as error:
            texts += form.error(error_body(error))
        yield "".join([*texts, *form.end()])

    def _texts(
        self, writers: Mapping[str, Sequence[Writer]], deltas: Sequence[OutputDelta]
    ) -> Iterator[str]:
        """Yield the events of deltas; with an interval one of each completion."""
        if self.interval > 1 and len(deltas) > 1:
            deltas = list(joined(deltas))
        for delta in deltas:
            self._count(delta)
            for choice in writers[delta.request_id][delta.index].chunks(delta):
                yield from self.form.chunk(self.envelope.chunk_body([choice], self._usage_so_far()))

    def _count(self, delta: OutputDelta) -> None:
        _raise_if_failed(delta.error)
        self._num_tokens += len(delta.token_ids)
        self._cached_tokens = max(self._cached_tokens, delta.cached_tokens or 0)
        if delta.usage is not None:
            self._usages[delta.request_id] = delta.usage

    def _usage_so_far(self) -> dict[str, object] | None:
        if not (self.options.continuous_usage_stats or self.form.needs_prompt_usage):
            return None
        prompt_tokens = sum(len(request.prompt) for request in self.submission.outputs.requests)
        counts = token_counts(prompt_tokens, self._num_tokens)
        if self.form.needs_prompt_usage:  # of APIs with one prompt and one choice
            counts["prompt_tokens_details"] = {"cached_tokens": self._cached_tokens}
        return counts

    def _writers_of(self, prompt: int) -> Sequence[Writer]:
        first = prompt * self.choices_per_prompt
        return self.writers[first : first + self.choices_per_prompt]


async def collected(outputs: OutputStream, request: Request) -> list[RequestOutput]:
    """Wait for all outputs; they are cancelled if the client disconnects."""
    watcher = asyncio.create_task(_cancel_on_disconnect(outputs, request))
    try:
        found = await outputs.collect()
    finally:
        watcher.cancel()
    for output in found:
        _raise_if_failed(output.error)
    return found


async def _cancel_on_disconnect(outputs: OutputStream, request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    outputs.cancel()


def _raise_if_failed(error: str | None) -> None:
    if error is None:
        return
    # an error of the request's own options is the client's, although it appears during generation
    if error.startswith(TOO_LARGE):
        raise RequestError(error, param=FIELD)
    raise RequestError(error) if error == NO_TOKEN_LEFT else RequestFailed(error)
