"""Reads prompts: chunks of those that are in, and newcomers behind them.

a step's budget   | the tenant served least first, a part of the step each | newcomers |
"""

from collections.abc import Iterator

from quire.scheduler.admission.admission import Admission
from quire.scheduler.batchers.base import Batcher
from quire.scheduler.group import readable_tokens
from quire.scheduler.lane_capacities import LaneCapacities
from quire.scheduler.request import Request, RequestState
from quire.scheduler.scheduler_parts import SchedulerParts
from quire.scheduler.step_plan import StepPlan


class Prefill:
    """Plans the part of a step that reads prompts.

    Args:
        parts: the rules that are asked.
        running: those that are in; the scheduler's own list.
        caps: makes room in lanes at their cap.
        admission: lets newcomers in.
        batcher: who may get tokens.
    """

    def __init__(
        self,
        parts: SchedulerParts,
        running: list[Request],
        caps: LaneCapacities,
        admission: Admission,
        batcher: Batcher,
    ) -> None:
        self._sequence_memory, self._preempter = parts.sequence_memory, parts.preempter
        self._fairness, self._chunks = parts.fairness, parts.chunks
        self._step = parts.step
        self._running, self._caps = running, caps
        self._admission, self._batcher = admission, batcher

    def plan(self, plan: StepPlan, budget: int) -> None:
        """Read prompts on, and let newcomers in behind them.

        Nobody enters while one that is in gets nothing: a chunk that must be read whole would wait
        for ever behind newcomers that take the rest of every step. Only the tenant that was served
        least does not wait for others' prompts.
        """
        prefix_loader = self._sequence_memory.prefix_loader
        if prefix_loader is not None:
            prefix_loader.begin_plan()
        self._plan(plan, budget)
        if prefix_loader is not None and prefix_loader.waits and not plan.requests:
            if prefix_loader.wait():
                self._plan(plan, budget)
            plan.waits = not plan.requests

    def _plan(self, plan: StepPlan, budget: int) -> None:
        readers = sorted(self._reading(plan), key=self._fairness.prefill_order, reverse=True)
        all_served = True
        while budget > 0:
            new_request = None
            if (not readers and all_served) or (readers and self._is_before(readers[-1])):
                new_request = self._admission.admit(budget)
            if new_request is None and not readers:
                return
            request = new_request or readers.pop()
            if request.state is not RequestState.RUNNING:  # its group left: a policy failed
                continue
            if request is new_request and not self._batcher.reads(request):
                continue  # it came back whole, and waits for a row
            tokens = self.chunk(plan, request, min(budget, self._part(request, readers)))
            budget -= tokens
            all_served &= tokens > 0 or self._waits_for_pages(request)

    def _waits_for_pages(self, request: Request) -> bool:
        """Whether it gets nothing because its prefix is on its way: others need not wait too."""
        prefix_loader = self._sequence_memory.prefix_loader
        return prefix_loader is not None and prefix_loader.is_waiting(request)

    def _part(self, request: Request, others: list[Request]) -> int:
        """What its tenant may read of a step; a chunk that must be read whole is not divided."""
        if self._chunks.is_atomic(request):
            return self._step.tokens
        return self._fairness.step_part(request, others, self._step.tokens)

    def _is_before(self, reader: Request) -> bool:
        """Whether somebody waits whose tenant has been served less than the next reader's."""
        if not self._fairness.has_several:
            return False
        queue = self._fairness.waiting
        head = next(queue.heads(), None)
        if head is None or head.tenant == reader.tenant:
            return False
        return queue.virtual_time(head.tenant) < queue.virtual_time(reader.tenant)

    def _reading(self, plan: StepPlan) -> Iterator[Request]:
        """Running requests not yet in the plan that still read their prompt."""
        planned, may_read = set(map(id, plan.requests)), self._batcher.reads
        left = (r for r in self._running if id(r) not in planned)
        return (r for r in left if readable_tokens(r) > 0 and may_read(r))

    def chunk(self, plan: StepPlan, request: Request, budget: int) -> int:
        """Plan the next chunk of a prompt, as large as budget and pages allow; return its size."""
        budget = self._behind_tail(request, budget)
        if self._sequence_memory.prefix_loader is not None:
            budget = self._sequence_memory.prefix_loader.may_read(request, budget)
        tokens = self._chunks.tokens(plan, request, budget)
        atomic = self._chunks.is_atomic(request)
        if tokens and not self._caps.bring_down([request]):
            return 0
        if tokens and not self._has_room(plan, request, tokens):
            if request.state is not RequestState.RUNNING:  # its policy failed
                return 0
            tokens = 0 if atomic else self._largest_fitting(request, tokens)
        if tokens:
            self._sequence_memory.grow([request], [tokens])
            self._fairness.charge_prefill(request, tokens)
            kv_bytes = self._sequence_memory.memory.row_bytes(request.row)
            self._sequence_memory.events.emit("chunk", request, tokens=tokens, kv_bytes=kv_bytes)
            plan.add(request, tokens)
        return tokens

    def _has_room(self, plan: StepPlan, request: Request, tokens: int) -> bool:
        """Whether there is room for a chunk, others gone down to their caps where they can."""
        while not self._sequence_memory.can_grow([request], [tokens]):
            planned = set(map(id, plan.requests))
            others = (r for r in self._running if id(r) not in planned)
            relieved = self._caps.relieve(others) or self._caps.give_up_slots([request])
            if not relieved or request.state is not RequestState.RUNNING:
                return False
        return True

    def _behind_tail(self, request: Request, budget: int) -> int:
        """Tokens a request may read where its tail is on the host: up to it, then on from it."""
        head_tokens = self._preempter.head_tokens(request)
        if head_tokens is None:
            return budget
        if request.num_computed < head_tokens:
            return min(budget, head_tokens - request.num_computed)
        return budget if self._preempter.append_tail(request) else 0

    def _largest_fitting(self, request: Request, tokens: int) -> int:
        """Largest chunk below `tokens` whose pages are there, by bisection."""
        low, high = 0, tokens
        while high - low > 1:
            middle = (low + high) // 2
            fits = self._sequence_memory.can_grow([request], [middle])
            low, high = (middle, high) if fits else (low, middle)
        return low
