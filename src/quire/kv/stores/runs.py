"""Runs: pages of one class with consecutive numbers, taken first fit.

    pages  | A A A A | . . | B B B | . . . . . . |      a run of 5 goes behind B: the first gap that
                                                        holds it, and the gap of 2 stays

Page numbers go through the whole arena and no slab border cuts a page, so a run may cross slabs.
"""

import itertools
from typing import final

import numpy as np
from numpy.typing import NDArray

from quire.errors import InvariantError
from quire.kv.arena import Arena
from quire.kv.pages import CountedPages, PageNumbers
from quire.kv.spans import offsets, spans
from quire.layout.pages import PageClass

Counts = NDArray[np.int64]


@final
class RunPool(CountedPages):
    """The pages of one class in an arena whose slabs hold whole pages.

    Finding a run costs O(pages of the arena), however many runs are asked for at once: stores that
    lay lanes out in runs do so seldom.
    """

    def __init__(self, arena: Arena, page_class: PageClass) -> None:
        super().__init__(arena, page_class)
        self._used_in_slab = np.zeros(arena.num_slabs, dtype=np.int64)

    @property
    def held_slabs(self) -> frozenset[int]:
        """Slabs this pool holds."""
        return frozenset(np.flatnonzero(self._used_in_slab).tolist())

    @property
    def tail_bytes(self) -> int:
        """Bytes of held slabs that no page covers: none."""
        return 0

    @property
    def num_free(self) -> int:
        """Free pages in held slabs."""
        return int(np.count_nonzero(self._used_in_slab)) * self.pages_per_slab - self.num_used

    @property
    def most_together(self) -> int:
        """Pages of the longest free run."""
        return int(self.free_runs()[1].max(initial=0))

    # ---- looking -------------------------------------------------------------------------------

    def free_runs(self, without: frozenset[int] = frozenset()) -> tuple[Counts, Counts]:
        """Starts and lengths of all runs of free pages, ascending.

        Args:
            without: slabs not to count on.
        """
        ours = self._used_in_slab > 0
        ours[list(self._arena.free_slabs - without)] = True
        free = np.repeat(ours, self.pages_per_slab) & (self.ref_counts == 0)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], free, [False]]).astype(np.int8)))
        return edges[::2], edges[1::2] - edges[::2]

    def find(self, lengths: Counts, without: frozenset[int] = frozenset()) -> PageNumbers | None:
        """First page of a run of each length, first fit in this order; None where they do not fit.

        Args:
            lengths: [runs].
            without: slabs not to count on.
        """
        starts, left = self.free_runs(without)
        found = [
            _first_fit(starts, left, length, len(list(equal)))
            for length, equal in itertools.groupby(lengths.tolist())
        ]
        places = np.concatenate([*found, np.empty(0, dtype=np.int64)]).astype(np.int32)
        return places if len(places) == len(lengths) else None

    def slabs_of(self, starts: PageNumbers, lengths: Counts) -> frozenset[int]:
        """Slabs that runs lie in."""
        return frozenset((spans(starts, lengths) // self.pages_per_slab).tolist())

    # ---- taking --------------------------------------------------------------------------------

    def allocate(self, num_pages: int) -> PageNumbers:
        """Give the first `num_pages` free pages, each with one reference.

        Raises:
            OutOfPages: the arena cannot; nothing was changed.
        """
        self._require_slabs(num_pages)
        free = spans(*self.free_runs())
        held = self._used_in_slab[free // self.pages_per_slab] > 0
        return self._take(np.concatenate([free[held], free[~held]])[:num_pages])

    def take_runs(self, starts: PageNumbers, lengths: Counts) -> None:
        """Take runs that `find` has found. Every page gets one reference."""
        self._take(spans(starts, lengths))

    def _take(self, pages: PageNumbers) -> PageNumbers:
        slabs = np.bincount(pages // self.pages_per_slab, minlength=self._arena.num_slabs)
        for slab in np.flatnonzero((slabs > 0) & (self._used_in_slab == 0)).tolist():
            self._arena.take_this_slab(slab)
        self._used_in_slab += slabs
        self.ref_counts[pages] = 1
        self.num_used += len(pages)
        return pages

    def _push(self, pages: PageNumbers) -> None:
        self.num_used -= len(pages)
        slabs = np.bincount(pages // self.pages_per_slab, minlength=self._arena.num_slabs)
        self._used_in_slab -= slabs
        for slab in np.flatnonzero((slabs > 0) & (self._used_in_slab == 0)).tolist():
            self._arena.give_slab(slab)

    def check(self) -> None:
        """Prove that the counts of used and shared pages are those of the references.

        Raises:
            InvariantError: one is not.
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
                f"{shared} shared, {self.num_used} and {self.num_shared} noted"
            )


def _first_fit(starts: Counts, left: Counts, length: int, count: int) -> Counts:
    """Places for up to `count` runs of one length; shortens the free runs they are cut from."""
    room = left // length
    taken = np.minimum(room, np.maximum(0, count - (np.cumsum(room) - room)))
    places = np.repeat(starts, taken) + length * offsets(taken)
    starts += taken * length
    left -= taken * length
    return places
