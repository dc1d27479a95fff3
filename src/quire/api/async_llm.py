"""Asyncio entry point: the engine's step loop in a thread, outputs through asyncio queues."""

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar, Unpack, runtime_checkable

from quire.api.llm import (
    Command,
    Conversation,
    as_conversations,
    as_requests,
    as_token_ids,
    structures_of,
)
from quire.config.generation_request import GenerationRequest, Prompt, RequestOptions
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.engine.ledger import Snapshot
from quire.engine.stats import EngineStats
from quire.errors import ConfigError, EngineDead, QueueFull, QuireError, RequestError
from quire.models.chat_template import NO_KWARGS, ChatTemplate
from quire.models.tokenizer import encode_prompt
from quire.sampling.output_stream import OutputStream, put_all
from quire.sampling.outputs import OutputDelta, RequestOutput
from quire.scheduler.events import KINDS, KVEvent


@runtime_checkable
class StepObserver(Protocol):
    """Called by `AsyncLLM`, in the engine's thread. Steps wait for it."""

    def submitted(self, request_id: str, request: GenerationRequest) -> None:
        """Observe a request that the engine has accepted."""

    def published(self, deltas: Sequence[OutputDelta]) -> None:
        """Observe the outputs of a step."""


_MAX_RETRY_S = 60.0
_UNKNOWN_RETRY_S = 2.0
"""Time to wait before the first request has ended."""
_RATE_OVER = 64
"""Steps with ended requests from which the rate is computed."""


class ServedRate:
    """Rate of ended requests over the last steps that ended requests; idle time does not count."""

    def __init__(self) -> None:
        self._busy_s = 0.0
        self._ended = deque([(0.0, 0)], maxlen=_RATE_OVER)  # busy time after a step, and number

    def add(self, step_s: float, num_ended: int) -> None:
        self._busy_s += step_s
        if num_ended:
            self._ended.append((self._busy_s, num_ended))

    @property
    def per_s(self) -> float:
        """Requests that end per second; 0 before the first one."""
        (start_s, _), *later = self._ended
        elapsed_s = self._busy_s - start_s
        return sum(number for _, number in later) / elapsed_s if elapsed_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimit:
    """Most requests that may wait."""

    requests: int | None = None  # None: no limit
    tokens: int | None = None  # of prompts; None: no limit

    def check(self, engine: Engine, served_per_s: float) -> None:
        """Refuse new requests while the limit is reached; 0 requests per second are unknown."""
        scheduler = engine.scheduler
        waiting = scheduler.num_waiting
        if self.requests is not None and waiting >= self.requests:
            raise QueueFull(
                f"{waiting:,} requests are waiting, the limit is {self.requests:,}: try again "
                "later",
                retry_after_s=_wait_s(waiting, served_per_s),
            )
        if self.tokens is None or not waiting:
            return
        tokens = sum(len(request.prompt_token_ids) for request in scheduler.waiting.ordered())
        if tokens >= self.tokens:
            raise QueueFull(
                f"the prompts of waiting requests have {tokens:,} tokens, the limit is "
                f"{self.tokens:,}: try again later",
                retry_after_s=_wait_s(waiting, served_per_s),
            )


def _wait_s(waiting: int, served_per_s: float) -> float:
    """Time in which the waiting requests are served at the present rate, from 1 to 60 s."""
    expected_s = waiting / served_per_s if served_per_s > 0 else _UNKNOWN_RETRY_S
    return min(max(1.0, expected_s), _MAX_RETRY_S)


T = TypeVar("T")

logger = logging.getLogger(__name__)


