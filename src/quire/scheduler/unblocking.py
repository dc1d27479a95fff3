"""Plans a step where no running request found a page: the first in line gets the others' pages.

1  the requests behind it are preempted, one by one
2  its pages are compacted, its staging is halved
3  other members of its group are split off
4  it is computed again without offloading, where that lets it evict
5  it fails, and the engine goes on
"""

from quire.errors import NeverFits
from quire.scheduler.components import SchedulerComponents
from quire.scheduler.decode import Decode
from quire.scheduler.forks import NEVER, Forks
from quire.scheduler.group import together
from quire.scheduler.prefill import Prefill
from quire.scheduler.request import Request
from quire.scheduler.step import StepPlan


class Unblocking:
    """Gives the first request in line all pages that it needs.

    Args:
        components: of the scheduler.
        decode: plans decoding rows.
        prefill: plans chunks of prompts.
        forks: splits groups.
    """

    def __init__(
        self, components: SchedulerComponents, decode: Decode, prefill: Prefill, forks: Forks
    ) -> None:
        self._preempter, self._lifecycle = components.preempter, components.lifecycle
        self._offloader = components.sequence_memory.prefix_offloader
        self._running = components.state.running
        self._step_tokens = components.config.max_num_batched_tokens
        self._decode, self._prefill, self._forks = decode, prefill, forks

    def plan(self, plan: StepPlan) -> None:
        """Plan a step for the first in line; preempt the others one by one.

        First is the request that arrived first, whatever its tenant is_over_share: debts change with the
        running requests, and two that took turns at being first would preempt each other for ever.
        """
        first = min(self._running, key=lambda request: request.order)
        self._plan_first(plan, first)
        while not plan.requests:
            victim = self._preempter.victim(self._running, first, even_resumed=True)
            if victim is None:
                break
            self._lifecycle.preempt(victim, "no running request could be scheduled")
            self._plan_first(plan, first)
        for free_pages in (self._preempter.compact, self._preempter.halve_staging):
            if not plan.requests:
                free_pages(first)
                self._plan_first(plan, first)
        while not plan.requests and self._forks.split_off(first):
            self._plan_first(plan, first)
        if not plan.requests and first.is_running:
            self._recompute_or_fail(plan, first)

    def _plan_first(self, plan: StepPlan, first: Request) -> None:
        """Plan the tokens of a request, or of the first of its group that has pages."""
        if first.group is not None:
            self._decode.plan(plan)
        for request in together(first):
            if request.is_running and not plan.requests:
                self._prefill.chunk(plan, request, self._step_tokens)

    def _recompute_or_fail(self, plan: StepPlan, first: Request) -> None:
        """The first in line has no pages in all of the memory: the engine and the others go on.

        Where it cannot evict because its offloaded pages find no room to return, it is computed
        again without offloading, so that it evicts in time.
        """
        if self._offloader is None or not self._offloader.stops_evicting(first):
            self._lifecycle.fail(first, NeverFits(NEVER))
            return
        first.memory.may_offload = False
        self._lifecycle.preempt(first, "its offloaded pages cannot be loaded back")
        self._prefill.plan(plan, self._step_tokens)
