"""Plans a step if no running request can allocate pages: frees pages for the first request.

1  the requests after it are preempted, one by one
2  swapped requests free the offload memory that they occupy; they are recomputed later
3  its pages are compacted, its staging slots are halved
4  other members of its group are split off
5  it is recomputed, with KV offload only until its recorded evictions are replayed, if its eviction
   rule then frees pages
6  it is recomputed without KV offload
7  it fails; other requests are unaffected
"""

from quire.errors import NeverFits
from quire.scheduler.admission.need import can_offload_request
from quire.scheduler.components import SchedulerComponents
from quire.scheduler.decode import Decode
from quire.scheduler.forks import NEVER, Forks
from quire.scheduler.group import together
from quire.scheduler.prefill import Prefill
from quire.scheduler.request import Request
from quire.scheduler.step import StepPlan


class Unblocking:
    """Planner of steps in which only the first request in scheduling order runs.

    Args:
        components: the scheduler's components.
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
        """Plan a step for the first request; preempt the others one by one.

        The first request is the first by `Request.order`, regardless of tenants' shares. Shares
        change with the running requests, so two requests could preempt each other forever.
        """
        first = min(self._running, key=lambda request: request.order)
        self._plan_first(plan, first)
        while not plan.requests:
            victim = self._preempter.victim(self._running, first, even_resumed=True)
            if victim is None:
                break
            self._lifecycle.preempt(victim, "no running request could be scheduled")
            self._plan_first(plan, first)
        if not plan.requests and self._preempter.free_offloaded():
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
        """Plan the tokens of a request, or of the first member of its group that has pages."""
        if first.group is not None:
            self._decode.plan(plan)
            if not plan.requests:
                self._decode.plan_group(plan, first)
        for request in together(first):
            if request.is_running and not plan.requests:
                self._prefill.chunk(plan, request, self._step_tokens)

    def _recompute_or_fail(self, plan: StepPlan, first: Request) -> None:
        """Recompute or fail a request that does not fit in the whole KV memory.

        If it cannot evict because its offloaded pages cannot be loaded back, it is recomputed
        without KV offload, so that it evicts in time. The first time, this begins after its
        recorded evictions: as many tokens as they need may fit only with KV offload.
        """
        stops = self._offloader is not None and self._offloader.stops_evicting(first)
        if not (stops and can_offload_request(first)):
            self._lifecycle.fail(first, NeverFits(NEVER))
            return
        first.memory.may_offload_replays = first.memory.may_offload
        first.memory.may_offload = False
        reason = "its offloaded pages cannot be loaded back"
        self._lifecycle.preempt(first, reason, recompute=True)
        self._prefill.plan(plan, self._step_tokens)
