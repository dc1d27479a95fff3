"""Answers of an engine that runs in another thread, as an asyncio loop sees them."""

import asyncio
from collections.abc import Callable, Sequence

from quire.config.generation_request import GenerationRequest, token_ids_of
from quire.errors import EngineDead
from quire.sampling.outputs import OutputBuilder, OutputDelta, RequestOutput


class OutputStream:
    """The deltas of requests that were accepted together, in the order they are made.

    Iterate it in the loop that submitted; it ends when every request has given its last delta.
    Whoever stops before that calls `cancel`.

    Attributes:
        requests: what was asked, prompts as token ids.
        request_ids: one for each request, in their order.
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
        """The next delta of any of the requests.

        Raises:
            EngineDead: the engine has stopped, so the answers stay incomplete.
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
        """Wait for all answers; they come in the order of the requests.

        Raises:
            EngineDead: the engine has stopped.
        """
        builders = {
            request_id: OutputBuilder(request_id, token_ids_of(request), request)
            for request_id, request in zip(self.request_ids, self.requests, strict=True)
        }
        answers: dict[str, RequestOutput] = {}
        async for delta in self:
            answer = builders[delta.request_id].add(delta)
            if answer is not None:
                answers[delta.request_id] = answer
        return [answers[request_id] for request_id in self.request_ids]

    def cancel(self) -> None:
        """End what is still open. Whoever goes on iterating gets last deltas that say "abort"."""
        if self._num_open:
            self._on_cancel(self)

    # ---- for the engine's thread ---------------------------------------------------------------

    def accept(self, request_ids: Sequence[str]) -> None:
        """Note that the engine has taken all requests, under these ids."""
        self.request_ids = tuple(request_ids)
        self._num_open = len(self.request_ids)

    def put(self, item: OutputDelta | EngineDead) -> bool:
        """Hand an item to the loop; False when that loop is gone, and its readers with it."""
        try:
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            return False
        return True
