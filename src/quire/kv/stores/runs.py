"""Runs: consecutive page numbers of one page class, allocated first fit.

    pages  | A A A A | . . | B B B | . . . . . . |      a run of 5 is allocated after B: the first
                                                        gap that is large enough

Page numbers span the whole arena and no page crosses a slab boundary, so a run can span slabs.
"""

import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from quire.errors import InvariantError
from quire.kv.arena import Arena
from quire.kv.pages import CountedPages, PageNumbers
from quire.layout.eviction import PRESSURE, EvictionSpec
from quire.layout.pages import LaneGroup, PageClass

Counts = NDArray[np.int64]


@final
class RunPool(CountedPages):
    """A page pool that allocates runs, in an arena whose slabs hold whole pages.

    `find` costs O(pages of the arena) for any number of runs; stores with runs call it rarely.
    """

    def __init__(self, arena: Arena, page_class: PageClass) -> None:
        super().__init__(arena, page_class)
        self._used_in_slab = np.zeros(arena.num_slabs, dtype=np.int64)

    @property
    def held_slabs(self) -> frozenset[int]:
        """Numbers of the slabs that this pool holds."""
        return frozenset(np.flatnonzero(self._used_in_slab).tolist())

    @property
    def tail_bytes(self) -> int:
        """Bytes of held slabs that no whole page covers: always 0."""
        return 0

    @property
    def num_free(self) -> int:
        """Free pages in held slabs."""
        return int(np.count_nonzero(self._used_in_slab)) * self.pages_per_slab - self.num_used

    @property
    def most_together(self) -> int:
        """Pages of the longest free run."""
        return int(self.free_runs()[1].max(initial=0))

    # ---- finding -------------------------------------------------------------------------------

    def free_runs(self, without: frozenset[int] = frozenset()) -> tuple[Counts, Counts]:
        """Return the starts and lengths of all free runs, ascending.

        Args:
            without: free slabs to exclude.
        """
        ours = self._used_in_slab > 0
        ours[list(self._arena.free_slabs - without)] = True
        free = np.repeat(ours, self.pages_per_slab) & (self.ref_counts == 0)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], free, [False]]).astype(np.int8)))
        return edges[::2], edges[1::2] - edges[::2]

    def find(self, lengths: Counts, without: frozenset[int] = frozenset()) -> PageNumbers | None:
        """Find a run of each length, first fit in this order; return first pages, None if no fit.

        Args:
            lengths: [runs] lengths in pages.
            without: free slabs to exclude.
        """
        starts, left = self.free_runs(without)
        found = [
            _first_fit(starts, left, length, len(list(equal)))
            for length, equal in itertools.groupby(lengths.tolist())
        ]
        places = np.concatenate([*found, np.empty(0, dtype=np.int64)]).astype(np.int32)
        return places if len(places) == len(lengths) else None

    def slabs_of(self, starts: PageNumbers, lengths: Counts) -> frozenset[int]:
        """Return the slabs that contain the runs."""
        return frozenset((spans(starts, lengths) // self.pages_per_slab).tolist())

    # ---- allocating ----------------------------------------------------------------------------

    def allocate(self, num_pages: int) -> PageNumbers:
        """Allocate the first `num_pages` free pages, each with one reference.

        Raises:
            OutOfPages: the arena has too few free slabs; nothing changed.
        """
        self._require_slabs(num_pages)
        free = spans(*self.free_runs())
        held = self._used_in_slab[free // self.pages_per_slab] > 0
        return self._take(np.concatenate([free[held], free[~held]])[:num_pages])

    def take_runs(self, starts: PageNumbers, lengths: Counts) -> None:
        """Allocate runs returned by `find`; every page gets one reference."""
        self._take(spans(starts, lengths))

    def _take(self, pages: PageNumbers) -> PageNumbers:
        slabs = np.bincount(pages // self.pages_per_slab, minlength=self._arena.num_slabs)
        for slab in np.flatnonzero((slabs > 0) & (self._used_in_slab == 0)).tolist():
            self._arena.allocate_this_slab(slab)
        self._used_in_slab += slabs
        self.ref_counts[pages] = 1
        self.num_used += len(pages)
        self._before_use(pages)
        return pages

    def _push(self, pages: PageNumbers) -> None:
        self.num_used -= len(pages)
        slabs = np.bincount(pages // self.pages_per_slab, minlength=self._arena.num_slabs)
        self._used_in_slab -= slabs
        for slab in np.flatnonzero((slabs > 0) & (self._used_in_slab == 0)).tolist():
            self._arena.free_slab(slab)

    def check(self) -> None:
        """Check the counts of used and shared pages against the reference counts.

        Raises:
            InvariantError: a count is wrong.
        """
        used = np.flatnonzero(self.ref_counts)
        by_slab = np.bincount(used // self.pages_per_slab, minlength=self._arena.num_slabs)
        shared = int(np.count_nonzero(self.ref_counts > 1))
        if (by_slab != self._used_in_slab).any() or (len(used), shared) != (
            self.num_used,
            self.num_shared,
        ):
            raise InvariantError(
                f"pool of {self.page_class.page_bytes} B pages: {len(used)} referenced and "
                f"{shared} shared, counters say {self.num_used} and {self.num_shared}"
            )


def _first_fit(starts: Counts, left: Counts, length: int, count: int) -> Counts:
    """Find up to `count` runs of one length; shorten the free runs that they are taken from."""
    fitting = left // length
    taken = np.minimum(fitting, np.maximum(0, count - (np.cumsum(fitting) - fitting)))
    places = np.repeat(starts, taken) + length * offsets(taken)
    starts += taken * length
    left -= taken * length
    return places


# ---- run lengths ---------------------------------------------------------------------------------

# Run lengths: the maximum length of a lane, or doubled whenever a run is full.

GROWTH_FACTOR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneLimits:
    """Maximum lane lengths, for stores that reserve pages in advance.

    Attributes:
        max_tokens: tokens of the longest sequence.
        evicting_slots: slots of the longest lane with eviction.
        ragged: whether a budget moves slots between the heads of a layer, so that one head may hold
            the slots of all.
    """

    max_tokens: int
    evicting_slots: int
    ragged: bool = False

    @classmethod
    def of(cls, max_tokens: int, eviction: EvictionSpec) -> "LaneLimits":
        """Compute the limits of sequences of up to `max_tokens` tokens."""
        caps = eviction.lane_capacities or (eviction.cap,)
        longest = max(eviction.lane_peak_tokens(cap, max_tokens, None) for cap in caps)
        if eviction.when == PRESSURE or eviction.divided:
            # without memory pressure no token is evicted; a divided cap may go to one lane
            longest = max_tokens
        return cls(max_tokens=max_tokens, evicting_slots=longest, ragged=eviction.ragged)

    def most_pages(self, group: LaneGroup) -> int:
        """Return the pages of the longest lane of a group; windows do not shorten runs."""
        slots = group.slots_of(self.max_tokens)
        if not group.ordered and group.fixed_slots is None:
            lanes = group.lanes_per_layer if self.ragged else 1
            slots = min(slots, self.evicting_slots * lanes)
        return group.page_class.pages_for(slots)


class RunLengths(ABC):
    """Determines the length of a lane's run."""

    moves: ClassVar[bool]  # lanes that outgrow their run are copied to a longer one

    @property
    @abstractmethod
    def longest_tokens(self) -> int | None:
        """Maximum tokens of a sequence; None if only the arena limits it."""

    def border_slabs(self, num_classes: int) -> int:
        """Return the slabs that a class's runs may occupy beyond those that they fill.

        If another class holds the next slab, a longer run starts in another slab.
        """
        return int(self.moves and num_classes > 1)

    @abstractmethod
    def run_pages(self, group: LaneGroup, needed: Counts) -> Counts:
        """Return the run lengths in pages of lanes that need `needed`; less if none is so long."""

    @abstractmethod
    def peak_pages(self, group: LaneGroup, needed: Counts) -> Counts:
        """Return the peak pages of lanes that grow to `needed`, with the old run during a copy."""


@final
@dataclass(frozen=True, slots=True)
class MaximumLength(RunLengths):
    """Run lengths equal to the longest lane: runs are never copied.

    Source: the KV tensors of FasterTransformer and Orca; papers/001, "Contiguous allocation".
    """

    moves: ClassVar[bool] = False
    limits: LaneLimits

    @property
    def longest_tokens(self) -> int | None:
        """See `RunLengths`."""
        return self.limits.max_tokens

    def run_pages(self, group: LaneGroup, needed: Counts) -> Counts:
        """See `RunLengths`."""
        return np.full_like(needed, self.limits.most_pages(group))

    def peak_pages(self, group: LaneGroup, needed: Counts) -> Counts:
        """See `RunLengths`."""
        return np.maximum(self.run_pages(group, needed), needed)


@final
@dataclass(frozen=True, slots=True)
class Doubling(RunLengths):
    """Run lengths that are powers of two of pages, at most the longest lane.

    Over the life of a lane each page is copied less than twice on average, and a run is at least
    half full.

    Source: dynamic arrays (Cormen et al., "Dynamic tables"). Differs from caches that concatenate a
    new tensor for every token, such as Transformers' DynamicCache: those copy every token at every
    step.
    """

    moves: ClassVar[bool] = True
    limits: LaneLimits

    @property
    def longest_tokens(self) -> int | None:
        """See `RunLengths`."""
        return None

    def run_pages(self, group: LaneGroup, needed: Counts) -> Counts:
        """See `RunLengths`."""
        most = self.limits.most_pages(group)
        return np.minimum(_power_of_two(needed), np.maximum(most, needed))

    def peak_pages(self, group: LaneGroup, needed: Counts) -> Counts:
        """See `RunLengths`."""
        before = np.where(needed > 1, _power_of_two(needed) // GROWTH_FACTOR, 0)
        return self.run_pages(group, needed) + before


def _power_of_two(needed: Counts) -> Counts:
    """Return the smallest power of the growth factor that is at least `needed`; 0 for 0."""
    power: Counts = GROWTH_FACTOR ** np.ceil(np.log2(np.maximum(needed, 1))).astype(np.int64)
    return np.where(needed > 0, power, 0)


# ---- spans ---------------------------------------------------------------------------------------

# Concatenated integer ranges.

Integers = NDArray[np.int32] | NDArray[np.int64]


def offsets(counts: Integers) -> NDArray[np.int64]:
    """Return 0 .. counts[0]-1, then 0 .. counts[1]-1, and so on: int64 [counts.sum()]."""
    ends = np.cumsum(counts, dtype=np.int64)
    return np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)


def spans(starts: Integers, counts: Integers) -> NDArray[np.int32]:
    """Return `counts[i]` integers from `starts[i]` on, range after range: int32 [counts.sum()]."""
    first: NDArray[np.int64] = np.repeat(starts.astype(np.int64), counts)
    numbers: NDArray[np.int32] = (first + offsets(counts)).astype(np.int32)
    return numbers
