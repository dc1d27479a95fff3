"""Swaps KV to the swap space and back if that is cheaper than recomputing it.

auto        the cheapest by measured costs: swap, recompute or hybrid
swap        swap if the KV fits in the swap space, else recompute
hybrid      swap if the KV fits; else swap a tail that fits and recompute the head
recompute   never swap
"""

import logging
import time
from collections.abc import Callable, Sequence

from quire.errors import ConfigError, HostMemoryFull
from quire.kv.memory import KVMemory
from quire.kv.stored_sequences import OffloadedRows, Swapped, SwapSpace
from quire.kv.swap import append_tail, split_border, swap_in, swap_out
from quire.layout import limits
from quire.plan.cost import Holding, PreemptionChoice, best_split, choose
from quire.plan.preemption_costs import LearnedCosts
from quire.scheduler.request import Request
from quire.scheduler.schedule_config import ScheduleConfig

logger = logging.getLogger(__name__)


class Swapper:
    """Chooses between swap and recomputation for preempted requests, and copies their KV.

    Args:
        memory: the KV memory.
        pool: the swap space; None without one.
        costs: rates of copies and prefill; updated with every copy.
        mode: see `ScheduleConfig.preempt`.
        clock: returns seconds.
        offloaded: offloaded pages of the sequences; None without KV offload.

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
        offloaded: OffloadedRows | None = None,
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
        self._offloaded = offloaded

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
                offloaded=self._offloaded,
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
