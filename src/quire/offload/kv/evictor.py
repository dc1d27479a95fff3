"""Evicts from requests whose first pages may be on the host: for that they come back.

Rules look at slots and slots move, so all of a request's pages must be in the memory. That is once
in as many tokens as an eviction lets be processed, where its front crosses the link at each.
"""

from quire.scheduler.eviction_trace import EvictionEntry
from quire.scheduler.lane_capacities import Evicted, Evictor
from quire.scheduler.lane_slots import Slots
from quire.scheduler.offload_port import KVOffloader
from quire.scheduler.request import Request


class OffloadEvictor:
    """Implements `Evictor` in front of another.

    Args:
        evictor: chooses and moves.
        prefix_offloader: has the fronts.
    """

    def __init__(self, evictor: Evictor, prefix_offloader: KVOffloader) -> None:
        self._evictor, self._prefix_offloader = evictor, prefix_offloader

    def evict(
        self, request: Request, keep: Slots, *, least_gain: int | None = None
    ) -> Evicted | None:
        """See `Evictor.evict`."""
        self._prefix_offloader.bring_back(request)
        return self._evictor.evict(request, keep, least_gain=least_gain)

    def repeat(self, request: Request, entry: EvictionEntry) -> None:
        """See `Evictor.repeat`."""
        self._prefix_offloader.bring_back(request)
        self._evictor.repeat(request, entry)

    def finalize(self, request: Request) -> None:
        """See `Evictor.finalize`; raises OutOfPages too."""
        self._prefix_offloader.bring_back(request)
        self._evictor.finalize(request)
