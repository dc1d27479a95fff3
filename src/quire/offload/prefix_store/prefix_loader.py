"""Loads cached prefixes from a tier: the start is recomputed while the end is loaded.

    memory | recomputed, chunk by chunk -> | <- loaded segments, from the end | rest: prefill
    0      m                              meet                                n

The meeting point (`restore_split`) is the root of a quadratic. It is recomputed before each
chunk from observed copy and prefill times: less is loaded over a slow or stalled link, more over a
fast one. A request that waits for its pages does not delay other requests. A second request for a
prefix that is being loaded waits for the first one and shares its pages.

Lookups of prefixes that other engines have stored since the last one.

    request A   waits .... | loads        one round trip to the store, for a limited time
    request B     waits .. | loads        shares A's lookup if that has not been sent yet

The index of a tier is a copy in this process, so a step never waits for a store. A request whose
prefix is not in the copy waits for one lookup. If the store does not respond, it is computed.

One load for several requests: later requests of a prefix wait for the first one's load.

    request A   | recomputed -> | <- loaded |          publishes its blocks
    request B   waits ............ shares the blocks of A, then continues after them

A request that waits shares the blocks of the first one as soon as these are published.
"""

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from quire.errors import OutOfPages
from quire.kv.prefix import Block, BlockChain, PrefixLease
from quire.layout.pages import PageClass
from quire.offload.prefix_store.in_flight_pages import (
    InFlightPages,
    InFlightSnapshot,
    pages_needed,
    snapshot_pages_needed,
)
from quire.offload.prefix_store.levels import PrefixLevels
from quire.offload.prefix_store.prefix_load import LoadRate, PrefixLoad, SnapshotLoad
from quire.offload.prefix_store.prefix_tier import PrefixTier, TierStats, TierTransferWorker
from quire.offload.prefix_store.store import Place
from quire.offload.split import Loading, restore_split
from quire.plan.preemption_costs import LearnedCosts
from quire.plan.rates import PrefillRates
from quire.scheduler.events import EventLog
from quire.scheduler.request import Request, prefillable_tokens
from quire.scheduler.sequence_memory import SequenceMemory


@dataclass(slots=True, eq=False)
class _Lookup:
    is_sent: bool = False
    is_done: bool = False


@dataclass(frozen=True, slots=True)
class _Waiting:
    chain: BlockChain
    lookup: _Lookup
    until_s: float


