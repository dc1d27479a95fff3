"""Evicts from requests whose first pages may be on the host: for that they come back.

Rules look at slots and slots move, so all of a request's pages must be in the memory. That is once
in as many tokens as an eviction lets be processed, where its front crosses the link at each.
"""

from quire.offload.kv.front_room import FrontRoom
from quire.scheduler.eviction_trace import EvictionEntry
from quire.scheduler.lane_caps import Evicted, Evictor
from quire.scheduler.lane_room import Slots
from quire.scheduler.request import Request


class FrontEvictor:
    """Implements `Evictor` in front of another.

    Args:
        evictor: chooses and moves.
        front_room: has the fronts.
    """

    def __init__(self, evictor: Evictor, front_room: FrontRoom) -> None:
        self._evictor, self._front_room = evictor, front_room

    def evict(
        self, request: Request, keep: Slots, *, least_gain: int | None = None
    ) -> Evicted | None:
        """See `Evictor.evict`."""
        self._front_room.bring_back(request)
        return self._evictor.evict(request, keep, least_gain=least_gain)

    def repeat(self, request: Request, entry: EvictionEntry) -> None:
        """See `Evictor.repeat`."""
        self._front_room.bring_back(request)
        self._evictor.repeat(request, entry)

    def settle(self, request: Request) -> None:
        """See `Evictor.settle`; raises OutOfPages too."""
        self._front_room.bring_back(request)
        self._evictor.settle(request)
