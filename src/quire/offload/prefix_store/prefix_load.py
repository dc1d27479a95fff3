"""Loads the back of a prefix from its end towards the front, piece by piece, beside whoever reads.

    read   0 ----------> at          wanted_from       claimed_from    loaded_from          end
    load                             <---------------- [in flight] <---[here .................]

The engine's thread says how far down to load and takes what is here when its own reading has come
up to it; the carrier's thread brings piece after piece. What is in flight may be read over or given
up at any time: bytes go into pages under a lock that whoever gives the pages back takes first.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from quire.errors import OffloadError
from quire.kv.block_records import BlockRecords
from quire.kv.prefix_key import Block
from quire.offload.kv.in_flight_pages import InFlightPages
from quire.offload.prefix_store.prefix_tier import PrefixTier
from quire.offload.prefix_store.store import Place, PrefixStore
from quire.plan.offload.restore import Loading

_SHARE = 4  # of what is wanted, one in so many blocks is a piece: small ones where both sides meet
_LEAST_BYTES = 256 << 10  # of a piece, so that calls stay few


class PrefixLoad:
    """One prefix on its way.

    Args:
        store: where it is.
        records: puts it into pages.
        pages: of the arena, for its back.
        found: consecutive blocks up to the end of the pages, and where each of them is.
        clock: seconds.

    Attributes:
        end: position behind the last token.
        wanted_from: token down to which to load.
        claimed_from: first token of the piece in flight; `loaded_from` where none is.
        loaded_from: from here to the end everything is in the pages.
        failed: nothing more will come.
        moved_s: when bytes came or were asked for last.
        pieces: (bytes, seconds) of what came, for whoever learns from it.
    """

    def __init__(
        self,
        store: PrefixStore,
        records: BlockRecords,
        pages: InFlightPages,
        found: Sequence[tuple[Block, Place]],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.pages = pages
        self.end = self.loaded_from = self.claimed_from = pages.end
        self.wanted_from = pages.first
        self.failed = False
        self.moved_s = clock()
        self.pieces: deque[tuple[int, float]] = deque()
        self._store, self._records, self._found, self._clock = store, records, found, clock
        self._block_tokens = pages.block_tokens
        self._first = found[-1][0].end - len(found) * self._block_tokens
        self._cancelled = False
        self._turn = threading.Lock()

    @property
    def is_wanted(self) -> bool:
        """Whether there is more to load."""
        return not self.failed and self.wanted_from < self.loaded_from

    def reach_down(self, first: int) -> None:
        """Load down to an earlier token than before.

        Raises:
            OutOfPages: the memory has no pages for it; nothing was changed.
        """
        with self._turn:
            if first < self.pages.first:
                self.pages.reach_down(first)
            self.wanted_from = first

    def stop(self) -> None:
        """Write to no page any more: when this returns they may be given to others."""
        with self._turn:
            self._cancelled = True

    def carry(self) -> bool:
        """Bring the next piece; whether another one is wanted."""
        claimed = self._claim()
        if claimed is None:
            return False
        first, blocks, place = claimed
        try:
            self._bring(first, blocks, place)
        except OffloadError:
            self._give_up()
        except BaseException:
            self._give_up()
            raise
        return self.is_wanted and not self._cancelled

    def _claim(self) -> tuple[int, list[Block], Place] | None:
        """The piece before what is here: a share of what is wanted, all of one entry."""
        with self._turn:
            if self._cancelled or not self.is_wanted:
                return None
            size = self._block_tokens
            last = (self.loaded_from - self._first) // size
            first, wanted_from = last - 1, (self.wanted_from - self._first) // size
            most = max((last - wanted_from) // _SHARE, _LEAST_BYTES // self._records.record_bytes)
            lowest = max(wanted_from, last - max(1, most))
            while first > lowest and self._follows(first):
                first -= 1
            self.claimed_from = self._first + first * size
            self.moved_s = self._clock()
            blocks = [block for block, _ in self._found[first:last]]
            return self.claimed_from, blocks, self._found[first][1]

    def _follows(self, number: int) -> bool:
        """Whether a block lies right behind the one before it."""
        before, place = self._found[number - 1][1], self._found[number][1]
        return before.entry == place.entry and before.index + 1 == place.index

    def _bring(self, first: int, blocks: list[Block], place: Place) -> None:
        started_s = self._clock()
        records = np.empty((len(blocks), self._records.record_bytes), dtype=np.uint8)
        self._store.read(blocks, place, records)
        with self._turn:
            if self._cancelled:
                return
            end = first + len(blocks) * self._block_tokens
            self._records.scatter(records, self.pages.block_pages(first, end))
            self.loaded_from = first
            self.moved_s = self._clock()
            self.pieces.append((records.nbytes, self.moved_s - started_s))

    def _give_up(self) -> None:
        with self._turn:
            self.failed = True
            self.claimed_from = self.loaded_from


# ---- load rate -----------------------------------------------------------------------------------

# What loading from a tier takes: measured when it is opened, followed on every piece.

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