class PrefixLookups:
    """Requests that wait for a lookup.

    Args:
        levels: the tiers.
        worker: sends the lookups.
        notify: called on the worker's thread after each lookup.
        wait_s: longest wait of a request for a lookup.
        clock: seconds.
    """

    def __init__(
        self,
        levels: PrefixLevels,
        worker: TierTransferWorker,
        notify: Callable[[], None],
        *,
        wait_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._levels, self._worker, self._notify = levels, worker, notify
        self._wait_s, self._clock = wait_s, clock
        self._newest = _Lookup(is_sent=True)
        self._waiting: dict[Request, _Waiting] = {}

    def __contains__(self, request: Request) -> bool:
        return request in self._waiting

    def begin(self, request: Request, chain: BlockChain) -> bool:
        """Let a request wait for a lookup; return False if no store responds."""
        if not self._levels.can_look_up:
            return False
        if self._newest.is_sent:
            self._newest = lookup = _Lookup()
            self._worker.urgent(lambda: self._look_up(lookup))
        until_s = self._clock() + self._wait_s
        self._waiting[request] = _Waiting(chain, self._newest, until_s)
        return True

    def take(self, request: Request) -> BlockChain | None:
        """The blocks of a request whose wait is over; None while it waits."""
        waiting = self._waiting[request]
        if not waiting.lookup.is_done and self._clock() < waiting.until_s:
            return None
        del self._waiting[request]
        return waiting.chain

    def forget(self, request: Request) -> None:
        """A request no longer waits."""
        self._waiting.pop(request, None)

    def _look_up(self, lookup: _Lookup) -> None:
        lookup.is_sent = True
        try:
            self._levels.look_up()
        finally:
            lookup.is_done = True
            self._notify()


class LoadStarts:
    """Finds stored prefixes and allocates the pages of their loads.

    Args:
        tier: holds the prefixes.
        sequence_memory: evicts cached prefixes to free pages.
        clock: seconds.
    """

    def __init__(
        self, tier: PrefixTier, sequence_memory: SequenceMemory, clock: Callable[[], float]
    ) -> None:
        assert sequence_memory.prefix is not None, "a prefix load needs the prefix cache"
        self._tier, self._memory, self._sequence_memory = tier, tier.memory, sequence_memory
        self._block_tokens, self._clock = sequence_memory.prefix.block_tokens, clock

    def find(self, request: Request, chain: BlockChain | None) -> list[tuple[Block, Place]]:
        """The stored blocks after a request's cached prefix, up to one with its statistics."""
        used = self._memory.kept_with_prefix(request.memory.statistics)
        if chain is None or not self.can_load(request):
            return []
        at, most = request.progress.num_computed, self._max_tokens(request)
        found = self._tier.levels.find(block for block in chain.blocks(most) if block.end > at)
        while used and found and not self._has_snapshot(found[-1][0], used):
            found.pop()
        return found

    def can_load(self, request: Request) -> bool:
        """Whether the prefix of a request may be loaded."""
        shares = isinstance(request.memory.lease, PrefixLease)
        if not shares or request.computes_whole_prompt or self._tier.is_closed:
            return False
        return request.memory.swapped is None  # a swapped tail follows the recomputed head

    def lacks_blocks(self, request: Request, found: Sequence[tuple[Block, Place]]) -> bool:
        """Whether a request that may load has whole blocks beside those that were found."""
        end = found[-1][0].end if found else request.progress.num_computed
        return self.can_load(request) and self._max_tokens(request) - end >= self._block_tokens

    def _max_tokens(self, request: Request) -> int:
        """Tokens up to which a prefix is loaded; at least one is computed."""
        at = request.progress.num_computed
        return min(at + prefillable_tokens(request), request.exact_tokens + 1) - 1

    def _has_snapshot(self, block: Block, used: frozenset[str]) -> bool:
        return self._tier.levels.place_of(self._tier.snapshots.key(block, used)) is not None

    def allocate(
        self, request: Request, first: int, found: Sequence[tuple[Block, Place]]
    ) -> PrefixLoad | None:
        """Allocate the pages of a load; None if there are too few.

        Args:
            request: a request that has just been admitted.
            first: first token to load.
            found: the blocks that `find` returned.
        """
        end = found[-1][0].end
        used = request.memory.statistics
        needed = pages_needed(self._memory, end - request.progress.num_computed)
        for page_class, count in snapshot_pages_needed(self._memory, used, end).items():
            needed[page_class] = needed.get(page_class, 0) + count
        if not self._sequence_memory.evict_cached(needed):
            return None
        try:
            pages = InFlightPages(self._memory, first, end, self._block_tokens)
        except OutOfPages:
            return None
        try:
            snapshot = self._snapshot_load(found[-1][0], used)
        except OutOfPages:
            pages.release()
            return None
        return PrefixLoad(self._tier, pages, found, snapshot, self._clock)

    def _snapshot_load(self, block: Block, used: frozenset[str]) -> SnapshotLoad | None:
        """Load of the statistics at the end of a block; None without statistics."""
        if not used:
            return None
        key, kept = self._tier.snapshots.key(block, used), self._memory.kept_with_prefix(used)
        place = self._tier.levels.place_of(key) if kept else None
        if kept and place is None:
            raise OutOfPages("the statistics were evicted meanwhile")
        pages = InFlightSnapshot(self._memory, used, block.end)
        return SnapshotLoad(pages, key, place, self._tier.snapshots.num_bytes(block.end, used))


@dataclass(slots=True, eq=False)
class RequestPrefixLoad:
    """The prefix load of one request.

    Attributes:
        load: load of the end of the prefix.
        found: the blocks to load, and the location of each.
        began_at: computed tokens of the request when the load began.
        started_s: clock reading when the load began.
        busy: whether the load is in the queue of the transfer worker.
        waits: whether the request could only wait for its pages when it was last planned.
        is_attached: whether the loaded pages were attached to the request.
        has_ended: whether the request no longer loads.
    """

    load: PrefixLoad
    found: Sequence[tuple[Block, Place]]
    began_at: int
    started_s: float
    busy: bool = False
    waits: bool = False
    is_attached: bool = False
    has_ended: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class JoinedLoad:
    """A request's use of another request's load.

    Attributes:
        leader: the request that loads.
        load: its load.
        chain: the blocks of the request that waits.
    """

    leader: Request
    load: RequestPrefixLoad
    chain: BlockChain


class JoinedLoads:
    """Requests that wait for the load of another request.

    Args:
        sequence_memory: the loading requests publish their blocks to its prefix cache.

    Attributes:
        num_joined: number of requests that have joined a load.
    """

    def __init__(self, sequence_memory: SequenceMemory) -> None:
        self.num_joined = 0
        self._sequence_memory = sequence_memory
        self._leaders: dict[bytes, tuple[Request, RequestPrefixLoad]] = {}
        self._loads: dict[Request, RequestPrefixLoad] = {}
        self._joined: dict[Request, JoinedLoad] = {}

    def __contains__(self, request: Request) -> bool:
        return request in self._joined

    def of(self, request: Request) -> JoinedLoad | None:
        """The load that a request waits for; None if it waits for none."""
        return self._joined.get(request)

    def offer(self, request: Request, load: RequestPrefixLoad) -> None:
        """Let later requests join a load."""
        self._loads[request] = load
        for block, _ in load.found:
            self._leaders.setdefault(block.key, (request, load))

    def join(
        self, request: Request, chain: BlockChain, found: Sequence[tuple[Block, Place]]
    ) -> bool:
        """Wait for the load of a request's next block; return False if there is none.

        A request with statistics needs those at the end of the load. It joins only a request with
        the same statistics whose load ends within its own prompt.

        Args:
            request: a request that has just been admitted.
            chain: its blocks.
            found: its stored blocks.
        """
        leader, load = self._leaders.get(found[0][0].key, (None, None))
        if leader is None or load is None or leader is request:
            return False
        kept = self._sequence_memory.memory.kept_with_prefix
        used = kept(request.memory.statistics)
        if used:
            last = load.found[-1][0].key
            within = any(block.key == last for block, _ in found)
            if used != kept(leader.memory.statistics) or not within:
                return False
        self._joined[request] = JoinedLoad(leader, load, chain)
        self.num_joined += 1
        return True

    def follow(self, request: Request) -> bool:
        """Share the blocks published so far; return whether the load that it waits for has ended.

        A load has ended when its pages were attached, and when it was cancelled or has failed.
        """
        joined, lease = self._joined[request], request.memory.lease
        if isinstance(lease, PrefixLease):
            self._extend(request, lease, joined.chain)
        if joined.load.has_ended:
            del self._joined[request]
        return joined.load.has_ended

    def _extend(self, request: Request, lease: PrefixLease, chain: BlockChain) -> None:
        assert self._sequence_memory.prefix is not None, "a lease belongs to a prefix cache"
        at = request.progress.num_computed
        most = min(at + prefillable_tokens(request), request.exact_tokens + 1) - 1
        end = self._sequence_memory.prefix.extend(
            lease,
            request.memory.row,
            (block for block in chain.blocks(most) if block.end > at),
            statistics=request.memory.statistics,
        )
        request.progress.num_computed = end
        request.count_cached(at, end)

    def forget(self, request: Request) -> None:
        """A request no longer loads or waits: its load has ended, or its row was freed."""
        self._joined.pop(request, None)
        load = self._loads.pop(request, None)
        if load is None:
            return
        load.has_ended = True
        for block, _ in load.found:
            if self._leaders.get(block.key, (None, None))[0] is request:
                del self._leaders[block.key]


WAIT_S = 0.02
"""Longest wait for pages in a step without other work, after which the caller gets control."""
_GRACE_S = 0.05  # a segment may be this late before the link counts as stalled
_WHOLE_GRACE_S = 0.5  # the same, if the engine is to recompute nothing
_LATE = 2  # multiple of a segment's predicted time after which the link counts as stalled


class PrefixLoader:
    """Loads prefixes of newly admitted requests.

    Args:
        tier: holds the prefixes.
        costs: prefill times.
        sequence_memory: loaded prefixes are published to its prefix cache.
        events: receives `prefix_stored` and `prefix_loaded` events.
        clock: seconds.
        loads_whole: whether stored tokens are recomputed only if a tier stalls.

    Attributes:
        costs: prefill times that decide what is loaded.
        waits: whether a request has waited for its pages since `begin_plan`.
    """

    def __init__(
        self,
        tier: PrefixTier,
        costs: LearnedCosts,
        sequence_memory: SequenceMemory,
        events: EventLog,
        clock: Callable[[], float] = time.perf_counter,
        *,
        loads_whole: bool = False,
    ) -> None:
        self.tier, self._loads_whole = tier, loads_whole
        self._grace_s = grace_s = _WHOLE_GRACE_S if loads_whole else _GRACE_S
        self.waits = False
        self._sequence_memory = sequence_memory
        self.costs, self._events, self._clock = costs, events, clock
        assert sequence_memory.prefix is not None, "a prefix load needs the prefix cache"
        self._memory, self._block_tokens = tier.memory, sequence_memory.prefix.block_tokens
        self._token_bytes = tier.records.record_bytes / self._block_tokens
        self._rate = LoadRate(tier, self._token_bytes, clock)
        self._open: dict[Request, RequestPrefixLoad] = {}
        self._joined = JoinedLoads(sequence_memory)
        self._starts = LoadStarts(tier, sequence_memory, clock)
        self._lookups = PrefixLookups(
            tier.levels, tier.transfer_worker, self._notify, wait_s=grace_s, clock=clock
        )
        self._arrived = threading.Condition()
        self._num_arrived = self._num_seen = 0
        self._num_loads = self._num_declined = self._loaded_tokens = 0

    @property
    def stats(self) -> TierStats:
        """Contents and counters of the tier."""
        levels = self.tier.levels.stats
        return TierStats(
            stored_bytes=sum(level.stored_bytes for level in levels),
            found_blocks=sum(level.found_blocks for level in levels),
            stored_blocks=sum(level.stored_blocks for level in levels),
            skipped_blocks=self.tier.num_skipped,
            loaded_tokens=self._loaded_tokens,
            num_loads=self._num_loads,
            num_joined=self._joined.num_joined,
            num_declined=self._num_declined,
            promoted_blocks=self.tier.num_promoted,
            num_discarded=sum(level.num_discarded for level in levels),
            num_failed=sum(level.num_failed for level in levels),
            loading_bytes=self.loading_bytes,
            levels=levels,
        )

    @property
    def loading_bytes(self) -> int:
        """Bytes of KV pages with loads in flight."""
        return sum(found.load.num_bytes for found in self._open.values())

    def pages_in_flight(self, request: Request) -> dict[PageClass, int]:
        """Pages allocated for a request's load, in addition to those of its row."""
        found = self._open.get(request)
        if found is None:
            return {}
        return pages_needed(self._memory, found.load.end - found.load.pages.first)

    # ---- a request -----------------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        """Start to load the stored tokens after a request's cached prefix, if that saves time.

        If another request is loading the same tokens, the request waits for these. If a store of
        other engines may have more of them, it waits for a lookup there.
        """
        chain = request.memory.chain
        found = self._starts.find(request, chain)
        lacks = chain is not None and self._starts.lacks_blocks(request, found)
        if not (lacks and chain is not None and self._lookups.begin(request, chain)):
            self._begin(request, chain)

    def _begin(self, request: Request, chain: BlockChain | None) -> None:
        found = self._starts.find(request, chain)
        if not found or chain is None:
            self._rate.refresh()
            return
        if self._joined.join(request, chain, found):
            return
        self._rate.learn()
        at, end = request.progress.num_computed, found[-1][0].end
        first = at + self._recompute_tokens(at, end - at, self._rate.loading(found))
        if first >= end:
            self._num_declined += 1
            self._rate.probe(*found[-1])
            return
        load = self._starts.allocate(request, first, found)
        if load is not None:
            self._open[request] = opened = RequestPrefixLoad(load, found, at, self._clock())
            self._joined.offer(request, opened)
            self._submit(opened)

    def forget(self, request: Request) -> None:
        """Cancel the load of a request that ends or is preempted, and free its pages."""
        found = self._open.pop(request, None)
        self._joined.forget(request)
        self._lookups.forget(request)
        if found is not None:
            found.load.stop()
            found.load.release()

    # ---- steps ---------------------------------------------------------------------------------

    def begin_plan(self) -> None:
        """Reset `waits` for a new step plan, and emit `stored` events."""
        self.waits = False
        while self.tier.written:
            blocks, num_bytes = self.tier.written.popleft()
            self._events.emit("prefix_stored", None, blocks=blocks, kv_bytes=num_bytes)

    def wait(self) -> bool:
        """Wait up to `WAIT_S` seconds for pages; whether any have arrived."""
        with self._arrived:
            came = self._arrived.wait_for(lambda: self._num_arrived > self._num_seen, WAIT_S)
            self._num_seen = self._num_arrived
        return came

    def is_waiting(self, request: Request) -> bool:
        """Whether a request can only wait for its pages."""
        waiting = (self._open, self._joined, self._lookups)
        return self.waits and any(request in requests for requests in waiting)

    def may_read(self, request: Request, budget: int) -> int:
        """Tokens of a budget that a request may prefill now: 0 while it waits for its pages."""
        if not budget or not self._may_begin(request):
            return 0
        found = self._open.get(request)
        if found is None:
            return budget
        found.waits = False
        self._rate.learn(found.load.segments)
        at, load = request.progress.num_computed, found.load
        into_block = at % self._block_tokens
        if into_block:
            return min(budget, self._block_tokens - into_block)
        if at >= load.end:
            self.forget(request)
            return budget
        if load.loaded_from <= at:
            self._meet(request, found)
            return budget
        tokens = self._prefill_tokens(found, at)
        if tokens >= load.end - at:  # no page has been loaded, and the step does not wait
            self._num_declined += not load.failed
            self.forget(request)
            return budget
        found.waits = not tokens
        self.waits |= found.waits
        return min(budget, tokens)

    def _may_begin(self, request: Request) -> bool:
        """Whether a request need not wait for a lookup or for the load of another request."""
        if request in self._lookups:
            chain = self._lookups.take(request)
            if chain is None:
                self.waits = True
                return False
            self._begin(request, chain)
        joined = self._joined.of(request)
        if joined is not None:
            if not self._joined.follow(request):
                self.waits |= joined.load.waits
                return False
            if joined.load.is_attached:  # then more may be stored
                self._begin(request, joined.chain)
        return True

    def _prefill_tokens(self, found: RequestPrefixLoad, at: int) -> int:
        """Tokens to prefill before the next check; sets where the load stops."""
        load = found.load
        gap = load.loaded_from - at
        if load.failed:
            return gap
        loading = self._rate.loading(found.found)
        token_s = loading.token_s * len(self._open)
        in_flight = max(load.loaded_from - load.claimed_from, self._block_tokens)
        late_s = self._clock() - load.moved_s
        stalled = found.busy and late_s > _LATE * in_flight * token_s + self._grace_s
        if stalled:
            token_s = max(token_s, late_s / in_flight)
        loading = Loading(token_s=token_s, call_s=loading.call_s)
        recompute = self._recompute_tokens(at, gap, loading, stalled=stalled)
        try:
            load.extend_down(at + recompute)
        except OutOfPages:
            recompute = max(recompute, load.pages.first - at)
        self._submit(found)
        return min(recompute, gap if stalled else load.claimed_from - at)

    def _meet(self, request: Request, found: RequestPrefixLoad) -> None:
        """Attach the loaded pages: the prefill has reached them."""
        load, at = found.load, request.progress.num_computed
        load.stop()
        if load.attach(request.memory.row):
            tokens = load.end - at
            request.progress.num_computed = load.end
            request.count_cached(at, load.end)
            self._num_loads += 1
            self._loaded_tokens += tokens
            self._sequence_memory.publish(request, load.end)
            self._sequence_memory.snapshot(request)
            found.is_attached = True
            self._events.emit(
                "prefix_loaded",
                request,
                tokens=tokens,
                computed_tokens=at - found.began_at,
                kv_bytes=round(tokens * self._token_bytes),
                seconds=self._clock() - found.started_s,
            )
        self.forget(request)

    # ---- rates ---------------------------------------------------------------------------------

    def _recompute_tokens(
        self, at: int, tokens: int, loading: Loading, *, stalled: bool = False
    ) -> int:
        """Number of the tokens after `at` to recompute while the others are loaded."""
        if self._loads_whole and not stalled:
            return 0
        prefill = self.costs.costs.prefill
        after = PrefillRates(
            call_s=prefill.call_s,
            token_s=prefill.token_s + 2 * at * prefill.square_s,
            square_s=prefill.square_s,
        )
        return restore_split(after, loading, tokens, self._block_tokens)

    # ---- transfer ------------------------------------------------------------------------------

    def _submit(self, found: RequestPrefixLoad) -> None:
        if not found.busy and found.load.is_wanted:
            found.busy = True
            found.load.moved_s = self._clock()
            self.tier.transfer_worker.urgent(partial(self._load_segment, found))

    def _load_segment(self, found: RequestPrefixLoad) -> None:
        """Load a segment on the transfer thread, then queue the next one after other loads."""
        more = False
        try:
            more = found.load.load_segment()
        finally:
            found.busy = more
            if more:
                self.tier.transfer_worker.urgent(partial(self._load_segment, found))
            self._notify()

    def _notify(self) -> None:
        """Wake a step that waits for pages or for a lookup."""
        with self._arrived:
            self._num_arrived += 1
            self._arrived.notify_all()


def closing(owner: object, prefix_loader: PrefixLoader | None) -> Callable[[], None]:
    """Function that closes the tier; also runs when its owner is collected or the process ends."""
    if prefix_loader is None:
        return lambda: None
    return weakref.finalize(owner, prefix_loader.tier.close)


def in_flight_bytes(prefix_loader: PrefixLoader | None) -> Callable[[], int]:
    """Function that returns the bytes of pages being loaded; 0 without a loader."""
    return int if prefix_loader is None else lambda: prefix_loader.loading_bytes
