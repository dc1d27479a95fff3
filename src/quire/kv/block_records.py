"""Prefix cache blocks as byte records for storage outside the arena: tokens first, then pages.

record   tokens (8 B each) | group 0: lane 0 page 0, lane 0 page 1, lane 1 ... | group 1: ...
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from quire.kv.memory import KVMemory, shared_groups
from quire.kv.pages import PageNumbers
from quire.kv.prefix_key import Block

Records = NDArray[np.uint8]
_TOKEN_BYTES = 8


class BlockRecords:
    """Reads and writes the pages of prefix cache blocks.

    Args:
        memory: the KV memory that holds the pages.
        block_tokens: tokens of a block.

    Attributes:
        record_bytes: bytes of one block's record.
    """

    def __init__(self, memory: KVMemory, block_tokens: int) -> None:
        self._memory, self._block_tokens = memory, block_tokens
        self._parts: list[tuple[str, slice]] = []
        end = _TOKEN_BYTES * block_tokens
        for group in shared_groups(memory):
            columns = block_tokens // group.page_class.tokens
            start, end = end, end + columns * group.num_lanes * group.page_class.page_bytes
            self._parts.append((group.name, slice(start, end)))
        self.record_bytes = end

    def gather(self, blocks: Sequence[Block], pages: Mapping[str, PageNumbers]) -> Records:
        """Read records [blocks, record_bytes] of blocks whose pages have been written.

        Args:
            blocks: consecutive blocks of one chain.
            pages: page numbers [lanes, pages of a lane] of all these blocks, by lane group.
        """
        records = np.empty((len(blocks), self.record_bytes), dtype=np.uint8)
        for record, block in zip(records, blocks, strict=True):
            record[: len(block.tokens)] = np.frombuffer(block.tokens, dtype=np.uint8)
        for name, part in self._parts:
            page_class = self._memory.tables[name].group.page_class
            numbers = _by_block(pages[name], len(blocks))
            found = np.asarray(self._memory.store.read_pages(page_class, numbers))
            records[:, part] = found.reshape(len(blocks), -1)
        return records

    def scatter(self, records: Records, pages: Mapping[str, PageNumbers]) -> None:
        """Write the pages of records into pages of the arena; see `gather`."""
        for name, part in self._parts:
            page_class = self._memory.tables[name].group.page_class
            numbers = _by_block(pages[name], len(records))
            payload = np.ascontiguousarray(records[:, part]).reshape(len(numbers), -1)
            self._memory.store.write_pages(page_class, numbers, payload)


def _by_block(pages: PageNumbers, blocks: int) -> PageNumbers:
    """Reorder pages [lanes, blocks x columns] by block, then by lane."""
    lanes = len(pages)
    by_block: PageNumbers = pages.reshape(lanes, blocks, -1).transpose(1, 0, 2).reshape(-1)
    return by_block
