"""Prefixes outside of the KV memory: what it lets go of is written to a tier before it goes.

    KV memory --- a block is dropped: its run is gathered ---> queue ---> tier (a thread of its own)
              <-- the back of a prefix, page by page ---------------------'        see `restoring`

Written back, not through: blocks go to the tier when they leave the memory, and all of them when
the engine closes. A step never waits for the tier: where the queue is full, a block just goes.
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
    """What a tier of prefixes holds and has done.

    Attributes:
        stored_bytes: of blocks that can be found there.
        found_blocks: that were there when the engine started.
        stored_blocks: written since then.
        skipped_blocks: not written because too many others waited to be.
        restored_tokens: loaded since then, and attended to.
        num_restores: prefixes that came back.
        num_declined: prefixes that were there and faster to read again.
        num_discarded: entries that were damaged or gone when they were read.
        num_failed: entries that could not be written.
        loading_bytes: pages of the KV memory that are being filled now.
    """

    stored_bytes: int
    found_blocks: int
    stored_blocks: int
    skipped_blocks: int
    restored_tokens: int
    num_restores: int
    num_declined: int
    num_discarded: int
    num_failed: int
    loading_bytes: int


class PrefixTier:
    """Keeps the blocks of one prefix index when the memory lets go of them.

    Args:
        index: whose blocks.
        store: where they go.
        rate: seconds of a load and of a byte; learns.
        queue_bytes: waiting to be written at most.

    Attributes:
        store, rate: see above.
        records: between pages and bytes.
        transfer_worker: does the copies.
        written: (blocks, bytes) of runs that have been stored, for whoever tells of it.
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
        self._counting = threading.Lock()  # two threads count what is queued
        self._closed = self._waits = False
        index.on_drop(self.keep)

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be had from it any more."""
        return self._closed

    @property
    def memory(self) -> KVMemory:
        """Whose blocks these are."""
        return self._memory

    def keep(self, nodes: Sequence[PrefixNode]) -> None:
        """Begin to write blocks that are about to be dropped, and those their runs begin with."""
        for node in nodes:
            run = self._run(node)
            if run:
                self._write(run)

    def _run(self, last: PrefixNode) -> list[PrefixNode]:
        """A block and those before it that belong into one entry with it and are not stored."""
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
        """On the carrier's thread."""
        try:
            if self.store.put(keys, records):
                self.written.append((len(keys), records.nbytes))
        finally:
            with self._counting:
                self._queued_bytes -= records.nbytes

    def close(self) -> None:
        """Write all blocks that nobody uses, then close the tier. Again: nothing happens."""
        if self._closed:
            return
        self._waits = True
        self._index.keep_all()
        self._closed = True
        self.transfer_worker.close()
        self.store.close()


# ---- tier transfer -------------------------------------------------------------------------------

# A thread between memory and a tier: what is asked for goes before what is put away.
#
# urgent   [load a][load b][load a] ...      one after the other, in turn
# later    [store x][store y] ...            when nothing is urgent

logger = logging.getLogger(__name__)

Work = Callable[[], None]


class TierTransferWorker:
    """Does one thing after another, beside whoever asks.

    Work that raises is logged and counts as done; nobody waits for what it would have said.
    """

    def __init__(self) -> None:
        self._urgent: deque[Work] = deque()
        self._later: deque[Work] = deque()
        self._changed = threading.Condition()
        self._busy = self._closing = False
        self._thread = threading.Thread(target=self._run, name="quire-tier", daemon=True)
        self._thread.start()

    def urgent(self, work: Work) -> None:
        """Do it behind all that is urgent already."""
        self._add(self._urgent, work)

    def later(self, work: Work) -> None:
        """Do it when nothing is urgent."""
        self._add(self._later, work)

    def _add(self, works: deque[Work], work: Work) -> None:
        with self._changed:
            works.append(work)
            self._changed.notify_all()

    def drain(self) -> None:
        """Return when everything is done."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._urgent or self._later or self._busy))

    def close(self) -> None:
        """Do what is left, then end the thread."""
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
                logger.exception("carrying KV to or from a tier failed")
