"""Pages of a prefix load in flight: allocated from the arena before any row uses them.

    [0 ........ at)          a row in prefill
             [first ... end) pages of the in-flight load, not part of the row yet
    [0 ........ at ... end)  attached: the row gets the pages after `at`; the others are freed

A snapshot of statistics replaces the pages of a row at the end of a load. Until then the memory
counts the pages of both as cached references, so that every page is referenced. Records of promoted
(mixed-precision) tokens begin with zeroed pages: there are none before an eviction.
"""

from collections.abc import Collection, Mapping

import numpy as np

from quire.errors import InvariantError
from quire.kv.block_records import private_groups
from quire.kv.memory import KVMemory, shared_groups
from quire.kv.pages import PageNumbers
from quire.kv.sharing import append_pages, can_append, replace_statistics
from quire.layout.pages import PageClass


class InFlightPages:
    """Pages for whole blocks of tokens of one sequence, in every group shared between sequences.

    Args:
        memory: allocates the pages.
        first: position of the first token.
        end: position after the last token.
        block_tokens: whole pages of every lane; `first` and `end` are multiples of it.

    Attributes:
        first, end, block_tokens: see above.
        pages: pages of each shared group, [lanes, pages of a lane].

    Raises:
        OutOfPages: too few free pages; nothing was changed.
    """

    def __init__(self, memory: KVMemory, first: int, end: int, block_tokens: int) -> None:
        self._memory, self.block_tokens = memory, block_tokens
        self.first, self.end = end, end
        self.pages: dict[str, PageNumbers] = {
            group.name: np.empty((group.num_lanes, 0), dtype=np.int32)
            for group in shared_groups(memory)
        }
        self._key = next(memory.cached_reference_keys)
        memory.cached_references[self._key] = self.pages
        try:
            self.extend_down(first)
        except BaseException:
            self.release()
            raise

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages."""
        tables = self._memory.tables
        return sum(
            numbers.size * tables[name].group.page_class.page_bytes
            for name, numbers in self.pages.items()
        )

    def extend_down(self, first: int) -> None:
        """Allocate pages for the tokens from this position up to the current first one.

        Raises:
            OutOfPages: too few free pages; nothing was changed.
        """
        allocated: dict[str, PageNumbers] = {}
        try:
            for group in shared_groups(self._memory):
                columns = (self.first - first) // group.page_class.tokens
                pool = self._memory.pools[group.page_class]
                numbers = pool.allocate(columns * group.num_lanes)
                allocated[group.name] = numbers.reshape(group.num_lanes, columns)
        except BaseException:
            self._free(allocated)
            raise
        self._set({n: np.concatenate([allocated[n], old], axis=1) for n, old in self.pages.items()})
        self.first = first

    def block_pages(self, start: int, end: int) -> dict[str, PageNumbers]:
        """Pages [lanes, pages of a lane] of the tokens from `start` to `end`, by group."""
        found = {}
        for group in shared_groups(self._memory):
            tokens = group.page_class.tokens
            columns = slice((start - self.first) // tokens, (end - self.first) // tokens)
            found[group.name] = self.pages[group.name][:, columns]
        return found

    def attach(self, row: int) -> bool:
        """Append the pages after a row's last token to the row and free the others.

        Returns:
            False if the row cannot take them: it has evicted tokens or offloaded pages.

        Raises:
            InvariantError: the row does not end at a block boundary within these pages.
        """
        at = int(self._memory.lengths[row])
        if not self.first <= at < self.end or at % self.block_tokens:
            raise InvariantError(f"tokens {self.first} to {self.end} do not follow the first {at}")
        if not can_append(self._memory, row):
            return False
        after, before = self.block_pages(at, self.end), self.block_pages(self.first, at)
        append_pages(self._memory, row, after, self.end)
        del self._memory.cached_references[self._key]
        self._free(before)
        return True

    def release(self) -> None:
        """Free all pages that no row has taken."""
        if self._memory.cached_references.pop(self._key, None) is not None:
            self._free(self.pages)

    def _set(self, pages: dict[str, PageNumbers]) -> None:
        self.pages = pages
        self._memory.cached_references[self._key] = pages

    def _free(self, pages: Mapping[str, PageNumbers]) -> None:
        for name, numbers in pages.items():
            page_class = self._memory.tables[name].group.page_class
            self._memory.pools[page_class].release(numbers.reshape(-1))


def pages_needed(memory: KVMemory, tokens: int) -> dict[PageClass, int]:
    """Pages of each class for whole blocks of this many tokens."""
    needed: dict[PageClass, int] = {}
    for group in shared_groups(memory):
        page_class = group.page_class
        count = tokens // page_class.tokens * group.num_lanes
        needed[page_class] = needed.get(page_class, 0) + count
    return needed


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
        self.pages: dict[str, PageNumbers] = {}
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
