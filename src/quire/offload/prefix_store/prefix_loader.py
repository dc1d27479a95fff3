"""Loads cached prefixes from a tier: the start is recomputed while the end is loaded.

    memory | recomputed, chunk by chunk -> | <- loaded segments, from the end | rest: prefill
    0      m                              meet                                n

The meeting point is the root of a quadratic (`plan.offload.restore`). It is recomputed before each
chunk from observed copy and prefill times: less is loaded over a slow or stalled link, more over a
fast one. A request that waits for its pages does not delay other requests. A second request for a
prefix that is being loaded waits for the first one and shares its pages.
"""

import threading
import time
import weakref
from collections.abc import Callable
from functools import partial

from quire.errors import OutOfPages
from quire.kv.prefix_key import BlockChain
from quire.layout.pages import PageClass
from quire.offload.kv.in_flight_pages import pages_needed
from quire.offload.prefix_store.joined_loads import JoinedLoads, RequestPrefixLoad
from quire.offload.prefix_store.load_starts import LoadStarts
from quire.offload.prefix_store.lookups import PrefixLookups
from quire.offload.prefix_store.prefix_load import LoadRate
from quire.offload.prefix_store.prefix_tier import PrefixTier, TierStats
from quire.plan.offload.split import Loading, restore_split
from quire.plan.preemption_costs import LearnedCosts
from quire.plan.rates import PrefillRates
from quire.scheduler.events import EventLog
from quire.scheduler.prefix_sharing import PrefixSharing
from quire.scheduler.request import Request

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
        sharing: the prefix cache that loaded prefixes are published to.
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
        sharing: PrefixSharing,
        events: EventLog,
        clock: Callable[[], float] = time.perf_counter,
        *,
        loads_whole: bool = False,
    ) -> None:
        self.tier, self._loads_whole = tier, loads_whole
        self._grace_s = grace_s = _WHOLE_GRACE_S if loads_whole else _GRACE_S
        self.waits = False
        self._sharing = sharing
        self.costs, self._events, self._clock = costs, events, clock
        assert sharing.prefix is not None, "a prefix load needs the prefix cache"
        self._memory, self._block_tokens = tier.memory, sharing.prefix.block_tokens
        self._token_bytes = tier.records.record_bytes / self._block_tokens
        self._rate = LoadRate(tier, self._token_bytes, clock)
        self._open: dict[Request, RequestPrefixLoad] = {}
        self._joined = JoinedLoads(sharing)
        self._starts = LoadStarts(tier, sharing, clock)
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
            self._sharing.publish(request, load.end)
            self._sharing.snapshot(request)
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
