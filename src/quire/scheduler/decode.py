"""Plans the part of a step that decodes: a token for each row of the batch that can move."""

from collections.abc import Callable

from quire.scheduler.batchers.base import Batcher
from quire.scheduler.group import whole_groups
from quire.scheduler.lane_capacities import LaneCapacities
from quire.scheduler.request import Request, RequestState
from quire.scheduler.scheduler_parts import SchedulerParts
from quire.scheduler.step_plan import StepPlan

Preempt = Callable[[Request, str], None]  # (request, why)


class Decode:
    """Rows that decode, and who gives way to them.

    Args:
        parts: the rules that are asked.
        running: those that are in; the scheduler's own list.
        caps: makes room in lanes at their cap.
        batcher: who of those that could decodes.
        preempt: takes a request out.
    """

    def __init__(
        self,
        parts: SchedulerParts,
        running: list[Request],
        caps: LaneCapacities,
        batcher: Batcher,
        preempt: Preempt,
    ) -> None:
        self._sequence_memory, self._preempter = parts.sequence_memory, parts.preempter
        self._step = parts.step
        self._running, self._caps = running, caps
        self._batcher, self._preempt = batcher, preempt

    def plan(self, plan: StepPlan) -> None:
        """Let those of the batch decode for which there are pages."""
        ready = [r for r in self._running if r.num_tokens - r.num_computed == 1]
        decoding = whole_groups(self._batcher.decoding(ready))
        if len(decoding) > self._step.tokens:
            decoding = sorted(decoding, key=self._preempter.order)[: self._step.tokens]
            decoding = whole_groups(decoding)
        decoding = self._make_room(whole_groups(self._caps.bring_down(decoding)))
        if decoding:
            ones = [1] * len(decoding)
            self._sequence_memory.grow(decoding, ones)
            plan.requests.extend(decoding)
            plan.tokens.extend(ones)
            plan.num_decoding = len(plan.requests)

    def _make_room(self, decoding: list[Request]) -> list[Request]:
        """Take out as few as it takes for the others to get their next token's page."""
        while decoding and not self._sequence_memory.can_grow(decoding, [1] * len(decoding)):
            if self._caps.relieve(self._running) or self._caps.give_up_slots(decoding):
                decoding = whole_groups([r for r in decoding if r.state is RequestState.RUNNING])
                continue
            first = min(decoding, key=self._preempter.order)
            victim = self._preempter.victim(self._running, first)
            if victim is None:  # those behind have just come back: the last ones miss a step
                decoding.remove(max(decoding, key=self._preempter.order))
            else:
                self._preempt(victim, "no page for the next token")
            decoding = whole_groups([r for r in decoding if r.state is RequestState.RUNNING])
        return decoding
