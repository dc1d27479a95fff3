"""Preemption: chooses victims, and swaps their KV to the swap space or recomputes it.

candidates   requests later in scheduling order, or of a tenant above its share
excluded     requests without a new token since they resumed: else preemptions would repeat
order        tenants above their share, then lower priority, then no deadline, then most freed
             bytes per lost token, then the newest

auto         the cheapest by measured costs: swap, recompute or hybrid
swap         swap if the KV fits in the swap space, else recompute
hybrid       swap if the KV fits; else swap a tail that fits and recompute the head
recompute    never swap
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from math import isinf

import numpy as np

from quire.errors import ConfigError, HostMemoryFull
from quire.kv.memory import KVMemory
from quire.kv.repacking import repack
from quire.kv.swap import (
    Swapped,
    SwapSpace,
    append_tail,
    split_border,
    swap_in,
    swap_out,
)
from quire.kv.swap import can_swap_in as swap_fits
from quire.layout import limits
from quire.plan.preemption_costs import Holding, LearnedCosts, PreemptionChoice, best_split, choose
from quire.scheduler.fairness import Fairness
from quire.scheduler.request import (
    Request,
    RequestState,
    distinct_bytes,
    have_moved_on,
    same_group,
    together,
)
from quire.scheduler.schedule_config import ScheduleConfig
from quire.scheduler.sequence_memory import SequenceMemory

logger = logging.getLogger(__name__)
COMPARED = 16  # newest candidates whose bytes are compared: counting bytes reads all page entries


# ---- swap or recompute ---------------------------------------------------------------------------


class Swapper:
    """Chooses between swap and recomputation for preempted requests, and copies their KV.

    Args:
        memory: the KV memory.
        pool: the swap space; None without one.
        costs: rates of copies and prefill; updated with every copy.
        mode: see `ScheduleConfig.preempt`.
        clock: returns seconds.

    Attributes:
        costs: see above.
        num_swaps: sequences swapped out since the start, tails included.
        last_copy_s: duration of the last copy in either direction; of its start, if copies run
            next to the computation.

    Raises:
        ConfigError: the mode needs a swap space and there is none.
    """

    def __init__(
        self,
        memory: KVMemory,
        pool: SwapSpace | None,
        costs: LearnedCosts,
        mode: str,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if pool is None and mode in ("swap", "hybrid"):
            raise ConfigError(
                f"preempt={mode} needs swap space: set --swap-space SIZE, or use --preempt "
                "recompute"
            )
        self.costs = costs
        self.num_swaps = 0
        self.last_copy_s = 0.0
        self._memory, self._pool, self._mode, self._clock = memory, pool, mode, clock

    @property
    def has_pool(self) -> bool:
        """Whether preempted requests can be swapped out."""
        return self._pool is not None and self._mode != "recompute"

    def choose(self, requests: Sequence[Request], kv_bytes: int) -> PreemptionChoice:
        """Choose swap, recompute or hybrid for requests that are preempted together.

        Args:
            requests: running requests.
            kv_bytes: bytes of all pages to store, each counted once.
        """
        tokens = sum(request.progress.num_computed for request in requests)
        host_bytes = 0 if self._pool is None else self._pool.free_bytes
        alone = len(requests) == 1  # of a group: while only its first member holds KV
        unit_tokens = split_border(self._memory, requests[0].memory.row) if alone else 0
        holding = Holding(tokens=tokens, kv_bytes=kv_bytes, page_tokens=unit_tokens)
        if self._mode == "recompute" or self._pool is None:
            return PreemptionChoice(how="recompute", seconds=0.0, reason="as configured")
        if self._mode == "auto":
            self._learn_ended()
            return choose(self.costs.costs, holding, host_bytes)
        if kv_bytes <= host_bytes:
            return PreemptionChoice(how="swap", seconds=0.0, reason="as configured")
        split = best_split(self.costs.costs, holding, host_bytes)
        if self._mode == "hybrid" and split is not None:
            return PreemptionChoice(
                how="hybrid", seconds=0.0, keep_from=split, reason="as configured"
            )
        return PreemptionChoice(how="recompute", seconds=0.0, reason="the swap space is full")

    def choose_all(self, kv_bytes: int) -> PreemptionChoice | None:
        """Choose to swap all KV, regardless of the mode; None if it exceeds the free swap space."""
        if self._pool is None or kv_bytes > self._pool.free_bytes:
            return None
        return PreemptionChoice(how="swap", seconds=0.0, reason="all KV is swapped")

    def swap_out(self, requests: Sequence[Request], choice: PreemptionChoice) -> Swapped | None:
        """Copy requests out and release their rows; None if a copy failed (they keep running)."""
        rows = [request.memory.row for request in requests]
        started_s = self._clock()
        try:
            swapped = swap_out(
                self._memory,
                rows,
                self._pool,
                keep_from=choice.keep_from,
            )
        except HostMemoryFull:
            return None
        except Exception:  # after any error of a copy the requests can be recomputed
            logger.exception("swap-out of requests %s failed", [r.request_id for r in requests])
            return None
        self.last_copy_s = self._clock() - started_s
        if not self._learn_ended():
            self.costs.copied_out(swapped.num_bytes, self.last_copy_s)
        self.num_swaps += len(requests)
        return swapped

    def swap_in(self, swapped: Swapped) -> list[int] | None:
        """Swap whole sequences in; return their rows, or None if a copy failed (the KV is lost)."""
        return self._copied_back(swapped, lambda: swap_in(self._memory, swapped))

    def swap_in_tail(self, swapped: Swapped, row: int) -> bool:
        """Append a swapped tail to a recomputed head; False if the copy failed (it is lost)."""

        def copy() -> list[int]:
            append_tail(self._memory, row, swapped)
            return [row]

        return self._copied_back(swapped, copy) is not None

    def _copied_back(self, swapped: Swapped, copy: Callable[[], list[int]]) -> list[int] | None:
        started_s = self._clock()
        try:
            rows = copy()
        except Exception:  # after any error of a copy the requests can be recomputed
            logger.exception("swap-in of %s sequences failed", len(swapped.sequences))
            swapped.discard()
            return None
        self.last_copy_s = self._clock() - started_s
        if not self._learn_ended():
            self.costs.copied_back(swapped.num_bytes, self.last_copy_s)
        return rows

    def _learn_ended(self) -> bool:
        """Learn from copies next to the computation that have ended; False if copies block."""
        ended = None if self._pool is None else self._pool.timed_copies()
        for copy in ended or ():
            learn = self.costs.copied_back if copy.back else self.costs.copied_out
            learn(copy.num_bytes, copy.seconds)
        return ended is not None


def uses_swap_space(schedule: ScheduleConfig) -> bool:
    """Whether requests are swapped out if there is swap space."""
    swaps_out = schedule.batching.swaps_out_prefilled
    return schedule.preempt != "recompute" or swaps_out or schedule.scale_down_at is not None


def refuse_unused_swap_space(host_bytes: int, schedule: ScheduleConfig) -> None:
    """Refuse an unused swap space, and a batcher that needs a swap space if there is none.

    Args:
        host_bytes: size of the swap space; 0 for none.
        schedule: the scheduling options.

    Raises:
        UnsoundCombination: states what to change.
    """
    swaps_out = schedule.batching.swaps_out_prefilled
    if swaps_out and not host_bytes:
        raise limits.refused(limits.NO_SWAP_SPACE, batcher=schedule.batcher)
    if host_bytes and not uses_swap_space(schedule):
        raise limits.refused(limits.UNUSED_SWAP_SPACE, num_bytes=host_bytes)


# ---- preemption ----------------------------------------------------------------------------------


class Preempter:
    """Chooses victims, and frees or swaps their KV.

    Args:
        sequence_memory: the requests' pages in the KV memory.
        fairness: requests of tenants above their share are preempted first.
        swapper: copies KV to the swap space and back; None if preempted requests are recomputed.

    Attributes:
        swapper: see above.
        num_preemptions: preemptions since the start.
    """

    def __init__(
        self,
        sequence_memory: SequenceMemory,
        fairness: Fairness,
        swapper: Swapper | None = None,
    ) -> None:
        self.swapper = swapper
        self.num_preemptions = 0
        self._sequence_memory, self._memory = sequence_memory, sequence_memory.memory
        self._is_over_share = fairness.is_over_share
        self._swapped: dict[int, list[Request]] = {}  # by identity of the swapped KV

    # ---- victims ---------------------------------------------------------------------------------

    def order(self, request: Request) -> tuple[bool, int, float, int]:
        """Scheduling order as a sort key: tenants within their share first, then request order."""
        return (self._is_over_share(request), *request.order)

    def victim(
        self, running: Iterable[Request], first: Request, *, even_resumed: bool = False
    ) -> Request | None:
        """Choose the request to preempt for `first`; None if no request can be preempted.

        Args:
            running: all running requests.
            first: a request that needs pages. Requests before it in scheduling order and members of
                its group are not preempted for it, so the first request can always proceed.
            even_resumed: also consider requests that have computed no token since they resumed, and
                ignore tenants' shares in the order. Set it when no request can proceed.
        """
        order = (lambda r: r.order) if even_resumed else self.order
        later = [r for r in running if order(r) > order(first) and not same_group(r, first)]
        return self.victim_among(later, even_resumed=even_resumed)

    def victim_among(
        self, requests: Iterable[Request], *, even_resumed: bool = False
    ) -> Request | None:
        """Choose which of these requests to preempt first; None if none can be preempted."""
        candidates = [r for r in requests if even_resumed or have_moved_on(r)]
        ordered = sorted(candidates, key=self.order, reverse=True)
        if not ordered:
            return None
        best = self._rank(ordered[0])
        equals = [r for r in ordered[:COMPARED] if self._rank(r) == best]
        return max(equals, key=lambda r: (self._worth(r), r.spec.arrival))

    def _rank(self, request: Request) -> tuple[bool, int, bool]:
        return self._is_over_share(request), request.priority, isinf(request.deadline_s)

    def _worth(self, request: Request) -> float:
        """Freed bytes per computed token, times the remaining fraction of the output.

        Source: vLLM's proposal 56897 (reclaimable blocks over tokens, times 1 - progress).
        """
        done = len(request.output_token_ids) / max(1, request.params.max_tokens)
        leaving = [member for member in together(request) if member.memory.row >= 0]
        lost_tokens = sum(member.progress.num_computed for member in leaving)
        freed_bytes = 0
        for table in self._memory.tables.values():
            page_class = table.group.page_class
            held = np.concatenate([table.row_pages(member.memory.row) for member in leaving])
            pages, references = np.unique(held, return_counts=True)
            only = self._memory.pools[page_class].ref_counts[pages] <= references
            freed_bytes += int(np.count_nonzero(only)) * page_class.page_bytes
        return freed_bytes / max(1, lost_tokens) * (1 - done)

    # ---- swap out --------------------------------------------------------------------------------

    def preempt(
        self,
        requests: Sequence[Request],
        reason: str,
        *,
        swap_all: bool = False,
        recompute: bool = False,
    ) -> None:
        """Free the memory of running requests that are preempted together.

        Args:
            requests: one request, or the members of a group that hold KV.
            reason: reason for the event log.
            swap_all: swap out all KV if the swap space has enough memory, regardless of cost.
            recompute: free all KV without a swap.
        """
        lost_tokens = sum(request.progress.num_computed for request in requests)
        freed_bytes = distinct_bytes(self._memory, [request.memory.row for request in requests])
        how = "recompute" if recompute else self._swap_by_cost(requests, swap_all=swap_all)
        self.num_preemptions += 1
        for request in requests:
            request.progress.num_preemptions += 1
            if request.memory.row >= 0:
                self._sequence_memory.free(request, "preempted")
        self._sequence_memory.events.emit(
            "preempted",
            requests[0],
            how=how,
            reason=reason,
            lost_tokens=0 if how == "swap" else lost_tokens,
            freed_bytes=freed_bytes,
        )

    def _stored_bytes(self, requests: Sequence[Request]) -> int:
        """Bytes that a swap-out stores: pages of the arena without staging."""
        rows = [request.memory.row for request in requests]
        return distinct_bytes(self._memory, rows, staging=False)

    def _swap_by_cost(self, requests: Sequence[Request], *, swap_all: bool) -> str:
        """Swap out the KV that is cheaper to copy than to recompute; return the method."""
        if any(request.memory.swapped is not None for request in requests):
            return "hybrid"  # its tail is still swapped out
        if self.swapper is None:
            return "recompute"
        kv_bytes = self._stored_bytes(requests)
        choice = self.swapper.choose_all(kv_bytes) if swap_all else None
        choice = choice or self.swapper.choose(requests, kv_bytes)
        if choice.how == "recompute" or not self._copy_out(requests, choice):
            return "recompute"
        return choice.how

    def swap_out(self, requests: Sequence[Request]) -> bool:
        """Swap out all KV of a request or a group, if the swap space has enough memory.

        It is not counted as a preemption; only the copy is logged.

        Returns:
            Whether the KV was swapped out; if not, the requests keep running.
        """
        if self.swapper is None or any(request.memory.swapped is not None for request in requests):
            return False
        choice = self.swapper.choose_all(self._stored_bytes(requests))
        return choice is not None and self._copy_out(requests, choice)

    def _copy_out(self, requests: Sequence[Request], choice: PreemptionChoice) -> bool:
        """Swap requests out and free their rows; False if a copy failed (they keep running)."""
        assert self.swapper is not None
        held = [self._sequence_memory.note_peak(request) for request in requests]
        swapped = self.swapper.swap_out(requests, choice)
        if swapped is None:
            return False
        for request, held_bytes in zip(requests, held, strict=True):
            request.memory.swapped = swapped
            self._sequence_memory.note_freed(request, held_bytes, "swapped out")
        self._swapped[id(swapped)] = list(requests)
        self._log("swapped_out", requests[0], swapped)
        return True

    # ---- swap in ---------------------------------------------------------------------------------

    def can_swap_in(self, request: Request) -> bool:
        """Whether there are pages for a waiting request's swapped KV; evicts cached prefixes."""
        swapped = request.memory.swapped
        if swapped is None or swapped.keep_from:
            return True
        self._sequence_memory.evict_cached(swapped.needed_pages)
        return swap_fits(self._memory, swapped)

    def free_swapped_group(self, request: Request) -> None:
        """Free the swapped KV of a request and of the requests swapped out with it."""
        for member in list(self._swapped.get(id(request.memory.swapped), [])):
            self.free_swapped(member)

    def free_offloaded(self) -> bool:
        """Free swapped KV whose first pages occupy offload memory; its requests are recomputed.

        Returns:
            Whether there was any.
        """
        found = [
            member
            for members in self._swapped.values()
            for member in members
            if member.memory.swapped is not None and member.memory.swapped.offloaded is not None
        ]
        for member in found:
            self.free_swapped(member)
        return bool(found)

    def swap_in(self, request: Request) -> list[Request]:
        """Swap in the KV of a request, and of the requests swapped out with it.

        Returns:
            The requests that hold KV again; empty if a copy failed, and then the swapped KV is
            freed.
        """
        swapped = request.memory.swapped
        assert swapped is not None
        assert self.swapper is not None
        resumed = self._swapped.pop(id(swapped))
        rows = self.swapper.swap_in(swapped)
        for member in resumed:
            member.memory.swapped = None
        if rows is None:
            return []
        for member, row, sequence in zip(resumed, rows, swapped.sequences, strict=True):
            if member.progress.state is RequestState.FINISHED:  # cancelled while it was swapped out
                self._memory.release([row])
            else:
                self._sequence_memory.resume(member, row, sequence.length)
        self._log("swapped_in", request, swapped)
        return [member for member in resumed if member.memory.row >= 0]

    def swap_in_tail(self, request: Request) -> bool:
        """Append the swapped tail to a recomputed head; False if there are no pages for it."""
        swapped = request.memory.swapped
        assert swapped is not None
        assert self.swapper is not None
        self._sequence_memory.evict_cached(swapped.needed_pages)
        if not self._memory.fits(swapped.needed_pages):
            return False
        self._swapped.pop(id(swapped))
        request.memory.swapped = None
        if self.swapper.swap_in_tail(swapped, request.memory.row):
            request.progress.num_computed = swapped.sequences[0].length
            self._log("swapped_in", request, swapped)
        return True

    def _log(self, kind: str, request: Request, swapped: Swapped) -> None:
        assert self.swapper is not None
        seconds = self.swapper.last_copy_s
        self._sequence_memory.events.emit(
            kind, request, kv_bytes=swapped.num_bytes, seconds=seconds
        )

    def free_swapped(self, request: Request) -> None:
        """Free a request's swapped KV; the memory is freed with the last request that shares it."""
        swapped, request.memory.swapped = request.memory.swapped, None
        if swapped is not None:
            members = self._swapped[id(swapped)]
            if all(member.memory.swapped is None for member in members):
                del self._swapped[id(swapped)]
                swapped.discard()

    def stop_sharing(self, request: Request) -> None:
        """Return the cached prefix of a request that runs alone, and of its group.

        A block that another request published before is in the memory twice, and can be evicted.
        Pages of several sizes are compacted instead: their slabs cannot be divided otherwise.
        """
        if len(self._memory.pools) > 1:
            return
        for member in together(request):
            if member.memory.row >= 0:
                self._sequence_memory.stop_sharing(member)

    def compact(self, request: Request) -> None:
        """Compact the pages of a request that runs alone, and of its group.

        Scattered pages occupy more slabs than necessary, which other page classes cannot use. Once
        compacted, an admitted request can always grow.
        """
        members = [member for member in together(request) if member.memory.row >= 0]
        for member in members:
            self._sequence_memory.stop_sharing(member)
            if self._sequence_memory.prefix_loader is not None:
                self._sequence_memory.prefix_loader.forget(member)
        self._sequence_memory.drop_cached()
        repack(self._memory, *(member.memory.row for member in members))

    def halve_staging(self, request: Request) -> None:
        """Reduce a request that runs alone, and its group, to one staging slot for each."""
        if self._sequence_memory.prefix_offloader is not None:
            for member in together(request):
                if member.memory.row >= 0:
                    self._sequence_memory.prefix_offloader.halve_staging(member)
