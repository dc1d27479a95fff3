"""The tiers of the prefix cache: blocks evicted from the KV memory are written to them.

    KV memory --- a block is evicted: its run is gathered ---> queue ---> tiers (their own thread)
              <-- the end of a prefix, page by page ------------------'   see `prefix_loader`

The tiers are write-back: blocks and the statistics at their ends are written when they are evicted,
and all others when the engine closes. With write-through they are also written as soon as a step
has computed them, so that other engines find them. A step never waits for a tier: if the queue is
full, a block is not written.

A thread between the KV memory and its tiers: loads precede stores.

urgent   [load a][load b][load a] ...      round robin
later    [store x][store y] ...            only while no load is queued
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from quire.kv.block_records import BlockRecords, Records, SnapshotRecords
from quire.kv.memory import KVMemory
from quire.kv.prefix import Block, PrefixIndex, PrefixNode
from quire.offload.prefix_store.levels import PrefixLevels
from quire.offload.prefix_store.store import LevelStats, Place

logger = logging.getLogger(__name__)

Work = Callable[[], None]


class TierTransferWorker:
    """Runs work items one at a time on a thread of its own.

    An exception of a work item is logged; the item counts as done.
    """

    def __init__(self) -> None:
        self._urgent: deque[Work] = deque()
        self._later: deque[Work] = deque()
        self._changed = threading.Condition()
        self._busy = self._closing = False
        self._thread = threading.Thread(target=self._run, name="quire-tier", daemon=True)
        self._thread.start()

    def urgent(self, work: Work) -> None:
        """Queue work after all urgent work."""
        self._add(self._urgent, work)

    def later(self, work: Work) -> None:
        """Queue work to run while no urgent work is queued."""
        self._add(self._later, work)

    def _add(self, works: deque[Work], work: Work) -> None:
        with self._changed:
            works.append(work)
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until all queued work is done."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._urgent or self._later or self._busy))

    def close(self) -> None:
        """Finish all queued work, then end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._urgent or self._later or self._closing)
                if not (self._urgent or self._later):
                    return
                work = (self._urgent or self._later).popleft()
                self._busy = True
            try:
                work()
            except Exception:
                logger.exception("a KV transfer to or from a tier failed")


_QUEUE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """Contents and counters of the tiers for prefixes, all of them together.

    Attributes:
        stored_bytes: bytes of the blocks and statistics that can be found.
        found_blocks: blocks that were stored when the engine started.
        stored_blocks: blocks written since then, those written to several tiers repeatedly.
        skipped_blocks: blocks not written because the queue was full.
        loaded_tokens: tokens loaded since then and attached to requests.
        num_loads: number of prefixes loaded.
        num_joined: number of requests that used the load of another request.
        promoted_blocks: blocks read from a lower tier and written to the first one.
        num_declined: number of stored prefixes that were faster to recompute.
        num_discarded: entries that were damaged or missing when they were listed or read.
        num_failed: entries that could not be written.
        loading_bytes: pages of the KV memory with loads in flight.
        levels: contents and counters of each tier, fastest first.
    """

    stored_bytes: int
    found_blocks: int
    stored_blocks: int
    skipped_blocks: int
    loaded_tokens: int
    num_loads: int
    num_joined: int
    num_declined: int
    promoted_blocks: int
    num_discarded: int
    num_failed: int
    loading_bytes: int
    levels: tuple[LevelStats, ...]


