"""Plans the decoding rows of a step, one token each."""

from quire.scheduler.components import SchedulerComponents
from quire.scheduler.group import same_group, whole_groups
from quire.scheduler.request import Request
from quire.scheduler.step import StepPlan


class Decode:
    """Planner of decoding rows; preempts requests when the rows lack pages.

    Args:
        components: the scheduler's components.
    """

    def __init__(self, components: SchedulerComponents) -> None:
        self._sequence_memory = components.sequence_memory
        self._preempter, self._lifecycle = components.preempter, components.lifecycle
        self._capacities, self._batcher = components.capacities, components.batcher
        self._running, self._step_size = components.state.running, components.step_size

    def plan(self, plan: StepPlan) -> None:
        """Add the batch's decoding rows that have pages for their next token."""
        ready = [r for r in self._running if r.num_tokens - r.progress.num_computed == 1]
        self._add(plan, self._batcher.decoding(ready))

    def plan_group(self, plan: StepPlan, request: Request) -> None:
        """Add the decoding rows of a request's group, even if they are not in the batch.

        For a step without other rows, because beams can decode only here: a prefill chunk never
        computes the last token of a beam.
        """
        ready = [r for r in self._running if r.num_uncomputed == 1 and same_group(r, request)]
        self._add(plan, ready)

    def _add(self, plan: StepPlan, rows: list[Request]) -> None:
        decoding = self._within_step(whole_groups(rows))
        decoding = whole_groups(self._capacities.evict_to_capacity(decoding))
        decoding = self._grown(decoding)
        if decoding:
            plan.requests.extend(decoding)
            plan.tokens.extend([1] * len(decoding))
            plan.num_decoding = len(plan.requests)

    def _within_step(self, decoding: list[Request]) -> list[Request]:
        """The first rows in scheduling order, at most as many as the step has tokens."""
        if len(decoding) <= self._step_size.tokens:
            return decoding
        first = sorted(decoding, key=self._preempter.order)[: self._step_size.tokens]
        return whole_groups(first)

    def _grown(self, decoding: list[Request]) -> list[Request]:
        """Grow the rows that get a page for their next token, after evictions and preemptions."""
        while decoding and not self._sequence_memory.try_grow(decoding, [1] * len(decoding)):
            if not self._capacities.free_for(decoding, self._running):
                first = min(decoding, key=self._preempter.order)
                victim = self._preempter.victim(self._running, first)
                if victim is None:  # later requests have just resumed: the last one skips a step
                    decoding.remove(max(decoding, key=self._preempter.order))
                else:
                    self._lifecycle.preempt(victim, "no page for the next token")
            decoding = whole_groups([r for r in decoding if r.is_running])
        return decoding
