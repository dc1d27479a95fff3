"""Lookups of prefixes that other engines have stored since the last one.

    request A   waits .... | loads        one round trip to the store, for a limited time
    request B     waits .. | loads        shares A's lookup if that has not been sent yet

The index of a tier is a copy in this process, so a step never waits for a store. A request whose
prefix is not in the copy waits for one lookup. If the store does not respond, it is computed.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from quire.kv.prefix_key import BlockChain
from quire.offload.prefix_store.levels import PrefixLevels
from quire.offload.prefix_store.transfer_worker import TierTransferWorker
from quire.scheduler.request import Request


@dataclass(slots=True, eq=False)
class _Lookup:
    is_sent: bool = False
    is_done: bool = False


@dataclass(frozen=True, slots=True)
class _Waiting:
    chain: BlockChain
    lookup: _Lookup
    until_s: float


class PrefixLookups:
    """Requests that wait for a lookup.

    Args:
        levels: the tiers.
        worker: sends the lookups.
        notify: called on the worker's thread after each lookup.
        wait_s: longest wait of a request for a lookup.
        clock: seconds.
    """

    def __init__(
        self,
        levels: PrefixLevels,
        worker: TierTransferWorker,
        notify: Callable[[], None],
        *,
        wait_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._levels, self._worker, self._notify = levels, worker, notify
        self._wait_s, self._clock = wait_s, clock
        self._newest = _Lookup(is_sent=True)
        self._waiting: dict[Request, _Waiting] = {}

    def __contains__(self, request: Request) -> bool:
        return request in self._waiting

    def begin(self, request: Request, chain: BlockChain) -> bool:
        """Let a request wait for a lookup; return False if no store responds."""
        if not self._levels.can_look_up:
            return False
        if self._newest.is_sent:
            self._newest = lookup = _Lookup()
            self._worker.urgent(lambda: self._look_up(lookup))
        until_s = self._clock() + self._wait_s
        self._waiting[request] = _Waiting(chain, self._newest, until_s)
        return True

    def take(self, request: Request) -> BlockChain | None:
        """The blocks of a request whose wait is over; None while it waits."""
        waiting = self._waiting[request]
        if not waiting.lookup.is_done and self._clock() < waiting.until_s:
            return None
        del self._waiting[request]
        return waiting.chain

    def forget(self, request: Request) -> None:
        """A request no longer waits."""
        self._waiting.pop(request, None)

    def _look_up(self, lookup: _Lookup) -> None:
        lookup.is_sent = True
        try:
            self._levels.look_up()
        finally:
            lookup.is_done = True
            self._notify()
