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
from quire.layout.pages import LaneGroup, PageClass

Columns = Mapping[LaneGroup, int]
"""Pages of each lane, by group."""


def _block_columns(memory: KVMemory, tokens: int) -> Columns:
    return {group: tokens // group.page_class.tokens for group in shared_groups(memory)}


def _snapshot_columns(memory: KVMemory, used: Collection[str], end: int) -> Columns:
    groups = private_groups(memory, used)
    return {group: group.page_class.pages_for(group.slots_of(end)) for group in groups}


def pages_needed(memory: KVMemory, tokens: int) -> dict[PageClass, int]:
    """Pages of each class for whole blocks of this many tokens."""
    return _by_class(_block_columns(memory, tokens))


def snapshot_pages_needed(
    memory: KVMemory, used: Collection[str], end: int
) -> dict[PageClass, int]:
    """Pages of each class for the statistics of a sequence at position `end`."""
    return _by_class(_snapshot_columns(memory, used, end))


def _by_class(columns: Columns) -> dict[PageClass, int]:
    needed: dict[PageClass, int] = {}
    for group, count in columns.items():
        page_class = group.page_class
        needed[page_class] = needed.get(page_class, 0) + count * group.num_lanes
    return needed


class _OwnPages:
    """Pages [lanes, pages of a lane] by group that no row has taken yet."""

    def __init__(self, memory: KVMemory, columns: Columns) -> None:
        self._memory = memory
        self.pages = self._allocate(columns)
        self._key = next(memory.cached_reference_keys)
        memory.cached_references[self._key] = self.pages

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages."""
        tables = self._memory.tables
        return sum(p.size * tables[n].group.page_class.page_bytes for n, p in self.pages.items())

    def release(self) -> None:
        """Free the pages, unless a row has taken them."""
        if self._memory.cached_references.pop(self._key, None) is not None:
            self._free(self.pages)

    def _allocate(self, columns: Columns) -> dict[str, PageNumbers]:
        """Allocate pages of each group, all or none."""
        allocated: dict[str, PageNumbers] = {}
        try:
            for group, count in columns.items():
                pages = self._memory.pools[group.page_class].allocate(count * group.num_lanes)
                allocated[group.name] = pages.reshape(group.num_lanes, count)
        except BaseException:
            self._free(allocated)
            raise
        return allocated

    def _free(self, pages: Mapping[str, PageNumbers]) -> None:
        for name, numbers in pages.items():
            page_class = self._memory.tables[name].group.page_class
            self._memory.pools[page_class].release(numbers.reshape(-1))


class InFlightPages(_OwnPages):
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
        super().__init__(memory, _block_columns(memory, 0))
        self.block_tokens, self.first, self.end = block_tokens, end, end
        try:
            self.extend_down(first)
        except BaseException:
            self.release()
            raise

    def extend_down(self, first: int) -> None:
        """Allocate pages for the tokens from this position up to the current first one.

        Raises:
            OutOfPages: too few free pages; nothing was changed.
        """
        allocated = self._allocate(_block_columns(self._memory, self.first - first))
        for name, pages in allocated.items():
            self.pages[name] = np.concatenate([pages, self.pages[name]], axis=1)
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
        append_pages(self._memory, row, self.block_pages(at, self.end), self.end)
        del self._memory.cached_references[self._key]
        self._free(self.block_pages(self.first, at))
        return True


class InFlightSnapshot(_OwnPages):
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
        super().__init__(memory, _snapshot_columns(memory, used, end))
        self._end = end
        for group in private_groups(memory, used):
            if not group.checkpointed:
                memory.store.clear_pages(group.page_class, self.pages[group.name].reshape(-1))

    def attach(self, row: int) -> None:
        """Replace the statistics of a row that has just got the tokens of the prefix."""
        replace_statistics(self._memory, row, self.pages, self._end)
        del self._memory.cached_references[self._key]
