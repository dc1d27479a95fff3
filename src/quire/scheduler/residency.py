"""Requests in the KV memory: how they enter, grow, share prefixes, and leave."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.kv.memory import KVMemory
from quire.kv.prefix import PrefixIndex
from quire.kv.prefix_key import BlockChain
from quire.kv.prefix_node import PrefixLease
from quire.kv.sharing import fork
from quire.kv.tables import Rows
from quire.layout.pages import PageClass
from quire.offload.kv.front_room import FrontRoom
from quire.offload.prefix_store.prefix_identities import PrefixIdentities
from quire.offload.prefix_store.restoring import Restoring
from quire.scheduler.events import EventLog
from quire.scheduler.group import note_peak, readable_tokens
from quire.scheduler.request import Request, RequestState

FINISHED = "finished"  # by themselves: why most requests leave


class Residency:
    """Rows of the KV memory on behalf of requests.

    Args:
        memory: the pool.
        prefix: finds and keeps prefixes; None where nothing is to be shared.
        identities: who may share whose prefix.
        events: told of what happens.
        front_room: moves first pages of requests to the host; None where all stay.
        restoring: loads prefixes that went elsewhere; None where they are just gone.
    """

    def __init__(
        self,
        memory: KVMemory,
        prefix: PrefixIndex | None = None,
        *,
        identities: PrefixIdentities | None = None,
        events: EventLog | None = None,
        front_room: FrontRoom | None = None,
        restoring: Restoring | None = None,
    ) -> None:
        self.memory, self.prefix = memory, prefix
        self.front_room, self.restoring = front_room, restoring
        if restoring is not None:
            restoring.make_room, restoring.publish = self.make_room, self._publish
        if front_room is not None:
            front_room.let_go, front_room.drop_cached = self._let_go, self.drop_cached
        self.identities = identities or PrefixIdentities()
        self.events = events or EventLog()

    # ---- room ----------------------------------------------------------------------------------

    @property
    def idle_bytes(self) -> int:
        """Bytes of cached prefixes that can be dropped."""
        return 0 if self.prefix is None else self.prefix.idle_bytes

    @property
    def available_bytes(self) -> int:
        """Bytes that are free or can be freed at no cost to anybody who runs."""
        return self.memory.free_bytes + self.idle_bytes

    def make_room(self, pages: dict[PageClass, int]) -> bool:
        """Drop cached prefixes until so many pages fit; say whether they do."""
        if self.memory.fits(pages):
            return True
        return self.prefix is not None and self.prefix.reclaim(pages)

    def drop_cached(self) -> None:
        """Drop every cached prefix that nobody uses."""
        if self.prefix is not None:
            self.prefix.clear()

    def can_grow(self, requests: Sequence[Request], tokens: Sequence[int]) -> bool:
        """Whether these requests can take so many more tokens each, cached prefixes dropped."""
        rows, counts = rows_of(requests), np.array(tokens, dtype=np.int32)
        if self.memory.can_grow(rows, counts):
            return True
        if self._reclaims(rows, counts):
            return True
        while self.front_room is not None and self.front_room.move_some():
            if self._reclaims(rows, counts):
                return True
        return False

    def _reclaims(self, rows: Rows, counts: NDArray[np.int32]) -> bool:
        """Whether rows can grow once cached prefixes are dropped."""
        # a store of runs can lack a long piece where all free pages together would do
        reclaimed = self.make_room(self.memory.pages_to_grow(rows, counts))
        return reclaimed and self.memory.can_grow(rows, counts)

    # ---- entering and leaving ------------------------------------------------------------------

    def look_up(self, request: Request, most_tokens: int | None = None) -> PrefixLease | None:
        """Hold the cached prefix of a request, to enter with or to give back.

        One that others are to be copied from finds no more than they have in common.
        One whose prompt is scored reads all of it again: scores need the logits of every token.
        One that will evict finds what it would hold before its first eviction, so that neither its
        answer nor its peak depends on what is cached.

        Args:
            request: waits.
            most_tokens: of use, where its own KV follows from there on; None for all.
        """
        if self.prefix is None:
            return None
        identity = self.identities.of(request)
        if request.scores_prompt:
            return PrefixLease(identity)
        wanted = min(readable_tokens(request), request.exact_tokens + 1)
        if most_tokens is not None:
            wanted = min(wanted, most_tokens + 1)
        if request.chain is None or request.chain.identity != identity:
            request.chain = BlockChain(identity, self.prefix.block_tokens, request.token_ids)
        blocks = request.chain.blocks(wanted - 1)  # one token at least is left to compute
        return self.prefix.match_blocks(identity, blocks, statistics=request.statistics)

    def give_back(self, lease: PrefixLease | None) -> None:
        """Let go of what `look_up` held."""
        if self.prefix is not None and lease is not None:
            self.prefix.release(lease)

    def enter(self, request: Request, lease: PrefixLease | None) -> None:
        """Give a request a row, with the pages of its cached prefix.

        Raises:
            OutOfPages: there is none; nothing was changed.
        """
        if self.prefix is not None and lease is not None and lease.nodes:
            request.row = self.prefix.start(lease, statistics=request.statistics)
            request.num_computed = lease.tokens
        else:
            request.row = self.memory.start(request.statistics)
        request.lease, request.exact, request.replayed = lease, True, 0
        request.snapshot_ends = self._snapshot_ends(request)
        if self.prefix is not None and lease is not None:
            self.prefix.count(request.num_tokens, lease)
        request.count_cached(0, request.num_computed)
        if self.restoring is not None:
            self.restoring.begin(request)
        self.note_entry(request)

    def _snapshot_ends(self, request: Request) -> tuple[int, ...]:
        """Tokens behind which what is remembered of a prompt is to be kept for others.

        The last whole block of the prompt, for who asks more behind it; and where another prompt
        began like this one, for the next that does.
        """
        lease, prefix = request.lease, self.prefix
        if prefix is None or not request.statistics or not isinstance(lease, PrefixLease):
            return ()
        most = min(len(request.prompt_token_ids) - 1, request.exact_tokens)
        ends = {min(lease.known_tokens, most), most // prefix.block_tokens * prefix.block_tokens}
        return tuple(sorted(end for end in ends if end > lease.tokens))

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

    def leave(self, request: Request, reason: str) -> None:
        """Take a request out and free what only it holds."""
        kv_bytes = self.note_peak(request)
        self.memory.release([request.row])
        self.note_gone(request, kv_bytes, reason)

    def note_peak(self, request: Request) -> int:
        """Remember the most bytes of a request that is about to go; return what it refers to."""
        row = request.row
        group = request.group or request.apart
        if group is not None:
            note_peak(self.memory, group)
        request.kv_peak_bytes = max(request.kv_peak_bytes, int(self.memory.peak_bytes[row]))
        return self.memory.row_bytes(row)

    def note_gone(self, request: Request, kv_bytes: int, reason: str) -> None:
        """A request's row has been released."""
        self.stop_sharing(request)
        if self.restoring is not None:
            self.restoring.forget(request)
        request.furthest_tokens = max(request.furthest_tokens, request.num_computed)
        request.row, request.num_computed = -1, 0
        self.events.emit("freed", request, kv_bytes=kv_bytes, reason=reason)

    def come_back(self, request: Request, row: int, length: int) -> None:
        """A request's KV has been copied back into pages of its own.

        It holds the prefix it once shared again, as far as that is still there, so that what it
        fills from now on is published behind it.
        """
        request.row, request.num_computed = row, length
        self.note_entry(request)
        if self.prefix is not None and request.exact:
            tokens = request.token_ids(0, length + 1)
            request.lease = self.prefix.match(self.identities.of(request), tokens)

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
        if self.prefix is None:
            return
        block = self.prefix.block_tokens
        for request, count in zip(requests, tokens, strict=True):
            if request.num_computed % block + count >= block:
                self._publish(request, request.num_computed + count)

    def _publish(self, request: Request, length: int) -> None:
        lease = request.lease
        assert self.prefix is not None
        if lease is not None and lease.publishes and not self._on_host(request.row, lease.tokens):
            self.prefix.publish(lease, request.row, request.token_ids(lease.tokens, length))

    def _let_go(self, request: Request) -> None:
        """A request's first pages are about to move: what it has published stays with others."""
        if request.lease is not None:
            self.stop_sharing(request)
            self.drop_cached()

    def _on_host(self, row: int, token: int) -> bool:
        """Whether the page of a token is on the host, where nobody could borrow it."""
        tables = self.memory.tables.values()
        return any(token < int(t.staged[row]) * t.group.page_class.tokens for t in tables)

    def confirm(self, requests: Sequence[Request]) -> None:
        """A step has run: what it published is there, and statistics can be kept."""
        if self.prefix is None:
            return
        self.prefix.confirm()
        for request in requests:
            at_end = request.num_computed in request.snapshot_ends
            if at_end and request.exact and request.lease is not None:
                self.prefix.snapshot(request.lease, request.row)

    def withdraw(self) -> None:
        """A step has failed: what it published is not there."""
        if self.prefix is not None:
            self.prefix.withdraw()

    def borrows_unwritten(self, request: Request) -> bool:
        """Whether a request shares blocks that the step being planned has yet to write."""
        prefix, lease = self.prefix, request.lease
        return prefix is not None and lease is not None and prefix.is_pending(lease)

    def stop_sharing(self, request: Request) -> None:
        """The row's pages are no longer those of its tokens, or no longer needed."""
        self.give_back(request.lease)
        request.lease = None

    def copy(self, parent: Request, child: Request) -> None:
        """Let a request without KV begin with all that another has, in shared pages.

        Raises:
            OutOfPages: no row, or no pages for what cannot be shared; nothing was changed.
        """
        child.row = fork(self.memory, parent.row)
        child.num_computed, child.exact = parent.num_computed, parent.exact
        share_evictions(parent, child)
        if self.prefix is not None and parent.lease is not None:
            child.lease = self.prefix.share(parent.lease)
        if not child.entries:
            child.cached_tokens = child.charged_cached_tokens = parent.cached_tokens
        child.state = RequestState.RUNNING
        self.note_entry(child)


def share_evictions(parent: Request, child: Request) -> None:
    """Let a copy have lost what its parent has; what it lost later itself it will lose again."""
    child.trace[: parent.replayed] = parent.trace[: parent.replayed]
    child.replayed = parent.replayed
    if child.unsettled or not parent.unsettled:
        child.eviction, child.selection = parent.eviction, parent.selection
        child.unsettled = parent.unsettled
    if len(child.trace) == child.replayed:  # its own past is that of its parent
        child.num_evictions, child.evicted_tokens = parent.num_evictions, parent.evicted_tokens


def rows_of(requests: Sequence[Request]) -> NDArray[np.int64]:
    """Their rows of the memory."""
    return np.fromiter((r.row for r in requests), dtype=np.int64, count=len(requests))