class AsyncLLM:
    """Runs an engine in its own thread; only that thread uses the engine.

    Use it as an async context manager, or call `close`.

    Args:
        engine: an idle engine; do not use it elsewhere until this object is closed.
        queue_limit: limit of waiting requests; default: no limit.
        observer: is told of accepted requests and of the outputs of every step.

    Raises:
        ConfigError: the engine is part of a shared pool, or another `AsyncLLM` runs it.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        queue_limit: QueueLimit | None = None,
        observer: StepObserver | None = None,
    ) -> None:
        if engine.shares_pool:
            raise ConfigError(
                "expected an engine with its own KV memory, got one of a shared pool: the engines "
                "of a pool are stepped in one thread"
            )
        if engine.runs_in_thread:
            raise ConfigError(
                "the engine runs in the thread of another AsyncLLM: submit there, or close it first"
            )
        self.engine = engine
        engine.enter_thread()
        self._queue_limit = queue_limit or QueueLimit()
        self._observer = observer
        self._served = ServedRate()
        self._commands: queue.SimpleQueue[Command[None]] = queue.SimpleQueue()
        self._streams: dict[str, OutputStream] = {}  # by request id; only in the engine's thread
        self._refusal: Callable[[], QuireError] | None = None  # of requests after `end_requests`
        self._state = threading.Lock()  # guards the next three, so that no command comes too late
        self._closing = False
        self._ended = False
        self._error: BaseException | None = None
        self._close_lock = threading.Lock()
        self._has_closed = False
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether requests are accepted and steps run."""
        return not self._closing and not self._ended

    @property
    def num_open(self) -> int:
        """Number of requests that run or wait."""
        return len(self._streams)

    def num_open_of(self, tenant: str) -> int:
        """Number of requests of a tenant that run or wait."""
        streams = self._streams.copy().values()  # the engine's thread changes the dictionary
        return sum(stream.requests[0].tenant == tenant for stream in streams)

    @property
    def has_failed(self) -> bool:
        """Whether the step loop has ended by an error."""
        return self._error is not None

    async def submit(self, requests: Sequence[GenerationRequest]) -> OutputStream:
        """Submit requests, all or none; return once the engine has accepted them.

        Args:
            requests: requests whose prompts are token ids.

        Raises:
            RequestError: the engine refused one of the requests; none runs.
            QueueFull: too many requests are waiting; see `QueueLimit`.
            QuireError: the error of `end_requests`, after that call.
            EngineDead: the engine has stopped.
        """
        stream = OutputStream(requests, self._cancel)
        compiler = self.engine.input_processor.grammars
        wanted = structures_of(requests)  # compiled outside of the event loop and the engine
        grammars = [await asyncio.to_thread(compiler.compile, structure) for structure in wanted]
        try:
            await self._call(partial(self._submit, stream))
        except asyncio.CancelledError:
            self._cancel(stream)  # runs after the submission, which may be queued still
            raise
        finally:
            del grammars  # until now, so that the engine's thread finds them
        return stream

    async def stream(
        self,
        prompt: Prompt | GenerationRequest,
        sampling: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncIterator[OutputDelta]:
        """Submit a request and yield its deltas. Closing the iterator cancels the request.

        After an early exit from the loop, Python closes the iterator when it is garbage collected.
        Wrap it in `contextlib.aclosing` to close it at once.

        Args:
            prompt: a string, a list of token ids, or a `GenerationRequest`.
            sampling: sampling options; default: `SamplingParams()`.
            options: priority, deadline_s, tenant, cache_salt, evict, record_evictions and
                request_id; see `GenerationRequest`.

        Raises:
            RequestError: the engine refused the request.
            EngineDead: the engine has stopped.
        """
        stream = await self.submit([await self._request(prompt, sampling, options)])
        try:
            async for delta in stream:
                yield delta
        finally:
            stream.cancel()

    async def generate(
        self,
        prompt: Prompt | GenerationRequest,
        sampling: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        """Submit a request and wait for its complete output; see `stream`."""
        stream = await self.submit([await self._request(prompt, sampling, options)])
        try:
            return (await stream.collect())[0]
        finally:
            stream.cancel()

    async def chat(
        self,
        messages: Conversation,
        sampling: SamplingParams | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] = NO_KWARGS,
        content_format: str = "auto",
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        """Submit a conversation and wait for its next message; see `LLM.chat`.

        Args:
            messages: one conversation.
            sampling: sampling options; default: `SamplingParams()`.
            add_generation_prompt: for this and the next three see `ChatOptions`.
            continue_final_message: end with the text of the last message.
            tools: definitions of tools.
            template_kwargs: further variables of the template.
            content_format: see `ChatTemplate`.
            options: see `stream`.

        Raises:
            RequestError: invalid messages, or the engine refused the request.
            EngineDead: the engine has stopped.
        """
        conversations = as_conversations(messages)
        if len(conversations) != 1:
            raise RequestError(
                f"expected one conversation, got {len(conversations)}: call chat for each, and "
                "gather the results"
            )
        template = ChatTemplate(self.engine.model.require_tokenizer(), content_format)
        encode = partial(
            template.encode,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
        )
        return await self.generate(
            await asyncio.to_thread(encode, conversations[0]), sampling, **options
        )

    async def _request(
        self,
        prompt: Prompt | GenerationRequest,
        sampling: SamplingParams | None,
        options: RequestOptions,
    ) -> GenerationRequest:
        """Create the request with token ids; texts are tokenized outside of the event loop."""
        [request] = as_requests([prompt], sampling, options)
        if not isinstance(request.prompt, str):
            return replace(request, prompt=as_token_ids(request.prompt))
        ids = await asyncio.to_thread(
            encode_prompt, self.engine.model.require_tokenizer(), request.prompt
        )
        return replace(request, prompt=ids)

    async def stats(self) -> EngineStats:
        """Return the engine's statistics, read between two steps.

        Raises:
            EngineDead: the engine has stopped.
        """
        return await self._call(self.engine.stats)

    async def ledger(self) -> Snapshot:
        """Return the owners of all KV bytes, read between two steps; see `LLM.ledger`.

        Raises:
            EngineDead: the engine has stopped.
        """
        return await self._call(self.engine.ledger)

    async def events(
        self, kinds: Iterable[str] = KINDS, *, since: int = 0, most: int | None = None
    ) -> list[KVEvent]:
        """Return the newest KV events, read between two steps; see `EventLog.newest`.

        Raises:
            UnknownName: an unknown kind of event.
            EngineDead: the engine has stopped.
        """
        return await self._call(partial(self.engine.events.newest, kinds, since=since, most=most))

    async def inspect(self, read: Callable[[Engine], T]) -> T:
        """Call a function with the engine between two steps, in its thread; return its result.

        Args:
            read: changes nothing and returns quickly: steps wait for it.

        Raises:
            EngineDead: the engine has stopped.
        """
        return await self._call(partial(read, self.engine))

    async def end_requests(self, error: Callable[[], QuireError]) -> None:
        """End all open requests with an error, and refuse later ones with it.

        Args:
            error: creates the error for one stream.

        Raises:
            EngineDead: the engine has stopped.
        """
        await self._call(partial(self._end_requests, error))

    def close(self) -> None:
        """Stop after the current step and leave the engine idle; open requests get `EngineDead`.

        Cached prefixes are written to their tier, if there is one. Later calls that need the engine
        raise `EngineDead`. A second `close` has no effect.
        """
        with self._state:
            self._closing = True
            self._commands.put(Command(lambda: None, Future()))  # wakes an idle loop
        self._thread.join()
        with self._close_lock:  # a second call waits for the first
            if self._has_closed:
                return
            self._has_closed = True
            try:
                self.engine.close()
            finally:
                self.engine.leave_thread()

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    # ---- in the event loop's thread ------------------------------------------------------------

    async def _call(self, work: Callable[[], T]) -> T:
        """Run a function in the engine's thread between two steps, and return its result."""
        command = Command(work, Future())
        with self._state:
            if not self.is_alive:
                raise self._dead()
            self._commands.put(command)  # type: ignore[arg-type]
        return await asyncio.wrap_future(command.future)

    def _cancel(self, stream: OutputStream) -> None:
        with self._state:
            if self.is_alive:
                self._commands.put(Command(partial(self._withdraw, stream), Future()))

    def _dead(self) -> EngineDead:
        if self._error is None:
            return EngineDead("the engine was closed")
        dead = EngineDead(
            f"the engine has stopped after {type(self._error).__name__}: {self._error}; see its "
            "log for the traceback, and restart the engine"
        )
        dead.__cause__ = self._error
        return dead

    # ---- in the engine's thread ----------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._obey(wait=not self.engine.has_work)
                if self.engine.failure is not None:
                    raise self.engine.failure
                if self.engine.has_work:
                    self._step()
            for request_id in self._streams:
                self.engine.cancel(request_id)
            while self.engine.has_work:
                self.engine.step()
        except BaseException as error:  # open requests get it as `EngineDead`
            self._error = error
            logger.critical("the engine has stopped", exc_info=True)
        finally:
            self._end()

    def _step(self) -> None:
        started_s = time.monotonic()
        deltas = self.engine.step()
        self._publish(deltas)
        num_ended = sum(delta.is_last for delta in deltas)
        self._served.add(time.monotonic() - started_s, num_ended)

    def _obey(self, *, wait: bool) -> None:
        """Run all queued commands; with `wait`, wait for the first one."""
        try:
            self._commands.get(block=wait).run()
            while True:
                self._commands.get_nowait().run()
        except queue.Empty:
            return

    def _end_requests(self, error: Callable[[], QuireError]) -> None:
        self._refusal = error
        for request_id in self._streams:
            self.engine.cancel(request_id)
        streams = set(self._streams.values())
        self._streams.clear()
        for stream in streams:
            stream.put(error())

    def _submit(self, stream: OutputStream) -> None:
        if self._refusal is not None:
            raise self._refusal()
        self._queue_limit.check(self.engine, self._served.per_s)
        request_ids: list[str] = []
        try:
            for request in stream.requests:  # on an error the earlier ids are needed
                request_ids.append(self.engine.submit(request))  # noqa: PERF401
        except QuireError:
            for request_id in request_ids:  # the requests before the refused one
                self.engine.cancel(request_id)
            raise
        if self._observer is not None:
            for request_id, request in zip(request_ids, stream.requests, strict=True):
                self._observer.submitted(request_id, request)
        stream.accept(request_ids)
        self._streams.update(dict.fromkeys(request_ids, stream))

    def _withdraw(self, stream: OutputStream) -> None:
        for request_id in stream.request_ids:
            if self._streams.get(request_id) is stream:  # not if finished and the id is reused
                self.engine.cancel(request_id)

    def _publish(self, deltas: Sequence[OutputDelta]) -> None:
        if self._observer is not None:
            self._observer.published(deltas)
        items = []
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is None:
                continue  # cancelled, because a request submitted with it was refused
            if delta.is_last:
                del self._streams[delta.request_id]
            items.append((stream, delta))
        closed = put_all(items)
        for stream, delta in items:
            if stream in closed:
                self.engine.cancel(delta.request_id)

    def _end(self) -> None:
        with self._state:
            self._ended = True
        for stream in set(self._streams.values()):
            stream.put(self._dead())
        self._streams.clear()
        while not self._commands.empty():
            self._commands.get_nowait().refuse(self._dead())
