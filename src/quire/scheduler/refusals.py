"""Who was refused, and as things stood then: nobody asks twice while nothing has changed."""

from quire.scheduler.request import Request
from quire.scheduler.sequence_memory import SequenceMemory
from quire.tenancy.fair_queue import FairQueue


class Refusals:
    """Waiting requests that found no room.

    Args:
        sequence_memory: the memory.
        running: those that are in; the scheduler's own list.
        waiting: the queue.
    """

    def __init__(
        self, sequence_memory: SequenceMemory, running: list[Request], waiting: FairQueue[Request]
    ) -> None:
        self._sequence_memory, self._running, self._waiting = sequence_memory, running, waiting
        self._refused: dict[Request, tuple[int, int]] = {}

    @property
    def _state(self) -> tuple[int, int]:
        return self._sequence_memory.sharing.available_bytes, len(self._running)

    def hold(self, request: Request) -> bool:
        """Whether it was refused as things stand."""
        return self._refused.get(request) == self._state

    def __contains__(self, request: Request) -> bool:
        return request in self._refused

    def note(self, request: Request) -> None:
        """It has been refused."""
        if len(self._refused) > len(self._waiting):  # some have gone by another way
            self._refused = {r: s for r, s in self._refused.items() if r in self._waiting}
        self._refused[request] = self._state

    def forget(self, request: Request) -> None:
        """It is tried again."""
        self._refused.pop(request, None)
