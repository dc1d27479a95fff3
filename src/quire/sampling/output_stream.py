"""Asyncio stream of the outputs of an engine that runs in another thread."""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from quire.config.generation_request import GenerationRequest, token_ids_of
from quire.errors import EngineDead
from quire.sampling.outputs import OutputBuilder, OutputDelta, RequestOutput


class OutputStream:
    """Stream of the deltas of requests that were accepted together.

    Iterate over it in the event loop that submitted the requests. It ends after the last delta of
    every request. Call `cancel` to stop earlier.

    Attributes:
        requests: the requests, with prompts as token ids.
        request_ids: one id per request, in the same order.
    """

    def __init__(
        self, requests: Sequence[GenerationRequest], on_cancel: "Callable[[OutputStream], None]"
    ) -> None:
        self.requests = tuple(requests)
        self.request_ids: tuple[str, ...] = ()
        self._on_cancel = on_cancel
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[OutputDelta | EngineDead] = asyncio.Queue()
        self._num_open = 0

    def __aiter__(self) -> "OutputStream":
        return self

    async def __anext__(self) -> OutputDelta:
        """Return the next delta of any of the requests.

        Raises:
            EngineDead: the engine has stopped; the outputs are incomplete.
        """
        if not self._num_open:
            raise StopAsyncIteration
        item = await self._items.get()
        if isinstance(item, EngineDead):
            self._num_open = 0
            raise item
        self._num_open -= item.is_last
        return item

    async def collect(self) -> list[RequestOutput]:
        """Wait for all outputs and return them in the order of the requests.

        Raises:
            EngineDead: the engine has stopped.
        """
        builders = {
            request_id: OutputBuilder(request_id, token_ids_of(request), request)
            for request_id, request in zip(self.request_ids, self.requests, strict=True)
        }
        outputs: dict[str, RequestOutput] = {}
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
        """Record the ids of the requests, which the engine has accepted."""
        self.request_ids = tuple(request_ids)
        self._num_open = len(self.request_ids)

    def put(self, item: OutputDelta | EngineDead) -> bool:
        """Pass an item to the event loop; False if the loop is closed."""
        return not put_all([(self, item)])

    def receive(self, item: OutputDelta | EngineDead) -> None:
        """Add an item, in the event loop."""
        self._items.put_nowait(item)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that submitted the requests."""
        return self._loop


Addressed = tuple[OutputStream, OutputDelta | EngineDead]


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
