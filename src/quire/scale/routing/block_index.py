"""Which replica holds which blocks, and the longest cached prefix of a prompt on every replica.

    block hash      replicas that hold it, as bits
    h0              0b1011
    h0 h1           0b0011
    h0 h1 h2        0b0000        2 blocks of this prompt on replicas 0 and 1, 1 block on replica 3

A hash covers the block and everything before it, so a table of hashes holds the same information as
a radix tree. One lookup for all replicas takes one dictionary access for each block of the longest
match. The table is bounded: a replica has at most `max_blocks` blocks.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from quire.errors import ConfigError
from quire.scale.routing.base import BlockHash, KvEvent

STORED, REMOVED, CLEARED = "BlockStored", "BlockRemoved", "AllBlocksCleared"


class BlockIndex:
    """Blocks of all replicas, `max_blocks` each; the least recently sent go first."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._holders: dict[BlockHash, int] = {}
        self._replicas: dict[str, ReplicaBlocks] = {}
        self._names: list[str | None] = []  # by bit; None: free for another replica

    @property
    def num_hashes(self) -> int:
        return len(self._holders)

    def num_blocks(self, replica_id: str) -> int:
        found = self._replicas.get(replica_id)
        return 0 if found is None else len(found)

    def cached_blocks(self, prompt_blocks: Sequence[BlockHash]) -> dict[str, int]:
        """Length of the longest cached prefix in blocks, for each replica that has one."""
        found: dict[str, int] = {}
        matching = -1  # all replicas
        for depth, block in enumerate(prompt_blocks):
            holders = matching & self._holders.get(block, 0)
            if matching > 0 and matching != holders:
                self._note_depth(found, matching & ~holders, depth)
            matching = holders
            if not matching:
                break
        if matching > 0:
            self._note_depth(found, matching, len(prompt_blocks))
        return found

    def _note_depth(self, found: dict[str, int], bits: int, depth: int) -> None:
        while bits:
            lowest = bits & -bits
            name = self._names[lowest.bit_length() - 1]
            assert name is not None, "a lost replica holds no blocks"
            found[name] = depth
            bits ^= lowest

    # ---- changes -------------------------------------------------------------------------------

    def expect(self, replica_id: str, prompt_blocks: Sequence[BlockHash]) -> None:
        self._apply(self._blocks_of(replica_id).expect(prompt_blocks), replica_id)

    def finish(self, replica_id: str, prompt_blocks: Sequence[BlockHash]) -> None:
        """Note that a request finished: its blocks remain only if the replica still has them."""
        found = self._replicas.get(replica_id)
        if found is not None:
            self._apply(found.finish(prompt_blocks), replica_id)

    def apply_events(self, replica_id: str, events: Iterable[KvEvent]) -> None:
        blocks = self._blocks_of(replica_id)
        for event in events:
            self._apply(blocks.apply_event(event), replica_id)

    def forget(self, replica_id: str) -> None:
        found = self._replicas.get(replica_id)
        if found is not None:
            self._apply(found.clear(), replica_id)
            self._names[found.bit] = None
            del self._replicas[replica_id]

    def _blocks_of(self, replica_id: str) -> "ReplicaBlocks":
        found = self._replicas.get(replica_id)
        if found is None:
            if None not in self._names:
                self._names.append(None)
            bit = self._names.index(None)
            self._names[bit] = replica_id
            found = self._replicas[replica_id] = ReplicaBlocks(bit, self._max_blocks)
        return found

    def _apply(self, changes: "Changes", replica_id: str) -> None:
        added, removed = changes
        mask = 1 << self._replicas[replica_id].bit
        for block in added:
            self._holders[block] = self._holders.get(block, 0) | mask
        for block in removed:
            left = self._holders[block] & ~mask
            if left:
                self._holders[block] = left
            else:
                del self._holders[block]


Changes = tuple[list[BlockHash], list[BlockHash]]
"""Blocks that a replica holds now, and blocks that it no longer holds."""


class ReplicaBlocks:
    """Blocks that one replica has or will have.

    Without KV events these are the blocks of the requests sent last. With KV events they are the
    stored blocks, and those of requests that still run.
    """

    def __init__(self, bit: int, max_blocks: int) -> None:
        self.bit, self._max_blocks = bit, max_blocks
        self._stored: OrderedDict[BlockHash, None] = OrderedDict()
        self._expected: Counter[BlockHash] = Counter()  # of running requests, with events only
        self._follows_events = False

    def __len__(self) -> int:
        return len(self._stored) + sum(block not in self._stored for block in self._expected)

    def expect(self, blocks: Sequence[BlockHash]) -> Changes:
        if not self._follows_events:
            return self._store(blocks)
        added = []
        for block in blocks[: max(0, self._max_blocks - len(self._expected))]:
            if block not in self._expected and block not in self._stored:
                added.append(block)
            self._expected[block] += 1
        return added, []

    def finish(self, blocks: Sequence[BlockHash]) -> Changes:
        """Drop what was only expected; see `BlockIndex.finish`."""
        removed = []
        for block in blocks:
            if block in self._expected:
                self._expected[block] -= 1
                if not self._expected[block]:
                    del self._expected[block]
                    if block not in self._stored:
                        removed.append(block)
        return [], removed

    def apply_event(self, event: KvEvent) -> Changes:
        dropped = [] if self._follows_events else self.clear()[1]
        self._follows_events = True
        kind = event.get("type")
        if kind == STORED:
            added, removed = self._store(_hashes(event))
        elif kind == REMOVED:
            added, removed = [], self._remove(_hashes(event))
        elif kind == CLEARED:
            added, removed = self.clear()
        else:
            raise ConfigError(
                f"expected a KV event of type {STORED}, {REMOVED} or {CLEARED}, got {kind!r}"
            )
        return added, [*removed, *(block for block in dropped if block not in added)]

    def clear(self) -> Changes:
        removed = [*self._stored, *(b for b in self._expected if b not in self._stored)]
        self._stored.clear()
        self._expected.clear()
        return [], removed

    def _store(self, blocks: Sequence[BlockHash]) -> Changes:
        added = []
        for block in reversed(blocks):  # the end of a chain is forgotten before its beginning
            if block in self._stored:
                self._stored.move_to_end(block)
            else:
                self._stored[block] = None
                if block not in self._expected:
                    added.append(block)
        removed: list[BlockHash] = []
        while len(self._stored) > self._max_blocks:
            oldest, _ = self._stored.popitem(last=False)
            if oldest not in self._expected:
                removed.append(oldest)
        if removed:
            gone = set(removed)
            removed = [block for block in removed if block not in added]
            added = [block for block in added if block not in gone]
        return added, removed

    def _remove(self, blocks: Iterable[BlockHash]) -> list[BlockHash]:
        removed = []
        for block in blocks:
            if block in self._stored:
                del self._stored[block]
                if block not in self._expected:
                    removed.append(block)
        return removed


def _hashes(event: KvEvent) -> Sequence[BlockHash]:
    hashes = event["block_hashes"]
    assert isinstance(hashes, Sequence), "an event lists its blocks"
    return hashes
