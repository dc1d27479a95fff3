"""Prefix cache blocks as byte records for storage outside the arena: tokens first, then pages.

record     tokens (8 B each) | group 0: lane 0 page 0, lane 0 page 1, lane 1 ... | group 1: ...
snapshot   tokens of a block | the pages of each private group at the block's end
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from quire.kv.memory import KVMemory, shared_groups
from quire.kv.pages import PageNumbers
from quire.kv.prefix import KEY_BYTES, Block
from quire.kv.sharing import CachedReference
from quire.layout.pages import LaneGroup

Records = NDArray[np.uint8]
_TOKEN_BYTES = 8


class BlockRecords:
    """Reads and writes the pages of prefix cache blocks."""

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
        """Read records [blocks, record_bytes]; pages are [lanes, pages of a lane] by lane group."""
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


class SnapshotRecords:
    """Reads and writes snapshots of attention statistics at the ends of blocks.

    A snapshot holds the private groups that a sequence uses, except those of promoted tokens.
    """

    def __init__(self, memory: KVMemory, block_tokens: int) -> None:
        self._memory, self._token_bytes = memory, _TOKEN_BYTES * block_tokens

    def key(self, block: Block, used: Collection[str]) -> bytes:
        """Key of the snapshot at the end of a block."""
        groups = "\0".join(map(_identity, statistics_groups(self._memory, used)))
        return hashlib.blake2b(block.key + groups.encode(), digest_size=KEY_BYTES).digest()

    def num_bytes(self, end: int, used: Collection[str]) -> int:
        groups = statistics_groups(self._memory, used)
        return self._token_bytes + sum(
            group.page_class.pages_for(group.slots_of(end))
            * group.num_lanes
            * group.page_class.page_bytes
            for group in groups
        )

    def gather(self, block: Block, snapshot: CachedReference) -> Records:
        record = np.empty(self.num_bytes(block.end, snapshot.pages), dtype=np.uint8)
        record[: self._token_bytes] = np.frombuffer(block.tokens, dtype=np.uint8)
        start = self._token_bytes
        for group in statistics_groups(self._memory, snapshot.pages):
            numbers = snapshot.pages[group.name].reshape(-1)
            found = np.asarray(self._memory.store.read_pages(group.page_class, numbers))
            record[start : start + found.nbytes] = found.reshape(-1)
            start += found.nbytes
        return record

    def scatter(self, record: Records, pages: Mapping[str, PageNumbers]) -> None:
        """Write a record into pages [lanes, pages of a lane] of each private group."""
        start = self._token_bytes
        for group in statistics_groups(self._memory, pages):
            numbers = pages[group.name].reshape(-1)
            end = start + numbers.size * group.page_class.page_bytes
            payload = record[start:end].reshape(len(numbers), -1)
            self._memory.store.write_pages(group.page_class, numbers, payload)
            start = end


def statistics_groups(memory: KVMemory, used: Collection[str]) -> list[LaneGroup]:
    """The private groups of a snapshot, in the order of the layout."""
    return [group for group in private_groups(memory, used) if group.checkpointed]


def private_groups(memory: KVMemory, used: Collection[str]) -> list[LaneGroup]:
    """The private groups of a sequence, in the order of the layout."""
    return [group for group in memory.layout.groups if group.private and group.name in used]


def _identity(group: LaneGroup) -> str:
    page, layers = group.page_class, ",".join(map(str, group.layers))
    return (
        f"{group.name} layers={layers} lanes_per_layer={group.lanes_per_layer} "
        f"slots={group.records} page={page.tokens}x{page.page_bytes}"
    )
