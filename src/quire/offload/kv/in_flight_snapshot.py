"""Pages of a snapshot of statistics in flight, which replace those of a row at the end of a load.

Until then the memory counts them as a cached reference, so that every page is referenced. Records
of promoted (mixed-precision) tokens begin with zeroed pages: there are none before an eviction.
"""

from collections.abc import Collection, Mapping

from quire.kv.block_records import private_groups
from quire.kv.memory import KVMemory
from quire.kv.pages import PageNumbers
from quire.kv.sharing import replace_statistics
from quire.layout.pages import PageClass


class InFlightSnapshot:
    """Pages for the statistics of a sequence at the end of a stored prefix.

    Args:
        memory: allocates the pages.
        used: names of the private groups of the sequence.
        end: position after the prefix.

    Attributes:
        pages: pages of each private group, [lanes, pages of a lane].

    Raises:
        OutOfPages: too few free pages; nothing was changed.
    """

    def __init__(self, memory: KVMemory, used: Collection[str], end: int) -> None:
        self._memory, self._end = memory, end
        self.pages: Mapping[str, PageNumbers] = {}
        allocated: dict[str, PageNumbers] = {}
        try:
            for group in private_groups(memory, used):
                columns = group.page_class.pages_for(group.slots_of(end))
                numbers = memory.pools[group.page_class].allocate(columns * group.num_lanes)
                allocated[group.name] = numbers.reshape(group.num_lanes, columns)
                if not group.checkpointed:
                    memory.store.clear_pages(group.page_class, numbers)
        except BaseException:
            self._free(allocated)
            raise
        self.pages = allocated
        self._key = next(memory.cached_reference_keys)
        memory.cached_references[self._key] = allocated

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages."""
        tables = self._memory.tables
        return sum(p.size * tables[n].group.page_class.page_bytes for n, p in self.pages.items())

    def attach(self, row: int) -> None:
        """Replace the statistics of a row that has just got the tokens of the prefix."""
        replace_statistics(self._memory, row, self.pages, self._end)
        del self._memory.cached_references[self._key]

    def release(self) -> None:
        """Free the pages, unless a row has taken them."""
        if self._memory.cached_references.pop(self._key, None) is not None:
            self._free(self.pages)

    def _free(self, pages: Mapping[str, PageNumbers]) -> None:
        for name, numbers in pages.items():
            page_class = self._memory.tables[name].group.page_class
            self._memory.pools[page_class].release(numbers.reshape(-1))


def snapshot_pages_needed(
    memory: KVMemory, used: Collection[str], end: int
) -> dict[PageClass, int]:
    """Pages of each class for the statistics of a sequence at position `end`."""
    needed: dict[PageClass, int] = {}
    for group in private_groups(memory, used):
        pages = group.page_class.pages_for(group.slots_of(end)) * group.num_lanes
        needed[group.page_class] = needed.get(group.page_class, 0) + pages
    return needed
