"""Swaps requests to the host and back where that is cheaper than computing them again.

auto        what the measured costs say: swap, recompute, or keep a tail and read the head again
swap        whatever fits the host pool; recompute what does not
hybrid      as much of the tail as fits the host pool
recompute   never
"""

import logging
import time
from collections.abc import Callable, Sequence

from quire.errors import ConfigError, HostPoolFull, UnsoundCombination
from quire.kv.memory import KVMemory
from quire.kv.stored_sequences import Swapped, SwapSpace
from quire.kv.swap import append_tail, split_border, swap_in, swap_out
from quire.layout.pages import PageClass
from quire.plan.cost import Choice, Holding, best_split, choose
from quire.plan.preemption_costs import LearnedCosts
from quire.scheduler.request import Request
from quire.scheduler.schedule_config import ScheduleConfig

logger = logging.getLogger(__name__)


class Swapper:
    """Chooses what becomes of the KV of requests that give way, and moves it.

    Args:
        memory: the arena.
        pool: bytes on the host; None where everything is computed again.
        costs: what copies and prefills take; learns from every copy.
        mode: as `ScheduleConfig.preempt` has it.
        clock: seconds.

    Attributes:
        num_swaps: sequences swapped out so far, tails included.
        last_copy_s: seconds of the last copy either way.

    Raises:
        ConfigError: a mode that needs a host pool where there is none.
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
                f"preempt={mode} needs a host pool to move KV to: give it bytes with "
                "--swap-space, or use --preempt recompute"
            )
        self.costs = costs
        self.num_swaps = 0
        self.last_copy_s = 0.0
        self._memory, self._pool, self._mode, self._clock = memory, pool, mode, clock

    def choose(self, requests: Sequence[Request], kv_bytes: int) -> Choice:
        """What to do with requests that leave together.

        Args:
            requests: running ones.
            kv_bytes: of all pages they refer to, each counted once.
        """
        tokens = sum(request.progress.num_computed for request in requests)
        host_bytes = 0 if self._pool is None else self._pool.free_bytes
        alone = len(requests) == 1 and requests[0].group is None
        border = split_border(self._memory, requests[0].memory.row) if alone else 0
        holding = Holding(tokens=tokens, kv_bytes=kv_bytes, page_tokens=border)
        if self._mode == "recompute" or self._pool is None:
            return Choice(how="recompute", seconds=0.0, reason="as configured")
        if self._mode == "auto":
            return choose(self.costs.costs, holding, host_bytes)
        if kv_bytes <= host_bytes:
            return Choice(how="swap", seconds=0.0, reason="as configured")
        split = best_split(self.costs.costs, holding, host_bytes)
        if self._mode == "hybrid" and split is not None:
            return Choice(how="hybrid", seconds=0.0, keep_from=split, reason="as configured")
        return Choice(how="recompute", seconds=0.0, reason="the host pool is full")

    def whole(self, kv_bytes: int) -> Choice | None:
        """Swapping all of it, in every mode; None where the host has no room."""
        if self._pool is None or kv_bytes > self._pool.free_bytes:
            return None
        return Choice(how="swap", seconds=0.0, reason="taken out whole")

    def out(self, requests: Sequence[Request], choice: Choice) -> Swapped | None:
        """Copy requests out and release their rows; None where that failed and they still run."""
        rows = [request.memory.row for request in requests]
        started_s = self._clock()
        try:
            swapped = swap_out(self._memory, rows, self._pool, keep_from=choice.keep_from)
        except HostPoolFull:
            return None
        except Exception:  # whatever a copy raises: the request can be computed again
            logger.exception("swapping %s out failed", [r.request_id for r in requests])
            return None
        self.last_copy_s = self._clock() - started_s
        self.costs.copied_out(swapped.num_bytes, self.last_copy_s)
        self.num_swaps += len(requests)
        return swapped

    def needed(self, swapped: Swapped) -> dict[PageClass, int]:
        """Pages that must be free before `back`."""
        return dict(swapped.pages)

    def back(self, swapped: Swapped) -> list[int] | None:
        """Copy whole sequences back; their rows, or None where a copy failed and they are lost."""
        return self._copied_back(swapped, lambda: swap_in(self._memory, swapped))

    def back_behind(self, swapped: Swapped, row: int) -> bool:
        """Copy a tail back behind a head that has been computed again; False where it is lost."""

        def copy() -> list[int]:
            append_tail(self._memory, row, swapped)
            return [row]

        return self._copied_back(swapped, copy) is not None

    def _copied_back(self, swapped: Swapped, copy: Callable[[], list[int]]) -> list[int] | None:
        started_s = self._clock()
        try:
            rows = copy()
        except Exception:  # whatever a copy raises: the requests can be computed again
            logger.exception("swapping %s sequences in failed", len(swapped.sequences))
            swapped.discard()
            return None
        self.last_copy_s = self._clock() - started_s
        self.costs.copied_back(swapped.num_bytes, self.last_copy_s)
        return rows


def refuse_idle_host_pool(host_bytes: int, schedule: ScheduleConfig) -> None:
    """Refuse a host pool that nothing would use, and a batcher that would use one without bytes.

    Args:
        host_bytes: of the pool; 0 for none.
        schedule: of preemption and batches.

    Raises:
        UnsoundCombination: with what to change.
    """
    holds = schedule.batching.holds_on_host
    if holds and not host_bytes:
        raise UnsoundCombination(
            f"--batcher {schedule.batcher} moves prefilled KV to the host and there is no host "
            "pool: give --swap-space SIZE, or use hold=device"
        )
    uses = holds or schedule.scale_down_at is not None
    if host_bytes and schedule.preempt == "recompute" and not uses:
        raise UnsoundCombination(
            f"--swap-space {host_bytes:,} B takes preempted requests, and --preempt recompute "
            "swaps none: use --preempt auto, swap or hybrid, or leave out --swap-space"
        )
