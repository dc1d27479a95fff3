"""The contiguous stores: the pages of a lane have consecutive numbers, so its KV is contiguous.

    run of a lane   | page page page . . . . . |     pages in the table, then reserved pages

A lane that outgrows its run is copied to a longer run; these copies are counted. A run is freed as
a whole when its sequence ends, so free memory becomes fragmented.

Page tables and kernels still use pages; a run of n pages of t tokens corresponds to a tensor
[n * t, heads, dim]. Pages are not shared (two lanes cannot both be contiguous through one page) and
are not freed at the beginning or in the middle of a lane: a fork copies the row, and a window lane
retains all its tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError, InvariantError, OutOfPages
from quire.kv.arena import Arena
from quire.kv.page_bytes import PageBytes
from quire.kv.pages import PageNumbers
from quire.kv.stores.base import Demand, Placement
from quire.kv.stores.runs import RunLengths, RunPool, offsets, spans
from quire.kv.tables import LaneTable, Rows
from quire.layout.pages import CacheLayout, LaneGroup, PageClass

Counts = NDArray[np.int64]


@dataclass(slots=True)
class LaneRuns:
    """The runs of a group: int32 [rows, lanes] first pages, and lengths (0 for no run)."""

    first: NDArray[np.int32]
    length: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LongerRuns:
    """Lanes of a group that need a longer run; each array is [lanes]."""

    table: LaneTable
    row: Rows
    lane: Rows
    needed: Counts
    length: Counts


@final
class Contiguous(Placement):
    """A store with one run per lane.

    Args:
        layout: lane groups of every sequence.
        total_bytes: size of the arena.
        max_rows: maximum number of concurrent sequences.
        lengths: determines the lengths of runs.

    Raises:
        ConfigError: the arena cannot hold the runs of one sequence.
    """

    shares, drops_pages, reserves = False, False, True

    def __init__(
        self, layout: CacheLayout, total_bytes: int, max_rows: int, lengths: RunLengths
    ) -> None:
        arena = Arena(total_bytes, [c.page_bytes for c in layout.page_classes], whole_pages=True)
        self._runs_pools = {c: RunPool(arena, c) for c in layout.page_classes}
        super().__init__(arena, self._runs_pools)
        self._lengths = lengths
        self.longest_tokens = lengths.longest_tokens
        self.border_slabs = lengths.border_slabs(len(self.pools))
        self._runs = {
            group.name: LaneRuns(
                *(np.zeros((max_rows, group.num_lanes), dtype=np.int32) for _ in range(2))
            )
            for group in layout.groups
        }
        self._require_room_for_one_sequence(layout)

    def _require_room_for_one_sequence(self, layout: CacheLayout) -> None:
        pages = dict.fromkeys(layout.page_classes, 0)
        for group in layout.groups:
            needed = np.array([group.page_class.pages_for(group.slots_of(1))])
            lane_pages = int(self._lengths.run_pages(group, needed)[0])
            pages[group.page_class] += lane_pages * group.num_lanes
        if not self.fits(pages):
            raise ConfigError(
                f"the runs of one sequence do not fit: {self.shortage(pages)}; lower "
                "--kv-store-tokens, raise --kv-memory or use the store 'paged'"
            )

    # ---- growing lanes -------------------------------------------------------------------------

    def can_allocate(self, demands: Sequence[Demand]) -> bool:
        """See `Placement`."""
        longer = self._longer_runs(demands)
        return longer is not None and self._places(longer) is not None

    def reserve(self, demands: Sequence[Demand], page_bytes: PageBytes) -> None:
        """See `Placement`: lanes that outgrow their run move to a longer one."""
        longer = self._longer_runs(demands)
        if longer is None:
            raise OutOfPages("a lane would be longer than the longest run of this store")
        places = self._places(longer)
        if places is None:
            requested = sum(int(runs.length.sum()) for runs in longer)
            free = self.arena.total_bytes - sum(pool.used_bytes for pool in self.pools.values())
            raise OutOfPages(
                f"expected free runs of {requested} pages in total, got {free:,} B free in "
                "shorter runs"
            )
        for runs, starts in zip(longer, places, strict=True):
            self._runs_pools[runs.table.group.page_class].take_runs(starts, runs.length)
        used_bytes = sum(pool.used_bytes for pool in self.pools.values())
        self.copying_peak_bytes = max(self.copying_peak_bytes, used_bytes)
        for runs, starts in zip(longer, places, strict=True):
            self._move(runs, starts, page_bytes)

    def _longer_runs(self, demands: Sequence[Demand]) -> list[LongerRuns] | None:
        """Return the lanes whose run is too short; None if no run can be long enough."""
        longer = []
        for demand in demands:
            table = demand.table
            needed = (table.num_pages[demand.rows] + demand.new).astype(np.int64)
            index, lane = np.nonzero(needed > self._runs[table.group.name].length[demand.rows])
            needed = needed[index, lane]
            length = self._lengths.run_pages(table.group, needed)
            if (length < needed).any():
                return None
            if len(lane):
                longer.append(LongerRuns(table, demand.rows[index], lane, needed, length))
        return longer

    def _places(self, longer: Sequence[LongerRuns]) -> list[PageNumbers] | None:
        """Find first pages for all runs in addition to all held pages; None if they do not fit."""
        by_class: dict[PageClass, list[int]] = {}
        for i, runs in enumerate(longer):
            by_class.setdefault(runs.table.group.page_class, []).append(i)
        places: dict[int, PageNumbers] = {}
        slabs: frozenset[int] = frozenset()
        for page_class, members in by_class.items():
            pool = self._runs_pools[page_class]
            lengths = np.concatenate([longer[i].length for i in members])
            starts = pool.find(lengths, without=slabs)
            if starts is None:
                return None
            slabs |= pool.slabs_of(starts, lengths)
            borders = np.cumsum([len(longer[i].length) for i in members])[:-1]
            places |= zip(members, np.split(starts, borders), strict=True)
        return [places[i] for i in range(len(longer))]

    def _move(self, runs: LongerRuns, starts: PageNumbers, page_bytes: PageBytes) -> None:
        table, held = runs.table, self._runs[runs.table.group.name]
        pool = self.pools[table.group.page_class]
        row, lane = runs.row, runs.lane
        first, named = held.first[row, lane], table.num_pages[row, lane]
        if named.any():
            old, new = spans(first, named), spans(starts, named)
            page_bytes.copy_pages(pool.page_class, old, new)
            table.replace(np.repeat(row, named), np.repeat(lane, named), offsets(named), new)
            self.num_copies += int(np.count_nonzero(named))
            self.copied_bytes += len(old) * pool.page_class.page_bytes
        pool.release(spans(first, held.length[row, lane]))
        held.first[row, lane] = starts
        held.length[row, lane] = runs.length

    def allocate(self, table: LaneTable, rows: Rows, counts: NDArray[np.int32]) -> PageNumbers:
        """See `Placement`: the pages that follow in the lanes' runs."""
        follow = self._runs[table.group.name].first[rows] + table.num_pages[rows]
        return spans(follow.reshape(-1), counts.reshape(-1))

    # ---- shrinking lanes -----------------------------------------------------------------------

    def free(self, table: LaneTable, pages: PageNumbers) -> None:
        """See `Placement`: the pages stay reserved in the lanes' runs."""

    def free_outside_window(
        self, table: LaneTable, row: int, lane: int, pages: PageNumbers
    ) -> None:
        """Refuse the call: no page is freed at the beginning of a run.

        Raises:
            InvariantError: always.
        """
        raise InvariantError(
            f"pages of group {table.group.name!r} were removed from the beginning of a run"
        )

    def free_rows(self, table: LaneTable, rows: Rows, pages: PageNumbers) -> None:
        """See `Placement`: runs are freed as a whole."""
        held = self._runs[table.group.name]
        runs = spans(held.first[rows].reshape(-1), held.length[rows].reshape(-1))
        self.pools[table.group.page_class].release(runs)
        held.length[rows] = 0

    # ---- what is held --------------------------------------------------------------------------

    def num_reserved_pages(self, table: LaneTable, rows: Rows) -> NDArray[np.int32]:
        """See `Placement`."""
        reserved: NDArray[np.int32] = (
            self._runs[table.group.name].length[rows] - table.num_pages[rows]
        )
        return reserved

    def reserved_pages(self, table: LaneTable, rows: Rows) -> PageNumbers:
        """See `Placement`."""
        rest = self._runs[table.group.name].first[rows] + table.num_pages[rows]
        return spans(rest.reshape(-1), self.num_reserved_pages(table, rows).reshape(-1))

    def peak_pages(self, group: LaneGroup, tokens: Counts, most_slots: int) -> Counts:
        """See `Placement`."""
        slots = tokens if group.ordered else np.minimum(tokens, most_slots)
        peak = self._lengths.peak_pages(group, -(-slots // group.page_class.tokens))
        return peak * (slots > 0)

    def check(self, table: LaneTable) -> None:
        """See `Placement`."""
        held = self._runs[table.group.name]
        column = np.arange(table.capacity)
        expected = held.first[:, :, None] + column
        named = column < table.num_pages[:, :, None]
        if (table.num_pages > held.length).any() or (table.pages != expected)[named].any():
            raise InvariantError(f"a lane of group {table.group.name!r} has pages outside its run")
