"""Loads the end of a prefix backwards, segment by segment, while the request's prefill runs.

    read   0 ----------> at          wanted_from       claimed_from    loaded_from          end
    load                             <---------------- [in flight] <---[loaded ...............]

The engine's thread sets how far to load and attaches the loaded pages once its prefill reaches
them. The transfer thread loads one segment after another. A segment in flight may be recomputed or
cancelled at any time: its bytes are written into pages under a lock, and the pages are freed only
after `stop` has taken the lock.
"""

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from quire.errors import OffloadError
from quire.kv.prefix import Block
from quire.offload.prefix_store.in_flight_pages import InFlightPages, InFlightSnapshot
from quire.offload.prefix_store.prefix_tier import PrefixTier
from quire.offload.prefix_store.store import Place
from quire.offload.split import Loading

Segments = deque[tuple[int, int, float]]
_SHARE = 4  # a segment is 1 / _SHARE of the remaining blocks: small segments near the meeting point
_MIN_BYTES = 256 << 10  # of a segment, which limits the number of calls


@dataclass(frozen=True, slots=True)
class SnapshotLoad:
    """Load of the statistics at the end of a prefix.

    Attributes:
        pages: pages of the arena.
        key: key of the snapshot.
        place: location of the snapshot; None: the pages hold zeros.
        num_bytes: bytes of its record.
    """

    pages: InFlightSnapshot
    key: bytes
    place: Place | None
    num_bytes: int


