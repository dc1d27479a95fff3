"""The prefix cache's second tier: blocks evicted from the KV memory are written to it.

    KV memory --- a block is evicted: its run is gathered ---> queue ---> tier (its own thread)
              <-- the end of a prefix, page by page ------------------'   see `prefix_loader`

The tier is write-back: blocks are written when they are evicted, and all others when the engine
closes. A step never waits for the tier: if the queue is full, an evicted block is lost.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from quire.kv.block_records import BlockRecords
from quire.kv.memory import KVMemory
from quire.kv.prefix import PrefixIndex
from quire.kv.prefix_blocks import PrefixNode
from quire.offload.prefix_store.store import PrefixStore, Records
from quire.plan.fitting import RateEstimator

_QUEUE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """Contents and counters of a prefix tier.

    Attributes:
        stored_bytes: bytes of the blocks that can be found in it.
        found_blocks: blocks that it held when the engine started.
        stored_blocks: blocks written since then.
        skipped_blocks: blocks not written because the queue was full.
        loaded_tokens: tokens loaded since then and attached to requests.
        num_loads: number of prefixes loaded.
        num_declined: number of stored prefixes that were faster to recompute.
        num_discarded: entries that were damaged or missing when they were read.
        num_failed: entries that could not be written.
        loading_bytes: pages of the KV memory with loads in flight.
    """

    stored_bytes: int
    found_blocks: int
    stored_blocks: int
    skipped_blocks: int
    loaded_tokens: int
    num_loads: int
    num_declined: int
    num_discarded: int
    num_failed: int
    loading_bytes: int


class PrefixTier:
    """Stores the blocks of one prefix index when they are evicted.

    Args:
        index: index of the blocks.
        store: receives the blocks.
        rate: estimator of load time, by call and byte.
        queue_bytes: most bytes waiting to be written.

    Attributes:
        store, rate: see above.
        records: converts between pages and bytes.
        transfer_worker: runs the copies.
        written: (blocks, bytes) of stored runs not reported yet.
    """

    def __init__(
        self,
        index: PrefixIndex,
        store: PrefixStore,
        rate: RateEstimator,
        *,
        queue_bytes: int = _QUEUE_BYTES,
    ) -> None:
        self.store, self.rate = store, rate
        self.records = BlockRecords(index.memory, index.block_tokens)
        self.transfer_worker = TierTransferWorker()
        self.written: deque[tuple[int, int]] = deque()
        self.num_skipped = 0
        self._index, self._memory = index, index.memory
        self._run_tokens = store.run_blocks * index.block_tokens
        self._queue_bytes, self._queued_bytes = queue_bytes, 0
        self._counting = threading.Lock()  # guards _queued_bytes, which two threads update
        self._closed = self._waits = False
        index.on_drop(self.keep)

    @property
    def is_closed(self) -> bool:
        """Whether the tier is closed."""
        return self._closed

    @property
    def memory(self) -> KVMemory:
        """Memory of the index."""
        return self._memory

    def keep(self, nodes: Sequence[PrefixNode]) -> None:
        """Queue blocks that are about to be evicted for writing, with the starts of their runs."""
        for node in nodes:
            run = self._run(node)
            if run:
                self._write(run)

    def _run(self, last: PrefixNode) -> list[PrefixNode]:
        """A block and the blocks before it in the same entry that are not stored yet."""
        entry = (last.block.end - 1) // self._run_tokens
        run: list[PrefixNode] = []
        node: PrefixNode | None = last
        while node is not None and not self._closed:
            here = (node.block.end - 1) // self._run_tokens == entry
            if not here or node.cached_reference.key not in self._memory.cached_references:
                break
            if not self.store.lacks(node.block.key):
                break
            run.append(node)
            node = node.parent
        return run[::-1]

    def _write(self, run: list[PrefixNode]) -> None:
        num_bytes = len(run) * self.records.record_bytes
        if self._waits:
            self.transfer_worker.drain()
        elif self._queued_bytes + num_bytes > max(self._queue_bytes, num_bytes):
            self.num_skipped += len(run)
            return
        pages = {
            name: np.concatenate([node.cached_reference.pages[name] for node in run], axis=1)
            for name in run[0].cached_reference.pages
        }
        blocks = [node.block for node in run]
        records = self.records.gather(blocks, pages)
        keys = [block.key for block in blocks]
        self.store.claim(keys)
        with self._counting:
            self._queued_bytes += num_bytes
        self.transfer_worker.later(partial(self._put, keys, records))

    def _put(self, keys: list[bytes], records: Records) -> None:
        """Write a run on the transfer thread."""
        try:
            if self.store.put(keys, records):
                self.written.append((len(keys), records.nbytes))
        finally:
            with self._counting:
                self._queued_bytes -= records.nbytes

    def close(self) -> None:
        """Write all unreferenced blocks, then close the tier; no effect on a closed tier."""
        if self._closed:
            return
        self._waits = True
        self._index.keep_all()
        self._closed = True
        self.transfer_worker.close()
        self.store.close()


# ---- tier transfer -------------------------------------------------------------------------------

# A thread between memory and a tier: loads precede stores.
#
# urgent   [load a][load b][load a] ...      round robin
# later    [store x][store y] ...            only while no load is queued

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
