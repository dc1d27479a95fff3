"""What each step does: who decodes, which prompts are read on, who enters, who gives way.

    a step's tokens  | decoding rows, one token each | chunks of prompts being read | newcomers |
                     |<----------------------- step_tokens at most ------------------------->|

Torch-free: the scheduler knows token counts, pages and the memory's bookkeeping. Evicting is asked
of a callback, because which tokens leave depends on tensors; how many leave does not.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from quire.engine.admission import Admission
from quire.engine.preemption import choose_victim
from quire.engine.request import Request, RequestState
from quire.engine.schedule_config import ScheduleConfig
from quire.engine.step_plan import StepPlan
from quire.errors import PolicyError
from quire.kv.memory import KVMemory
from quire.kv.swap import repack
from quire.spec.eviction import EvictionSpec

SCORED_TOKENS = 256  # bounds a step's logits of prompts whose every token is scored

Evictor = Callable[[Request, int], None]  # (request, slots to keep in every evicting lane)


class Scheduler:
    """Queues of requests over one KV memory.

    Args:
        memory: the pool.
        config: step and queue sizes.
        eviction: how many tokens a lane may hold, and how many leave at a time.
        evict: called before a request's lane would pass its cap.
    """

    def __init__(
        self,
        memory: KVMemory,
        config: ScheduleConfig,
        eviction: EvictionSpec,
        evict: Evictor,
    ) -> None:
        self.memory, self.config, self.eviction = memory, config, eviction
        # over its cap a prompt is read `every` tokens at once, however short chunks are else
        whole_chunk = 0 if eviction.cap is None else eviction.every
        longest_chunk = max(config.longest_chunk, whole_chunk)
        self.admission = Admission(memory, eviction, longest_chunk, config.reserve_share)
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.failures: list[tuple[Request, PolicyError]] = []  # for the engine to report
        self._evict = evict
        self._waiting: list[tuple[tuple[int, int], Request]] = []
        self._num_waiting = 0

    # ---- queues --------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests that wait for room."""
        return self._num_waiting

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.running or self._num_waiting)

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            NeverFits: it could not run even alone.
        """
        self.admission.refuse_if_never(request)
        self._queue(request)

    def _queue(self, request: Request) -> None:
        request.state = RequestState.WAITING
        heapq.heappush(self._waiting, (request.order, request))
        self._num_waiting += 1

    def finish(self, request: Request) -> None:
        """End a request wherever it is, and free its pages at once."""
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
            self._free(request)
        elif request.state is RequestState.WAITING:
            self._num_waiting -= 1  # its entry in the heap is skipped when it comes up
        request.state = RequestState.FINISHED

    def _free(self, request: Request) -> None:
        peak = int(self.memory.peak_bytes[request.row])
        request.kv_peak_bytes = max(request.kv_peak_bytes, peak)
        self.memory.release([request.row])
        request.row = -1
        request.num_computed = 0

    def _preempt(self, request: Request) -> None:
        """Throw a request out; it will be read again from its tokens, answer included."""
        self.take_back([request])
        request.preemptions += 1
        self.num_preemptions += 1

    def give_way(self) -> bool:
        """Free memory for another engine of a shared pool: who goes last waits again.

        Returns:
            False when nobody runs, and so nothing is left to free.
        """
        last = max(self.running, key=lambda r: r.order, default=None)
        if last is not None:
            self._preempt(last)
        return last is not None

    def take_back(self, requests: Iterable[Request]) -> None:
        """Let those of these requests that run wait again, without KV: a step with them failed."""
        for request in [r for r in requests if r.state is RequestState.RUNNING]:
            self.running.remove(request)
            self._free(request)
            self._queue(request)

    # ---- a step --------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan a step and make room for it. Rows that decode come first.

        Nobody enters while one that is in gets nothing: a chunk that must be read whole would wait
        for ever behind newcomers that take the rest of every step.
        """
        plan = StepPlan()
        self._schedule_decoding(plan)
        budget = self.config.step_tokens - len(plan.requests)
        all_served = True
        for request in sorted(self._reading(plan), key=lambda r: r.order):
            tokens = self._schedule_chunk(plan, request, budget)
            budget -= tokens
            all_served &= tokens > 0
        while budget > 0 and all_served and (newcomer := self._next_to_enter()) is not None:
            self._enter(newcomer)
            tokens = self._schedule_chunk(plan, newcomer, budget)
            budget -= tokens
            all_served = tokens > 0
        if not plan.requests and self.running:
            self._unblock(plan)
        return plan

    def commit(self, plan: StepPlan) -> None:
        """Note that the step's tokens have been processed."""
        for request, tokens in zip(plan.requests, plan.tokens, strict=True):
            request.num_computed += tokens

    def _reading(self, plan: StepPlan) -> Iterator[Request]:
        """Running requests not yet in the plan that still read their prompt."""
        planned = set(map(id, plan.requests))
        return (r for r in self.running if id(r) not in planned and r.num_uncomputed > 0)

    def _schedule_decoding(self, plan: StepPlan) -> None:
        decoding = [r for r in self.running if r.num_tokens - r.num_computed == 1]
        if len(decoding) > self.config.step_tokens:
            decoding = sorted(decoding, key=lambda r: r.order)[: self.config.step_tokens]
        decoding = self._make_room(self._evict_full_lanes(decoding))
        if decoding:
            self.memory.grow(_rows(decoding), np.ones(len(decoding), dtype=np.int32))
            plan.requests.extend(decoding)
            plan.tokens.extend([1] * len(decoding))

    def _make_room(self, decoding: list[Request]) -> list[Request]:
        """Throw out as few as it takes for the others to get their next token's page."""
        while decoding:
            if self.memory.can_grow(_rows(decoding), np.ones(len(decoding), dtype=np.int32)):
                return decoding
            first = min(decoding, key=lambda r: r.order)
            victim = choose_victim(self.running, first)
            if victim is None:
                return []  # those before it hold the rest, or it is alone: see `_unblock`
            self._preempt(victim)
            if victim in decoding:
                decoding.remove(victim)
        return decoding

    def _evict_full_lanes(self, requests: list[Request]) -> list[Request]:
        """Bring lanes at their cap down; return the requests whose policy did what it must."""
        cap = self.eviction.cap
        if cap is None:
            return requests
        full = [r for r in requests if self._held_tokens(r) >= cap]
        failed = [r for r in full if not self._try_evict(r, cap - self.eviction.every)]
        return [r for r in requests if r not in failed] if failed else requests

    def _try_evict(self, request: Request, keep: int) -> bool:
        try:
            self._evict(request, keep)
        except PolicyError as error:
            self.failures.append((request, error))
            self.finish(request)
            return False
        return True

    def _held_tokens(self, request: Request) -> int:
        """Most slots any evicting lane of the request holds."""
        tables = self.memory.tables.values()
        return max(
            (int(t.num_slots[request.row].max()) for t in tables if not t.group.ordered), default=0
        )

    # ---- prompts -------------------------------------------------------------------------------

    def _schedule_chunk(self, plan: StepPlan, request: Request, budget: int) -> int:
        """Plan the next chunk of a prompt, as large as budget and pages allow; return its size."""
        tokens = self._chunk_tokens(plan, request, budget)
        if tokens and not self._fits(request, tokens):
            tokens = self._largest_fitting(request, tokens)
        if tokens:
            self.memory.grow(_rows([request]), np.array([tokens], dtype=np.int32))
            plan.add(request, tokens)
        return tokens

    def _chunk_tokens(self, plan: StepPlan, request: Request, budget: int) -> int:
        """Tokens of the next chunk within the budget.

        Where lanes have a cap: up to it while there is room, then one eviction, then `every` tokens
        (or the rest) at once or none, so that who else is in the batch changes nothing.
        """
        if self.eviction.cap is not None and request.num_computed >= self.eviction.cap:
            return self._atomic_chunk(request, budget)
        budget = min(budget, self.config.chunk_tokens)
        if request.params.prompt_logprobs is not None:
            budget = min(budget, max(0, SCORED_TOKENS - plan.num_scored))
        if self.eviction.cap is not None:
            budget = min(budget, self.eviction.cap - request.num_computed)
        return min(request.num_uncomputed, budget)

    def _atomic_chunk(self, request: Request, budget: int) -> int:
        assert self.eviction.cap is not None
        tokens = min(request.num_uncomputed, self.eviction.every)
        return tokens if tokens <= budget and self._evict_full_lanes([request]) else 0

    def _fits(self, request: Request, tokens: int) -> bool:
        return self.memory.can_grow(_rows([request]), np.array([tokens], dtype=np.int32))

    def _largest_fitting(self, request: Request, tokens: int) -> int:
        """Largest chunk below `tokens` whose pages are there, by bisection."""
        if self.eviction.cap is not None and request.num_computed >= self.eviction.cap:
            return 0
        low, high = 0, tokens
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(request, middle) else (low, middle)
        return low

    def _next_to_enter(self) -> Request | None:
        while self._waiting and self._waiting[0][1].state is not RequestState.WAITING:
            heapq.heappop(self._waiting)
        if not self._waiting or len(self.running) >= self.config.max_running:
            return None
        request = self._waiting[0][1]
        return request if self.admission.may_enter(request, self.running) else None

    def _enter(self, request: Request) -> None:
        heapq.heappop(self._waiting)
        self._num_waiting -= 1
        request.row = self.memory.start()
        request.state = RequestState.RUNNING
        self.running.append(request)

    def _unblock(self, plan: StepPlan) -> None:
        """Nobody got a page: let the first in line have the others' pages, one by one."""
        first = min(self.running, key=lambda r: r.order)
        while not plan.requests:
            victim = choose_victim(self.running, first)
            if victim is not None:
                self._preempt(victim)
            else:
                self._pack(first)
            self._schedule_chunk(plan, first, self.config.step_tokens)
            if victim is None:
                break

    def _pack(self, request: Request) -> None:
        """Move the pages of a request that is alone together.

        They may lie between places of pages that are gone, and so keep more slabs than they fill
        from the other page classes. Packed, a request that was admitted can always grow.
        """
        repack(self.memory, request.row)


def _rows(requests: list[Request]) -> NDArray[np.int64]:
    return np.fromiter((r.row for r in requests), dtype=np.int64, count=len(requests))
