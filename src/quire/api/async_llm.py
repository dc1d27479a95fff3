"""Many callers, one engine: the step loop in a thread, answers through asyncio queues."""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TypeVar, Unpack

from quire.api.inputs import as_requests, as_token_ids
from quire.api.threads import Command
from quire.config.generation_request import GenerationRequest, Prompt, RequestOptions
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.engine.ledger import Snapshot
from quire.engine.stats import EngineStats
from quire.errors import ConfigError, EngineDead, QuireError, RequestError
from quire.models.tokenizer import encode_prompt
from quire.sampling.output_stream import OutputStream
from quire.sampling.outputs import OutputDelta, RequestOutput
from quire.scheduler.events import KINDS, KVEvent

T = TypeVar("T")

logger = logging.getLogger(__name__)


class AsyncLLM:
    """Runs an engine in its own thread. Only that thread touches the engine.

    Args:
        engine: idle, and left to this object until it is closed.

    Raises:
        ConfigError: the engine shares its pool with others, or another `AsyncLLM` has it.

    Use as an async context manager, or call `close`.
    """

    def __init__(self, engine: Engine) -> None:
        if engine.shares_pool:
            raise ConfigError(
                "an engine of a shared pool is stepped in one thread with the others of the pool; "
                "give an engine with a thread of its own a KV memory of its own"
            )
        if engine.runs_in_thread:
            raise ConfigError(
                "the engine runs in the thread of another AsyncLLM: submit there, or close it first"
            )
        self.engine = engine
        engine.enter_thread()
        self._commands: queue.SimpleQueue[Command[None]] = queue.SimpleQueue()
        self._streams: dict[str, OutputStream] = {}  # by request id; the engine's thread only
        self._state = threading.Lock()  # guards the three below against a last command
        self._closing = False
        self._ended = False
        self._error: BaseException | None = None
        self._leaving = threading.Lock()
        self._has_left = False
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether requests are still taken and steps still run."""
        return not self._closing and not self._ended

    async def submit(self, requests: Sequence[GenerationRequest]) -> OutputStream:
        """Submit requests, all of them or none; return once the engine has accepted them.

        Args:
            requests: their prompts are token ids.

        Raises:
            RequestError: the engine refused one of the requests; none runs.
            EngineDead: the engine has stopped.
        """
        answers = OutputStream(requests, self._cancel)
        try:
            await self._call(partial(self._submit, answers))
        except asyncio.CancelledError:
            self._cancel(answers)  # comes after the submission, whether or not that has run
            raise
        return answers

    async def stream(
        self,
        prompt: Prompt | GenerationRequest,
        sampling: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncIterator[OutputDelta]:
        """Submit a request and yield its deltas. Closing the iterator cancels the request.

        Leaving the loop early closes it as soon as nothing refers to it any more; wrap it in
        `contextlib.aclosing` where that must not wait.

        Args:
            prompt: a string, a list of token ids, or a `GenerationRequest`.
            sampling: options; None takes the defaults.
            options: priority, deadline_s, tenant, cache_salt, evict, record_evictions and
                request_id; `GenerationRequest` explains them.

        Raises:
            RequestError: the engine refused the request.
            EngineDead: the engine has stopped.
        """
        answers = await self.submit([await self._request(prompt, sampling, options)])
        try:
            async for delta in answers:
                yield delta
        finally:
            answers.cancel()

    async def generate(
        self,
        prompt: Prompt | GenerationRequest,
        sampling: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        """Submit a request and wait for its whole answer; see `stream`."""
        answers = await self.submit([await self._request(prompt, sampling, options)])
        try:
            return (await answers.collect())[0]
        finally:
            answers.cancel()

    async def _request(
        self,
        prompt: Prompt | GenerationRequest,
        sampling: SamplingParams | None,
        options: RequestOptions,
    ) -> GenerationRequest:
        """The request, its prompt as token ids: texts are tokenized beside the event loop."""
        [request] = as_requests([prompt], sampling, options)
        if not isinstance(request.prompt, str):
            return replace(request, prompt=as_token_ids(request.prompt))
        model = self.engine.model
        if model.tokenizer is None:
            raise RequestError(f"{model.name} has no tokenizer: give prompts as token ids")
        ids = await asyncio.to_thread(encode_prompt, model.tokenizer, request.prompt)
        return replace(request, prompt=ids)

    async def stats(self) -> EngineStats:
        """The engine's numbers, read between two steps.

        Raises:
            EngineDead: the engine has stopped.
        """
        return await self._call(self.engine.stats)

    async def ledger(self) -> Snapshot:
        """Who holds every byte of KV, read between two steps; see `LLM.ledger`.

        Raises:
            EngineDead: the engine has stopped.
        """
        return await self._call(self.engine.ledger)

    async def events(
        self, kinds: Iterable[str] = KINDS, *, since: int = 0, most: int | None = None
    ) -> list[KVEvent]:
        """The newest KV events, read between two steps; see `EventLog.newest`.

        Raises:
            UnknownName: there is no such kind.
            EngineDead: the engine has stopped.
        """
        return await self._call(partial(self.engine.events.newest, kinds, since=since, most=most))

    def close(self) -> None:
        """Stop after the current step, and leave the engine idle. Open requests end as dead.

        Cached prefixes go to their tier, where there is one. Every call that needs the engine
        raises `EngineDead` from then on; a second `close` changes nothing.
        """
        with self._state:
            self._closing = True
            self._commands.put(Command(lambda: None, Future()))  # wakes an idle loop
        self._thread.join()
        with self._leaving:  # a second call waits for the first, and changes nothing
            if self._has_left:
                return
            self._has_left = True
            try:
                self.engine.close()
            finally:
                self.engine.leave_thread()

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    # ---- from the callers' threads -------------------------------------------------------------

    async def _call(self, work: Callable[[], T]) -> T:
        """Have the engine's thread do something between two steps."""
        command = Command(work, Future())
        with self._state:
            if not self.is_alive:
                raise self._dead()
            self._commands.put(command)  # type: ignore[arg-type]
        return await asyncio.wrap_future(command.future)

    def _cancel(self, answers: OutputStream) -> None:
        with self._state:
            if self.is_alive:
                self._commands.put(Command(partial(self._withdraw, answers), Future()))

    def _dead(self) -> EngineDead:
        if self._error is None:
            return EngineDead("the engine was closed")
        dead = EngineDead(
            f"the engine has stopped after {type(self._error).__name__}: {self._error}; its log "
            "says where, and only a new start brings it back"
        )
        dead.__cause__ = self._error
        return dead

    # ---- the engine's thread -------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._obey(wait=not self.engine.has_work)
                if self.engine.has_work:
                    self._publish(self.engine.step())
            self._leave_idle()
        except BaseException as error:  # open requests get it; nobody waits for this thread
            self._error = error
            logger.critical("the engine has stopped", exc_info=True)
        finally:
            self._end()

    def _obey(self, *, wait: bool) -> None:
        """Run the commands that are there; `wait` for one when there is none."""
        try:
            self._commands.get(block=wait).run()
            while True:
                self._commands.get_nowait().run()
        except queue.Empty:
            return

    def _submit(self, answers: OutputStream) -> None:
        request_ids: list[str] = []
        try:
            for request in answers.requests:  # a refusal leaves the ids of those before it
                request_ids.append(self.engine.submit(request))  # noqa: PERF401
        except QuireError:
            for request_id in request_ids:  # those before the refused one
                self.engine.cancel(request_id)
            raise
        answers.accept(request_ids)
        self._streams.update(dict.fromkeys(request_ids, answers))

    def _withdraw(self, answers: OutputStream) -> None:
        for request_id in answers.request_ids:
            if self._streams.get(request_id) is answers:  # else finished, and the id may be reused
                self.engine.cancel(request_id)

    def _publish(self, deltas: Sequence[OutputDelta]) -> None:
        for delta in deltas:
            answers = self._streams.get(delta.request_id)
            if answers is None:
                continue  # refused together with another
            if delta.is_last:
                del self._streams[delta.request_id]
            if not answers.put(delta):
                self.engine.cancel(delta.request_id)

    def _leave_idle(self) -> None:
        for request_id in self._streams:
            self.engine.cancel(request_id)
        while self.engine.has_work:
            self.engine.step()

    def _end(self) -> None:
        with self._state:
            self._ended = True
        for answers in set(self._streams.values()):
            answers.put(self._dead())
        self._streams.clear()
        while not self._commands.empty():
            self._commands.get_nowait().refuse(self._dead())
