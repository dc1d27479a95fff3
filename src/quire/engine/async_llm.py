"""Many callers, one engine: the step loop in a thread, answers through asyncio queues."""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from quire.engine.core import Engine
from quire.engine.outputs import Answer, AnswerBuilder, Delta
from quire.engine.sampling_params import SamplingParams
from quire.engine.stats import EngineStats
from quire.errors import QuireError

T = TypeVar("T")

IDLE_WAIT_S = 0.5  # how long the idle loop sleeps at most before it looks around


@dataclass(frozen=True, slots=True)
class _Subscriber:
    loop: asyncio.AbstractEventLoop
    deltas: "asyncio.Queue[Delta | BaseException]"

    def put(self, item: Delta | BaseException) -> None:
        self.loop.call_soon_threadsafe(self.deltas.put_nowait, item)


class EngineDead(QuireError):
    """The step loop has ended by an error; every open request gets this."""


class AsyncLLM:
    """Runs an engine in its own thread. Only that thread touches the engine.

    Args:
        engine: idle, and left to this object.

    Use as an async context manager, or call `close`.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._subscribers: dict[str, _Subscriber] = {}
        self._error: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether requests are still taken and steps still run."""
        return self._error is None and not self._closing

    async def stream(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[Delta]:
        """Submit a request and yield its deltas. Leaving the loop early cancels the request.

        Raises:
            RequestError: the engine refused the request.
            EngineDead: the engine has stopped.
        """
        loop = asyncio.get_running_loop()
        subscriber = _Subscriber(loop, asyncio.Queue())
        submitted: asyncio.Future[str] = loop.create_future()

        def submit() -> None:
            try:
                key = self.engine.submit(
                    prompt_token_ids, params, request_id=request_id, priority=priority
                )
            except QuireError as error:
                loop.call_soon_threadsafe(_fail, submitted, error)
            else:
                self._subscribers[key] = subscriber
                loop.call_soon_threadsafe(_resolve, submitted, key)

        self._command(submit)
        finished = False
        try:
            await submitted
            while not finished:
                item = await subscriber.deltas.get()
                if isinstance(item, BaseException):
                    raise EngineDead("the engine has stopped") from item
                finished = item.finish_reason is not None
                yield item
        finally:
            if not finished:
                submitted.add_done_callback(self._cancel_submitted)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> Answer:
        """Submit a request and wait for its whole answer; see `stream`."""
        builder = AnswerBuilder(request_id or "", tuple(prompt_token_ids))
        answer = None
        async for delta in self.stream(
            prompt_token_ids, params, request_id=request_id, priority=priority
        ):
            answer = builder.add(delta)
        assert answer is not None, "a stream ends with a finish reason"
        return answer

    async def stats(self) -> EngineStats:
        """The engine's numbers, read between two steps."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[EngineStats] = loop.create_future()

        def read() -> None:
            loop.call_soon_threadsafe(_resolve, result, self.engine.stats())

        self._command(read)
        return await result

    def close(self) -> None:
        """Stop the loop after its current step; open requests end as dead."""
        self._closing = True
        self._commands.put(lambda: None)
        self._thread.join()

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    # ---- the engine's thread -------------------------------------------------------------------

    def _command(self, command: Callable[[], None]) -> None:
        if not self.is_alive:
            raise EngineDead("the engine has stopped") from self._error
        self._commands.put(command)

    def _cancel_submitted(self, submitted: "asyncio.Future[str]") -> None:
        if submitted.cancelled() or submitted.exception() is not None or not self.is_alive:
            return
        key = submitted.result()
        self._commands.put(lambda: self.engine.cancel(key))

    def _run(self) -> None:
        try:
            while not self._closing:
                self._obey(wait=not self.engine.has_work)
                if self.engine.has_work:
                    self._publish(self.engine.step())
        except BaseException as error:
            self._error = error
            raise
        finally:
            end = self._error or EngineDead("the engine was closed")
            for subscriber in self._subscribers.values():
                subscriber.put(end)

    def _obey(self, *, wait: bool) -> None:
        try:
            command = (
                self._commands.get(timeout=IDLE_WAIT_S) if wait else self._commands.get_nowait()
            )
            while True:
                command()
                command = self._commands.get_nowait()
        except queue.Empty:
            return

    def _publish(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            subscriber = self._subscribers.get(delta.request_id)
            if delta.finish_reason is not None:
                self._subscribers.pop(delta.request_id, None)
            if subscriber is not None:
                subscriber.put(delta)


def _resolve(future: "asyncio.Future[T]", value: T) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: "asyncio.Future[str]", error: QuireError) -> None:
    if not future.done():
        future.set_exception(error)