class PrefixTier:
    """Stores the blocks of one prefix index when they are evicted.

    Args:
        index: index of the blocks.
        levels: the tiers, which receive the blocks.
        queue_bytes: most bytes waiting to be written.
        write_through: whether blocks are written as soon as they are computed.

    Attributes:
        levels: see above.
        records, snapshots: convert between pages and bytes.
        transfer_worker: runs the copies.
        written: (blocks, bytes) of stored runs not reported yet.
        num_skipped: blocks not written because the queue was full.
        num_promoted: blocks read from a lower tier and written to the first one.
    """

    def __init__(
        self,
        index: PrefixIndex,
        levels: PrefixLevels,
        *,
        queue_bytes: int = _QUEUE_BYTES,
        write_through: bool = False,
    ) -> None:
        self.levels = levels
        self.records = BlockRecords(index.memory, index.block_tokens)
        self.snapshots = SnapshotRecords(index.memory, index.block_tokens)
        self.transfer_worker = TierTransferWorker()
        self.written: deque[tuple[int, int]] = deque()
        self.num_skipped = self.num_promoted = 0
        self._index, self._memory = index, index.memory
        self._run_tokens = levels.run_blocks * index.block_tokens
        self._queue_bytes, self._queued_bytes = queue_bytes, 0
        self._counting = threading.Lock()  # guards _queued_bytes, which two threads update
        self._closed = self._waits = False
        index.on_drop(self.keep)
        if write_through:
            index.on_write(self.keep_written)

    @property
    def is_closed(self) -> bool:
        """Whether the tiers are closed."""
        return self._closed

    @property
    def memory(self) -> KVMemory:
        """Memory of the index."""
        return self._memory

    # ---- write ---------------------------------------------------------------------------------

    def keep(self, nodes: Sequence[PrefixNode]) -> None:
        """Queue blocks that are about to be evicted for writing, with the starts of their runs."""
        for node in nodes:
            run = self._run(node)
            if run:
                self._write(run)
            for used in () if self._closed else node.statistics:
                self._write_snapshot(node, used)

    def keep_written(self, nodes: Sequence[PrefixNode]) -> None:
        """Queue blocks that a step has written for writing; see `keep`."""
        self.keep(nodes[::-1])  # from the last one on: it takes the others of its entry along

    def _run(self, last: PrefixNode) -> list[PrefixNode]:
        """A block and the blocks before it in the same entry that are not stored yet."""
        entry = (last.block.end - 1) // self._run_tokens
        run: list[PrefixNode] = []
        node: PrefixNode | None = last
        while node is not None and not self._closed:
            here = (node.block.end - 1) // self._run_tokens == entry
            if not here or node.cached_reference.key not in self._memory.cached_references:
                break
            if node.is_offloaded:
                break
            if not self.levels.lacks(node.block.key):
                break
            run.append(node)
            node = node.parent
        return run[::-1]

    def _write(self, run: list[PrefixNode]) -> None:
        if not self._has_space(len(run) * self.records.record_bytes):
            self.num_skipped += len(run)
            return
        pages = {
            name: np.concatenate([node.cached_reference.pages[name] for node in run], axis=1)
            for name in run[0].cached_reference.pages
        }
        blocks = [node.block for node in run]
        records = self.records.gather(blocks, pages)
        keys = [block.key for block in blocks]
        self._queue(keys, records, partial(self._put, keys, records))

    def _write_snapshot(self, node: PrefixNode, used: frozenset[str]) -> None:
        key, snapshot = self.snapshots.key(node.block, used), node.statistics[used]
        if not self.levels.lacks(key) or snapshot.key not in self._memory.cached_references:
            return
        if self._has_space(self.snapshots.num_bytes(node.block.end, used)):
            record = self.snapshots.gather(node.block, snapshot)
            self._queue([key], record, partial(self._put_snapshot, key, record))

    def _has_space(self, num_bytes: int) -> bool:
        """Whether the queue has space for these bytes; while the engine closes, wait for it."""
        if self._waits:
            self.transfer_worker.drain()
            return True
        return self._queued_bytes + num_bytes <= max(self._queue_bytes, num_bytes)

    def _queue(self, keys: Sequence[bytes], records: Records, work: Work) -> None:
        """Run a write on the transfer thread, after all loads."""
        self.levels.claim(keys)
        with self._counting:
            self._queued_bytes += records.nbytes

        def write() -> None:
            try:
                work()
            finally:
                with self._counting:
                    self._queued_bytes -= records.nbytes

        self.transfer_worker.later(write)

    def _put(self, keys: list[bytes], records: Records) -> None:
        if self.levels.put(keys, records):
            self.written.append((len(keys), records.nbytes))

    def _put_snapshot(self, key: bytes, record: Records) -> None:
        self.levels.put_snapshot(key, record)

    # ---- read ----------------------------------------------------------------------------------

    def read(self, blocks: Sequence[Block], place: Place, into: Records) -> None:
        """Read consecutive blocks of one entry; blocks of a lower tier are promoted.

        Args:
            blocks: expected blocks.
            place: location of the first of them.
            into: [blocks, bytes of a record]; the caller must not change them afterwards.

        Raises:
            OffloadError: the records cannot be read from any tier.
        """
        keys = [block.key for block in blocks]
        self.levels.read(keys, blocks, place, into)
        if self._is_promoted(place, keys, into):
            self._queue(keys, into, partial(self._promote, keys, into))

    def read_snapshot(self, key: bytes, block: Block, place: Place, into: Records) -> None:
        """Read the statistics at the end of a block; see `read`.

        Args:
            key: key of the snapshot.
            block: the block.
            place: location of the snapshot.
            into: [bytes].
        """
        self.levels.read([key], [block], place, into[None])
        if self._is_promoted(place, [key], into):
            self._queue([key], into, partial(self._put_snapshot, key, into))

    def _is_promoted(self, place: Place, keys: Sequence[bytes], records: Records) -> bool:
        if not place.level or self._closed or not self._has_space(records.nbytes):
            return False
        return all(map(self.levels.first_lacks, keys))

    def _promote(self, keys: list[bytes], records: Records) -> None:
        store = self.levels.stores[0]
        for first in range(0, len(keys), store.run_blocks):
            part = slice(first, first + store.run_blocks)
            self.num_promoted += len(keys[part]) * store.put(keys[part], records[part])

    def flush(self) -> None:
        """Write all blocks that no running request uses, and wait for all writes."""
        if self._closed:
            return
        self._waits = True
        try:
            self._index.keep_all()
            self.transfer_worker.drain()
        finally:
            self._waits = False

    def close(self) -> None:
        """Write all unreferenced blocks, then close the tiers; no effect on closed tiers."""
        if self._closed:
            return
        self._waits = True
        self._index.keep_all()
        self._closed = True
        self.transfer_worker.close()
        self.levels.close()
