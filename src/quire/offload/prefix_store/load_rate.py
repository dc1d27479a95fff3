"""What loading from a tier takes: measured when it is opened, followed on every piece."""

import contextlib
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from quire.errors import OffloadError
from quire.kv.prefix_key import Block
from quire.offload.prefix_store.prefix_tier import PrefixTier
from quire.offload.prefix_store.store import Place
from quire.plan.offload.restore import Loading

LOOK_AGAIN_S = 10.0
Pieces = deque[tuple[int, float]]


class LoadRate:
    """Seconds of loads.

    Args:
        tier: that is loaded from.
        token_bytes: of a token, all layers.
        clock: seconds.
    """

    def __init__(
        self, tier: PrefixTier, token_bytes: float, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._tier, self._token_bytes, self._clock = tier, token_bytes, clock
        self._probes: Pieces = deque()
        self._looked_s, self._refreshed_s = -LOOK_AGAIN_S, clock()

    @property
    def token_s(self) -> float:
        """Seconds to load a token when nobody else loads."""
        return self._tier.rate.coefficients[1] * self._token_bytes

    def loading(self, token_s: float) -> Loading:
        """Loads that take so long for each token."""
        return Loading(token_s=token_s, call_s=self._tier.rate.coefficients[0])

    def learn(self, pieces: Pieces | None = None) -> None:
        """Learn from what came, in (bytes, seconds), and from the last looks."""
        for found in (self._probes, Pieces() if pieces is None else pieces):
            while found:
                num_bytes, seconds = found.popleft()
                self._tier.rate.add((1, num_bytes), seconds)

    def refresh(self) -> None:
        """See what others have written to a store in the meantime, now and then."""
        store = self._tier.store
        if not store.is_shared or self._clock() - self._refreshed_s < LOOK_AGAIN_S:
            return
        self._refreshed_s = self._clock()

        def refresh() -> None:
            with contextlib.suppress(OffloadError):
                store.refresh()

        self._tier.transfer_worker.later(refresh)

    def look_again(self, block: Block, place: Place) -> None:
        """Load a block to nowhere now and then: a tier that was too slow may have become fast."""
        if self._clock() - self._looked_s < LOOK_AGAIN_S:
            return
        self._looked_s = self._clock()

        def look() -> None:
            records = np.empty((1, self._tier.records.record_bytes), dtype=np.uint8)
            started_s = self._clock()
            with contextlib.suppress(OffloadError):
                self._tier.store.read([block], place, records)
                self._probes.append((records.nbytes, self._clock() - started_s))

        self._tier.transfer_worker.urgent(look)
