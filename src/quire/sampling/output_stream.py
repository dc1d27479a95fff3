"""Asyncio stream of the outputs of an engine that runs in another thread."""

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from quire.config.generation_request import GenerationRequest, token_ids_of
from quire.errors import QuireError
from quire.sampling.outputs import OutputBuilder, OutputDelta, RequestOutput


class OutputStream:
    """Stream of the deltas of requests that were accepted together.

    Iterate over it in the event loop that submitted the requests. It ends after the last delta of
    every request. Call `cancel` to stop earlier.

    Attributes:
        requests: the requests, with prompts as token ids.
        request_ids: one id per request, in the same order.
        wake_interval: number of tokens after which a waiting reader is woken; the first and the
            last delta of each completion wake it at once. It then finds all deltas in `ready`.
    """

    def __init__(
        self, requests: Sequence[GenerationRequest], on_cancel: "Callable[[OutputStream], None]"
    ) -> None:
        self.requests = tuple(requests)
        self.request_ids: tuple[str, ...] = ()
        self.wake_interval = 1
        self._on_cancel = on_cancel
        self._loop = asyncio.get_running_loop()
        self._items: deque[OutputDelta | QuireError] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._num_open = 0
        self._num_unseen = 0  # tokens since the reader was woken
        self._begun: set[tuple[str, int]] = set()

    def __aiter__(self) -> "OutputStream":
        return self

    async def __anext__(self) -> OutputDelta:
        """Return the next delta of any of the requests.

        Raises:
            QuireError: the requests were ended, and the outputs are incomplete; `EngineDead` if
                the engine has stopped.
        """
        if not self._num_open:
            raise StopAsyncIteration
        if not self._items:
            await self._wait()
        return self._next()

    @property
    def has_ended(self) -> bool:
        """Whether the last delta of every request has been returned."""
        return not self._num_open

    def ready(self) -> Iterator[OutputDelta]:
        """Yield the deltas that have arrived, without waiting for others.

        Raises:
            QuireError: the requests were ended, and the outputs are incomplete; `EngineDead` if
                the engine has stopped.
        """
        while self._items:
            yield self._next()

    def _next(self) -> OutputDelta:
        item = self._items.popleft()
        if isinstance(item, QuireError):
            self._num_open = 0
            raise item
        self._num_open -= item.is_last
        return item

    async def _wait(self) -> None:
        while not self._items:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    async def collect(self) -> list[RequestOutput]:
        """Wait for all outputs and return them in the order of the requests.

        The reader is woken by the first and the last delta of each completion only.

        Raises:
            QuireError: the requests were ended; `EngineDead` if the engine has stopped.
        """
        builders = {
            request_id: OutputBuilder(request_id, token_ids_of(request), request)
            for request_id, request in zip(self.request_ids, self.requests, strict=True)
        }
        outputs: dict[str, RequestOutput] = {}
        self.wake_interval = sys.maxsize
        async for delta in self:
            output = builders[delta.request_id].add(delta)
            if output is not None:
                outputs[delta.request_id] = output
        return [outputs[request_id] for request_id in self.request_ids]

    def cancel(self) -> None:
        """Cancel unfinished requests; their last deltas have finish_reason "abort"."""
        if self._num_open:
            self._on_cancel(self)

    # ---- for the engine's thread ---------------------------------------------------------------

    def accept(self, request_ids: Sequence[str]) -> None:
        self.request_ids = tuple(request_ids)
        self._num_open = len(self.request_ids)

    def put(self, item: OutputDelta | QuireError) -> bool:
        """Pass an item to the event loop; False if the loop is closed."""
        return not put_all([(self, item)])

    def receive(self, item: OutputDelta | QuireError) -> None:
        self._items.append(item)
        if not self._must_wake(item):
            return
        self._num_unseen = 0
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _must_wake(self, item: OutputDelta | QuireError) -> bool:
        if self.wake_interval == 1 or isinstance(item, QuireError):
            return True
        self._num_unseen += len(item.token_ids)
        key = (item.request_id, item.index)
        is_first = key not in self._begun
        self._begun.add(key)
        return is_first or item.finish_reason is not None or self._num_unseen >= self.wake_interval

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop


Addressed = tuple[OutputStream, OutputDelta | QuireError]


def put_all(items: Iterable[Addressed]) -> set[OutputStream]:
    """Pass items to the event loops of their streams; return the streams whose loop is closed.

    A call from another thread wakes the loop, which costs more than the items of a step. So each
    loop is called once.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[Addressed]] = {}
    for item in items:
        by_loop.setdefault(item[0].loop, []).append(item)
    closed: set[OutputStream] = set()
    for loop, own in by_loop.items():
        try:
            loop.call_soon_threadsafe(_receive, own)
        except RuntimeError:
            if not loop.is_closed():
                raise
            closed.update(stream for stream, _ in own)
    return closed


def _receive(items: Sequence[Addressed]) -> None:
    for stream, item in items:
        stream.receive(item)
