"""Offloaded pages and activations of swapped sequences: they stay in offload memory.

preempted   resident pages -> swap space     offloaded pages, activations: unchanged
resumed     swap space -> new pages          staging is allocated again
"""

from collections.abc import Mapping, Sequence

from quire.kv.swap import OffloadedPages
from quire.layout.pages import PageClass
from quire.offload.kv.offloaded_prefixes import OffloadedPrefixes
from quire.offload.kv.page_groups import OffloadedPageGroup
from quire.offload.recompute.activation_allocator import ActivationAllocator, Stored


class DetachedRows:
    """Offloaded pages of sequences that were swapped out together.

    Args:
        prefixes: offloaded prefixes of the memory.
        page_groups: offloaded page groups of each sequence; still in `prefixes.detached`.
        activations: allocator and detached blocks of each sequence; empty if none are stored.

    Attributes:
        staging: pages of each class that `attach` allocates.
    """

    def __init__(
        self,
        prefixes: OffloadedPrefixes,
        page_groups: Sequence[list[OffloadedPageGroup]],
        activations: Sequence[tuple[ActivationAllocator, Stored] | None],
    ) -> None:
        self._prefixes, self._page_groups = prefixes, page_groups
        self._activations = activations
        self.staging: Mapping[PageClass, int] = prefixes.staging_pages(page_groups)

    def attach(self, rows: Sequence[int]) -> None:
        self._prefixes.attach(rows, self._page_groups)
        for row, found in zip(rows, self._activations, strict=True):
            if found is not None:
                allocator, stored = found
                allocator.attach(row, stored)

    def discard(self) -> None:
        self._prefixes.discard(self._page_groups)
        for found in self._activations:
            if found is not None:
                allocator, stored = found
                allocator.discard(stored)


class OffloadedRowsOf:
    """Implements `OffloadedRows` for an engine.

    Args:
        prefixes: offloaded prefixes of the memory.
        allocator: stored activations; None if none are stored.
    """

    def __init__(self, prefixes: OffloadedPrefixes, allocator: ActivationAllocator | None) -> None:
        self._prefixes, self._allocator = prefixes, allocator

    def detach(self, rows: Sequence[int]) -> OffloadedPages | None:
        if not self._prefixes.rows.intersection(rows):
            return None
        activations = [self._activations_of(row) for row in rows]
        page_groups = [self._prefixes.detach(row) for row in rows]
        return DetachedRows(self._prefixes, page_groups, activations)

    def _activations_of(self, row: int) -> tuple[ActivationAllocator, Stored] | None:
        stored = None if self._allocator is None else self._allocator.detach(row)
        if stored is None or self._allocator is None:
            return None
        return self._allocator, stored
