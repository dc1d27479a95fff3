"""Plans a step where no running request found a page: the first in line gets the others' pages.

1  those behind it are preempted, one by one
2  its pages are packed, its staging is halved
3  other members of its group run apart
4  it is computed again without offloading, where that lets it evict
5  it fails, and the engine goes on
"""

from collections.abc import Callable

from quire.errors import NeverFits, QuireError
from quire.scheduler.decode import Decode
from quire.scheduler.group import together
from quire.scheduler.prefill import Prefill
from quire.scheduler.request import Request, RequestState
from quire.scheduler.scheduler_parts import SchedulerParts
from quire.scheduler.step_plan import StepPlan

NEVER = (
    "no pages for the request's next step, even alone: ask for fewer beams or answers, shorten the "
    "prompt, lower max_tokens or raise --kv-memory"
)


class Unblocking:
    """What is left to do where nobody can move.

    Args:
        parts: the rules that are asked.
        running: those that are in; the scheduler's own list.
        decoding: plans rows that decode.
        reading: plans prompts.
        part: lets another member of a request's group run apart; False where none can.
        preempt: takes a request out.
        fail: ends a request with an error.
    """

    def __init__(
        self,
        parts: SchedulerParts,
        running: list[Request],
        *,
        decoding: Decode,
        reading: Prefill,
        part: Callable[[Request], bool],
        preempt: Callable[[Request, str], None],
        fail: Callable[[Request, QuireError], None],
    ) -> None:
        self._preempter, self._prefix_offloader = (
            parts.preempter,
            parts.sequence_memory.prefix_offloader,
        )
        self._running, self._step_tokens = running, parts.config.max_num_batched_tokens
        self._decoding, self._reading = decoding, reading
        self._part, self._preempt, self._fail = part, preempt, fail

    def plan(self, plan: StepPlan) -> None:
        """Let the first in line have the others' pages, one by one.

        First is who came first, whatever its tenant owes: debts change with who is in, and two
        that took turns at being first would throw each other out for ever.
        """
        first = min(self._running, key=lambda request: request.order)
        self._serve(plan, first)
        while not plan.requests:
            victim = self._preempter.victim(self._running, first, even_returned=True)
            if victim is None:
                break
            self._preempt(victim, "nobody could move")
            self._serve(plan, first)
        for make_room in (self._preempter.pack, self._preempter.halve_staging):
            if not plan.requests:
                make_room(first)
                self._serve(plan, first)
        while not plan.requests and self._part(first):
            self._serve(plan, first)
        if not plan.requests and first.state is RequestState.RUNNING:
            self._rescue(plan, first)

    def _serve(self, plan: StepPlan, first: Request) -> None:
        """Plan what a request, or the first of its group that can move, has left to do."""
        if first.group is not None:
            self._decoding.plan(plan)
        for request in together(first):
            if request.state is RequestState.RUNNING and not plan.requests:
                self._reading.chunk(plan, request, self._step_tokens)

    def _rescue(self, plan: StepPlan, first: Request) -> None:
        """The first in line cannot move in all of the memory: the engine and the others go on.

        Where it cannot evict because its first pages find no room to return, it is computed again
        and keeps all its pages in the memory, so that it evicts in time.
        """
        if self._prefix_offloader is None or not self._prefix_offloader.stops_evicting(first):
            self._fail(first, NeverFits(NEVER))
            return
        first.streams = False
        self._preempt(first, "its first pages cannot return")
        self._reading.plan(plan, self._step_tokens)
