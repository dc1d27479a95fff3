"""The pages of requests in the KV memory: allocate, grow, share, free."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from quire.kv.prefix_blocks import PrefixLease
from quire.kv.sharing import fork
from quire.kv.tables import Rows
from quire.layout.pages import PageClass
from quire.scheduler.events import EventLog
from quire.scheduler.group import note_peak
from quire.scheduler.offload_port import KVOffloader, PrefixLoads
from quire.scheduler.prefix_sharing import PrefixSharing
from quire.scheduler.request import Request
from quire.scheduler.request_parts import RequestState

FINISHED = "finished"  # reason of a free when a request finished normally


class SequenceMemory:
    """Allocates and frees the pages of requests, with prefix caching.

    Args:
        sharing: the prefix cache of the KV memory.
        events: the event log; default: a new one.
        prefix_offloader: offloads the oldest pages of requests; None without KV offload.
        prefix_loader: loads cached prefixes from a second tier; None without one.
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
        """Whether each request can grow by its number of tokens.

        Evicts cached prefixes and offloads pages if needed.
        """
        rows, counts = rows_of(requests), np.array(tokens, dtype=np.int32)
        if self.memory.can_grow(rows, counts):
            return True
        return self._offload_until(lambda: self._reclaims(rows, counts))

    def free_pages(self, pages: dict[PageClass, int]) -> bool:
        """Evict cached prefixes and offload pages until these pages are free; whether they are."""
        return self._offload_until(lambda: self.sharing.free_pages(pages))

    def _offload_until(self, is_enough: Callable[[], bool]) -> bool:
        if is_enough():
            return True
        while self.prefix_offloader is not None and self.prefix_offloader.offload_some():
            if is_enough():
                return True
        return False

    def _reclaims(self, rows: Rows, counts: NDArray[np.int32]) -> bool:
        """Evict cached prefixes until rows can grow; return whether they can."""
        # a store with contiguous rows can lack a long run although enough pages are free
        reclaimed = self.sharing.free_pages(self.memory.pages_to_grow(rows, counts))
        return reclaimed and self.memory.can_grow(rows, counts)

    # ---- allocate and free -----------------------------------------------------------------------

    def allocate(self, request: Request, lease: PrefixLease | None) -> None:
        """Allocate a row for a request and share the pages of its cached prefix.

        Raises:
            OutOfPages: no row or no pages; the request is unchanged.
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
        """Count and log an admission by allocation, swap-in or fork."""
        request.progress.num_admissions += 1
        request.progress.admitted_tokens = request.num_tokens
        request.memory.chain = None  # its tokens change while it runs
        shared = 0 if request.memory.lease is None else request.memory.lease.tokens
        self.events.emit("admitted", request, tokens=request.num_tokens, cached_tokens=shared)
        if shared:
            kv_bytes = self.memory.row_bytes(request.memory.row)
            self.events.emit("shared", request, tokens=shared, kv_bytes=kv_bytes)

    def free(self, request: Request, reason: str) -> None:
        """Free a request's row and the pages that no other request references."""
        kv_bytes = self.note_peak(request)
        self.memory.release([request.memory.row])
        self.note_freed(request, kv_bytes, reason)

    def note_peak(self, request: Request) -> int:
        """Update the peak bytes of a request before its pages are freed.

        Returns:
            Bytes of the pages that it refers to now.
        """
        row = request.memory.row
        group = request.group or request.split_from
        if group is not None:
            note_peak(self.memory, group)
        request.memory.kv_peak_bytes = max(
            request.memory.kv_peak_bytes, int(self.memory.peak_bytes[row])
        )
        return self.memory.row_bytes(row)

    def note_freed(self, request: Request, kv_bytes: int, reason: str) -> None:
        """Update a request after its row has been released, and log it."""
        self.sharing.stop_sharing(request)
        if self.prefix_loader is not None:
            self.prefix_loader.forget(request)
        request.progress.furthest_tokens = max(
            request.progress.furthest_tokens, request.progress.num_computed
        )
        request.memory.row, request.progress.num_computed = -1, 0
        self.events.emit("freed", request, kv_bytes=kv_bytes, reason=reason)

    def resume(self, request: Request, row: int, length: int) -> None:
        """Update a request after its KV has been swapped in to private pages.

        It pins its cached prefix again, as far as that is still cached, so that its next blocks can
        be published after it.
        """
        request.memory.row, request.progress.num_computed = row, length
        self.note_entry(request)
        self.sharing.rejoin(request, length)

    # ---- growing -------------------------------------------------------------------------------

    def grow(self, requests: Sequence[Request], tokens: Sequence[int]) -> None:
        """Allocate pages for new tokens and publish the blocks that they fill.

        Raises:
            OutOfPages: see `KVMemory.grow`.
        """
        copied_bytes = self.memory.copied_bytes
        self.memory.grow(rows_of(requests), np.array(tokens, dtype=np.int32))
        self._note_growth(requests, tokens, self.memory.copied_bytes - copied_bytes)

    def try_grow(self, requests: Sequence[Request], tokens: Sequence[int]) -> bool:
        """`grow` if `can_grow`; return whether the requests have grown."""
        rows, counts = rows_of(requests), np.array(tokens, dtype=np.int32)
        copied_bytes = self.memory.copied_bytes
        if not self.memory.try_grow(rows, counts):
            if not self.can_grow(requests, tokens):
                return False
            copied_bytes = self.memory.copied_bytes
            self.memory.grow(rows, counts)
        self._note_growth(requests, tokens, self.memory.copied_bytes - copied_bytes)
        return True

    def _note_growth(
        self, requests: Sequence[Request], tokens: Sequence[int], copied_bytes: int
    ) -> None:
        if copied_bytes:  # copy on write of shared pages
            self.events.emit("copied", requests[0], kv_bytes=copied_bytes)
        if self.sharing.prefix is None:
            return
        block = self.sharing.prefix.block_tokens
        for request, count in zip(requests, tokens, strict=True):
            if request.progress.num_computed % block + count >= block:
                self.sharing.publish(request, request.progress.num_computed + count)

    def publish_known(self, requests: Sequence[Request]) -> None:
        """Publish the blocks of a launched step whose last tokens were not known when they grew.

        Args:
            requests: requests of the step; those that have ended are ignored.
        """
        prefix = self.sharing.prefix
        if prefix is None:
            return
        for request in requests:
            computed = request.progress.num_computed
            if request.is_running and computed % prefix.block_tokens == 0:
                self.sharing.publish(request, computed)
        prefix.confirm()

    def fork(self, parent: Request, child: Request) -> None:
        """Fork the KV of a running request for a request without KV, with shared pages.

        Raises:
            OutOfPages: no row, or no pages for statistics; both requests are unchanged.
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
    """Copy a parent's eviction state to its fork; later entries of the child's trace are kept."""
    own, inherited = child.eviction, parent.eviction
    own.trace[: inherited.replayed] = inherited.trace[: inherited.replayed]
    own.replayed = inherited.replayed
    if own.pending or not inherited.pending:
        own.division = inherited.division
    if len(own.trace) == own.replayed:  # the child has no evictions of its own
        own.num_evictions, own.evicted_tokens = inherited.num_evictions, inherited.evicted_tokens


def rows_of(requests: Sequence[Request]) -> NDArray[np.int64]:
    """The requests' rows of the KV memory."""
    return np.fromiter((r.memory.row for r in requests), dtype=np.int64, count=len(requests))
