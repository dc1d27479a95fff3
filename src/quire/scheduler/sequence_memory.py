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
from quire.scheduler.request import Request
from quire.scheduler.request_parts import RequestState

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
        reclaimed = self.sharing.free_pages(self.memory.pages_to_grow(rows, counts))
        return reclaimed and self.memory.can_grow(rows, counts)

    # ---- allocate and free -----------------------------------------------------------------------

    def allocate(self, request: Request, lease: PrefixLease | None) -> None:
        """Give a request a row, with the pages of its cached prefix.

        Raises:
            OutOfPages: there is none; nothing was changed.
        """
        prefix = self.sharing.prefix
        if prefix is not None and lease is not None and lease.nodes:
            request.memory.row = prefix.start(lease, statistics=request.memory.statistics)
            request.progress.num_computed = lease.tokens
        else:
            request.memory.row = self.memory.start(request.memory.statistics)
        request.memory.lease, request.eviction.exact, request.eviction.replayed = lease, True, 0
        request.memory.snapshot_ends = self.sharing.snapshot_ends(request)
        if prefix is not None and lease is not None:
            prefix.count(request.num_tokens, lease)
        request.count_cached(0, request.progress.num_computed)
        if self.prefix_loader is not None:
            self.prefix_loader.begin(request)
        self.note_entry(request)

    def note_entry(self, request: Request) -> None:
        """Count an entry, however it came about, and tell of it."""
        request.progress.num_admissions += 1
        request.progress.admitted_tokens = request.num_tokens
        request.memory.chain = None  # its tokens change from now on
        shared = 0 if request.memory.lease is None else request.memory.lease.tokens
        self.events.emit("admitted", request, tokens=request.num_tokens, cached_tokens=shared)
        if shared:
            kv_bytes = self.memory.row_bytes(request.memory.row)
            self.events.emit("shared", request, tokens=shared, kv_bytes=kv_bytes)

    def free(self, request: Request, reason: str) -> None:
        """Take a request out and free what only it holds."""
        kv_bytes = self.note_peak(request)
        self.memory.release([request.memory.row])
        self.note_freed(request, kv_bytes, reason)

    def note_peak(self, request: Request) -> int:
        """Remember the most bytes of a request that is about to go; return what it refers to."""
        row = request.memory.row
        group = request.group or request.split_from
        if group is not None:
            note_peak(self.memory, group)
        request.memory.kv_peak_bytes = max(
            request.memory.kv_peak_bytes, int(self.memory.peak_bytes[row])
        )
        return self.memory.row_bytes(row)

    def note_freed(self, request: Request, kv_bytes: int, reason: str) -> None:
        """A request's row has been released."""
        self.sharing.stop_sharing(request)
        if self.prefix_loader is not None:
            self.prefix_loader.forget(request)
        request.progress.furthest_tokens = max(
            request.progress.furthest_tokens, request.progress.num_computed
        )
        request.memory.row, request.progress.num_computed = -1, 0
        self.events.emit("freed", request, kv_bytes=kv_bytes, reason=reason)

    def resume(self, request: Request, row: int, length: int) -> None:
        """A request's KV has been copied back into pages of its own.

        It holds the prefix it once shared again, as far as that is still there, so that what it
        fills from now on is published behind it.
        """
        request.memory.row, request.progress.num_computed = row, length
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
            if request.progress.num_computed % block + count >= block:
                self.sharing.publish(request, request.progress.num_computed + count)

    def fork(self, parent: Request, child: Request) -> None:
        """Let a request without KV begin with all that another has, in shared pages.

        Raises:
            OutOfPages: no row, or no pages for what cannot be shared; nothing was changed.
        """
        child.memory.row = fork(self.memory, parent.memory.row)
        child.progress.num_computed, child.eviction.exact = (
            parent.progress.num_computed,
            parent.eviction.exact,
        )
        share_evictions(parent, child)
        prefix = self.sharing.prefix
        if prefix is not None and parent.memory.lease is not None:
            child.memory.lease = prefix.share(parent.memory.lease)
        if not child.progress.num_admissions:
            child.progress.cached_tokens = child.progress.charged_cached_tokens = (
                parent.progress.cached_tokens
            )
        child.progress.state = RequestState.RUNNING
        self.note_entry(child)


def share_evictions(parent: Request, child: Request) -> None:
    """Let a copy have lost what its parent has; what it lost later itself it will lose again."""
    own, inherited = child.eviction, parent.eviction
    own.trace[: inherited.replayed] = inherited.trace[: inherited.replayed]
    own.replayed = inherited.replayed
    if own.pending or not inherited.pending:
        own.spec, own.selection = inherited.spec, inherited.selection
        own.pending = inherited.pending
    if len(own.trace) == own.replayed:  # its own past is that of its parent
        own.num_evictions, own.evicted_tokens = inherited.num_evictions, inherited.evicted_tokens


def rows_of(requests: Sequence[Request]) -> NDArray[np.int64]:
    """Their rows of the memory."""
    return np.fromiter((r.memory.row for r in requests), dtype=np.int64, count=len(requests))
