"""The pages of requests in the KV memory: allocate, grow, share, free."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.kv.prefix_blocks import PrefixLease
from quire.kv.sharing import fork
from quire.kv.tables import Rows
from quire.scheduler.events import EventLog
from quire.scheduler.group import note_peak
from quire.scheduler.offload_port import KVOffloader, PrefixLoads
from quire.scheduler.prefix_sharing import PrefixSharing
from quire.scheduler.request import Request, RequestState

FINISHED = "finished"  # by themselves: why most requests leave


class SequenceMemory:
    """Allocates and frees the pages of requests, prefix cache included.

    Args:
        sharing: the prefix cache over the memory.
        events: told of what happens.
        prefix_offloader: moves first pages of requests to the host; None where all stay.
        prefix_loader: loads prefixes that went elsewhere; None where they are just gone.
    """

    def __init__(
        self,
        sharing: PrefixSharing,
        *,
        events: EventLog | None = None,
        prefix_offloader: KVOffloader | None = None,
        prefix_loader: PrefixLoads | None = None,
    ) -> None:
        self.sharing, self.memory = sharing, sharing.memory
        self.prefix_offloader, self.prefix_loader = prefix_offloader, prefix_loader
        self.events = events or EventLog()

    # ---- free pages ----------------------------------------------------------------------------

    def can_grow(self, requests: Sequence[Request], tokens: Sequence[int]) -> bool:
        """Whether these requests can take so many more tokens each, cached prefixes dropped."""
        rows, counts = rows_of(requests), np.array(tokens, dtype=np.int32)
        if self.memory.can_grow(rows, counts):
            return True
        if self._reclaims(rows, counts):
            return True
        while self.prefix_offloader is not None and self.prefix_offloader.move_some():
            if self._reclaims(rows, counts):
                return True
        return False

    def _reclaims(self, rows: Rows, counts: NDArray[np.int32]) -> bool:
        """Whether rows can grow once cached prefixes are dropped."""
        # a store of runs can lack a long piece where all free pages together would do
        reclaimed = self.sharing.make_room(self.memory.pages_to_grow(rows, counts))
        return reclaimed and self.memory.can_grow(rows, counts)

    # ---- allocate and free -----------------------------------------------------------------------

    def allocate(self, request: Request, lease: PrefixLease | None) -> None:
        """Give a request a row, with the pages of its cached prefix.

        Raises:
            OutOfPages: there is none; nothing was changed.
        """
        prefix = self.sharing.prefix
        if prefix is not None and lease is not None and lease.nodes:
            request.row = prefix.start(lease, statistics=request.statistics)
            request.num_computed = lease.tokens
        else:
            request.row = self.memory.start(request.statistics)
        request.lease, request.exact, request.replayed = lease, True, 0
        request.snapshot_ends = self.sharing.snapshot_ends(request)
        if prefix is not None and lease is not None:
            prefix.count(request.num_tokens, lease)
        request.count_cached(0, request.num_computed)
        if self.prefix_loader is not None:
            self.prefix_loader.begin(request)
        self.note_entry(request)

    def note_entry(self, request: Request) -> None:
        """Count an entry, however it came about, and tell of it."""
        request.entries += 1
        request.entered_tokens = request.num_tokens
        request.chain = None  # its tokens change from now on
        shared = 0 if request.lease is None else request.lease.tokens
        self.events.emit("admitted", request, tokens=request.num_tokens, cached_tokens=shared)
        if shared:
            kv_bytes = self.memory.row_bytes(request.row)
            self.events.emit("shared", request, tokens=shared, kv_bytes=kv_bytes)

    def free(self, request: Request, reason: str) -> None:
        """Take a request out and free what only it holds."""
        kv_bytes = self.note_peak(request)
        self.memory.release([request.row])
        self.note_freed(request, kv_bytes, reason)

    def note_peak(self, request: Request) -> int:
        """Remember the most bytes of a request that is about to go; return what it refers to."""
        row = request.row
        group = request.group or request.apart
        if group is not None:
            note_peak(self.memory, group)
        request.kv_peak_bytes = max(request.kv_peak_bytes, int(self.memory.peak_bytes[row]))
        return self.memory.row_bytes(row)

    def note_freed(self, request: Request, kv_bytes: int, reason: str) -> None:
        """A request's row has been released."""
        self.sharing.stop_sharing(request)
        if self.prefix_loader is not None:
            self.prefix_loader.forget(request)
        request.furthest_tokens = max(request.furthest_tokens, request.num_computed)
        request.row, request.num_computed = -1, 0
        self.events.emit("freed", request, kv_bytes=kv_bytes, reason=reason)

    def resume(self, request: Request, row: int, length: int) -> None:
        """A request's KV has been copied back into pages of its own.

        It holds the prefix it once shared again, as far as that is still there, so that what it
        fills from now on is published behind it.
        """
        request.row, request.num_computed = row, length
        self.note_entry(request)
        self.sharing.rejoin(request, length)

    # ---- growing -------------------------------------------------------------------------------

    def grow(self, requests: Sequence[Request], tokens: Sequence[int]) -> None:
        """Make room for more tokens, and publish the blocks that they fill.

        Raises:
            OutOfPages: see `KVMemory.grow`.
        """
        copied_bytes = self.memory.copied_bytes
        self.memory.grow(rows_of(requests), np.array(tokens, dtype=np.int32))
        if kv_bytes := self.memory.copied_bytes - copied_bytes:  # shared pages that are written now
            self.events.emit("copied", requests[0], kv_bytes=kv_bytes)
        if self.sharing.prefix is None:
            return
        block = self.sharing.prefix.block_tokens
        for request, count in zip(requests, tokens, strict=True):
            if request.num_computed % block + count >= block:
                self.sharing.publish(request, request.num_computed + count)

    def fork(self, parent: Request, child: Request) -> None:
        """Let a request without KV begin with all that another has, in shared pages.

        Raises:
            OutOfPages: no row, or no pages for what cannot be shared; nothing was changed.
        """
        child.row = fork(self.memory, parent.row)
        child.num_computed, child.exact = parent.num_computed, parent.exact
        share_evictions(parent, child)
        prefix = self.sharing.prefix
        if prefix is not None and parent.lease is not None:
            child.lease = prefix.share(parent.lease)
        if not child.entries:
            child.cached_tokens = child.charged_cached_tokens = parent.cached_tokens
        child.state = RequestState.RUNNING
        self.note_entry(child)


def share_evictions(parent: Request, child: Request) -> None:
    """Let a copy have lost what its parent has; what it lost later itself it will lose again."""
    child.trace[: parent.replayed] = parent.trace[: parent.replayed]
    child.replayed = parent.replayed
    if child.pending or not parent.pending:
        child.eviction, child.selection = parent.eviction, parent.selection
        child.pending = parent.pending
    if len(child.trace) == child.replayed:  # its own past is that of its parent
        child.num_evictions, child.evicted_tokens = parent.num_evictions, parent.evicted_tokens


def rows_of(requests: Sequence[Request]) -> NDArray[np.int64]:
    """Their rows of the memory."""
    return np.fromiter((r.row for r in requests), dtype=np.int64, count=len(requests))