class PrefixLoad:
    """Load of one prefix.

    Args:
        tier: holds the prefix.
        pages: pages of the arena, for the end of the prefix.
        found: consecutive blocks up to the end of the pages, and the location of each.
        snapshot: statistics at the end of the prefix, loaded before it; None without statistics.
        clock: seconds.

    Attributes:
        end: position after the last token.
        wanted_from: first token to load.
        claimed_from: first token of the segment in flight; `loaded_from` if none is in flight.
        loaded_from: the pages hold all tokens from this one to the end.
        failed: whether the load has ended with an error.
        moved_s: time of the last submission or arrival.
        segments: (tier, bytes, seconds) of loaded segments, for rate estimates.
    """

    def __init__(
        self,
        tier: PrefixTier,
        pages: InFlightPages,
        found: Sequence[tuple[Block, Place]],
        snapshot: SnapshotLoad | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.pages = pages
        self.end = self.loaded_from = self.claimed_from = pages.end
        self.wanted_from = pages.first
        self.failed = False
        self.moved_s = clock()
        self.segments = Segments()
        self._tier, self._found, self._clock = tier, found, clock
        self._snapshot, self._needs_snapshot = snapshot, snapshot is not None
        self._block_tokens = pages.block_tokens
        self._first = found[-1][0].end - len(found) * self._block_tokens
        self._cancelled = False
        self._lock = threading.Lock()

    @property
    def is_wanted(self) -> bool:
        """Whether there is more to load."""
        return not self.failed and self.wanted_from < self.loaded_from

    def extend_down(self, first: int) -> None:
        """Extend the load down to an earlier token.

        Raises:
            OutOfPages: too few free pages; nothing was changed.
        """
        with self._lock:
            if first < self.pages.first:
                self.pages.extend_down(first)
            self.wanted_from = first

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages of the load."""
        snapshot = self._snapshot
        return self.pages.num_bytes + (0 if snapshot is None else snapshot.pages.num_bytes)

    def stop(self) -> None:
        """Stop writing to pages: after this returns they may be freed."""
        with self._lock:
            self._cancelled = True

    def attach(self, row: int) -> bool:
        """Append the loaded pages to a row, and replace its statistics; see `InFlightPages`."""
        if not self.pages.attach(row):
            return False
        if self._snapshot is not None:
            self._snapshot.pages.attach(row)
        return True

    def release(self) -> None:
        """Free all pages that no row has taken."""
        self.pages.release()
        if self._snapshot is not None:
            self._snapshot.pages.release()

    def load_segment(self) -> bool:
        """Load the next segment; return whether another one is to be loaded."""
        claimed = self._claim()
        if claimed is None:
            return False
        first, blocks, place = claimed
        try:
            self._load_snapshot()
            self._load(first, blocks, place)
        except OffloadError:
            self._fail()
        except BaseException:
            self._fail()
            raise
        return self.is_wanted and not self._cancelled

    def _claim(self) -> tuple[int, list[Block], Place] | None:
        """Claim the segment before the loaded ones: a fraction of the wanted blocks."""
        with self._lock:
            if self._cancelled or not self.is_wanted:
                return None
            size = self._block_tokens
            last = (self.loaded_from - self._first) // size
            first, wanted_from = last - 1, (self.wanted_from - self._first) // size
            most = max(
                (last - wanted_from) // _SHARE, _MIN_BYTES // self._tier.records.record_bytes
            )
            lowest = max(wanted_from, last - max(1, most))
            while first > lowest and self._follows(first):
                first -= 1
            self.claimed_from = self._first + first * size
            self.moved_s = self._clock()
            blocks = [block for block, _ in self._found[first:last]]
            return self.claimed_from, blocks, self._found[first][1]

    def _follows(self, number: int) -> bool:
        """Whether a block directly follows the previous block in the same entry."""
        before, place = self._found[number - 1][1], self._found[number][1]
        return (before.level, before.entry, before.index + 1) == (
            place.level,
            place.entry,
            place.index,
        )

    def _load_snapshot(self) -> None:
        """Load the statistics, once."""
        snapshot = self._snapshot
        if snapshot is None or snapshot.place is None or not self._needs_snapshot:
            return
        record = np.empty(snapshot.num_bytes, dtype=np.uint8)
        self._tier.read_snapshot(snapshot.key, self._found[-1][0], snapshot.place, record)
        with self._lock:
            if not self._cancelled:
                self._tier.snapshots.scatter(record, snapshot.pages.pages)
                self._needs_snapshot = False

    def _load(self, first: int, blocks: list[Block], place: Place) -> None:
        started_s = self._clock()
        records = np.empty((len(blocks), self._tier.records.record_bytes), dtype=np.uint8)
        self._tier.read(blocks, place, records)
        with self._lock:
            if self._cancelled:
                return
            end = first + len(blocks) * self._block_tokens
            self._tier.records.scatter(records, self.pages.block_pages(first, end))
            self.loaded_from = first
            self.moved_s = self._clock()
            self.segments.append((place.level, records.nbytes, self.moved_s - started_s))

    def _fail(self) -> None:
        with self._lock:
            self.failed = True
            self.claimed_from = self.loaded_from


# Load time of each tier: measured when the tier is opened, updated from every segment.

PROBE_INTERVAL_S = 10.0


class LoadRate:
    """Estimates the load time of tokens.

    Args:
        tier: the tiers to load from.
        token_bytes: bytes of a token in all layers.
        clock: seconds.
    """

    def __init__(
        self, tier: PrefixTier, token_bytes: float, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._tier, self._token_bytes, self._clock = tier, token_bytes, clock
        self._probes = Segments()
        self._probed_s, self._refreshed_s = -PROBE_INTERVAL_S, clock()

    def loading(self, found: Sequence[tuple[Block, Place]]) -> Loading:
        """Mean load cost per token of some blocks, while no other load runs."""
        counts = Counter(place.level for _, place in found)
        byte_s = call_s = 0.0
        for level, count in counts.items():
            per_call, per_byte = self._tier.levels.rates[level].coefficients
            byte_s += per_byte * count / len(found)
            call_s = max(call_s, per_call)
        return Loading(token_s=byte_s * self._token_bytes, call_s=call_s)

    def learn(self, segments: Segments | None = None) -> None:
        """Learn from loaded segments and from finished probes."""
        for found in (self._probes, Segments() if segments is None else segments):
            while found:
                level, num_bytes, seconds = found.popleft()
                self._tier.levels.rates[level].add((1, num_bytes), seconds)

    def refresh(self) -> None:
        """Refresh the index of a shared store at most every `PROBE_INTERVAL_S` seconds."""
        levels = self._tier.levels
        if not levels.is_shared or self._clock() - self._refreshed_s < PROBE_INTERVAL_S:
            return
        self._refreshed_s = self._clock()

        def refresh() -> None:
            with contextlib.suppress(OffloadError):
                levels.refresh()

        self._tier.transfer_worker.later(refresh)

    def probe(self, block: Block, place: Place) -> None:
        """Load a block at most every `PROBE_INTERVAL_S` s: a slow tier may have become fast."""
        if self._clock() - self._probed_s < PROBE_INTERVAL_S:
            return
        self._probed_s = self._clock()

        def read_block() -> None:
            records = np.empty((1, self._tier.records.record_bytes), dtype=np.uint8)
            started_s = self._clock()
            with contextlib.suppress(OffloadError):
                self._tier.levels.stores[place.level].read([block], place, records)
                self._probes.append((place.level, records.nbytes, self._clock() - started_s))

        self._tier.transfer_worker.urgent(read_block)
