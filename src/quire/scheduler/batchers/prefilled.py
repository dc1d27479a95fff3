"""Batcher that fills free rows from a queue of prefilled queries.

waiting --- prefill, in groups ---> queue --- a row is free ---> batch, decodes
                                     ^  |
                       needed soon   |  v   hold=host
                                   swap space
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from quire.scheduler.batchers.base import Batcher, BatchState, BatchSwaps
from quire.scheduler.batchers.insertion import Insertion
from quire.scheduler.batchers.prefill_order import SimilarLengths
from quire.scheduler.batchers.units import (
    Unit,
    count_rows,
    first_member,
    has_ended,
    holds_kv,
    is_prefilled,
    members_of,
    num_rows,
    unit_of,
    waits,
    waits_to_decode,
    was_preempted,
)
from quire.scheduler.request import Request
from quire.tenancy.fair_queue import Order


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOptions:
    """Options of a queue of prefilled queries.

    Attributes:
        rows: rows of the queue, in addition to those of the batch.
        tokens: maximum prompt tokens of a step with a full batch; 0: all tokens that are left.
        prefills_apart: whenever the queue is empty, fill it completely before decoding continues.
        on_host: hold the KV of queries that are not needed soon in swap space.
        lead_steps: a row that ends within this many steps counts as free soon.
        window: maximum waiting requests searched for similar lengths.
    """

    rows: int
    tokens: int
    prefills_apart: bool
    on_host: bool
    lead_steps: int
    window: int


class PrefilledQueue(Batcher):
    """Prefills prompts before rows are free, and fills free rows in the same step.

    Args:
        state: the scheduler's state.
        options: the options of the queue.
        insertion: chooses the next query of the queue.
    """

    def __init__(self, state: BatchState, options: QueueOptions, insertion: Insertion) -> None:
        self._state, self._options, self._insertion = state, options, insertion
        self._order = SimilarLengths(state.waiting, state.max_num_seqs, options.window)
        self._admitted: dict[Unit, None] = {}  # running, swapped out, or to be recomputed
        self._batch: dict[Unit, None] = {}
        self._fills = options.prefills_apart

    # ---- the batch -----------------------------------------------------------------------------

    def begin(self) -> BatchSwaps | None:
        self._remove_ended()
        self._batch = {unit: None for unit in self._batch if holds_kv(unit)}
        if self._options.prefills_apart and not self._queue(self._admitted):
            self._fills = True
        self._fill()
        if self._batch and any(map(was_preempted, self._queue(self._admitted))):
            self._fills = False  # the memory cannot hold a full queue
        return self._moves() if self._options.on_host else None

    def _remove_ended(self) -> None:
        self._admitted = {unit: None for unit in self._admitted if not has_ended(unit)}
        self._batch = {unit: None for unit in self._batch if unit in self._admitted}

    def _queue(self, units: Iterable[Unit]) -> list[Unit]:
        """Return the units that are not in the batch, best first."""
        return sorted((unit for unit in units if unit not in self._batch), key=_order_of)

    @property
    def _free_rows(self) -> int:
        return self._state.max_num_seqs - count_rows(self._batch)

    def _fill(self) -> None:
        """Insert prefilled running units into free rows; urgent ones also displace others."""
        queue = self._queue(unit for unit in self._admitted if is_prefilled(unit))
        free_rows = self._free_rows
        while queue:
            unit = self._next(queue)
            if num_rows(unit) > free_rows and not self._displace(unit):
                break
            self._batch[unit] = None
            self._insertion.inserted(unit, queue[0])
            queue.remove(unit)
            free_rows = self._free_rows

    def _next(self, queue: list[Unit]) -> Unit:
        urgent = self._state.is_urgent(first_member(queue[0]))
        return queue[0] if urgent else self._insertion.choose(queue, self._longest)

    @property
    def _longest(self) -> int:
        members = (member for unit in self._batch for member in members_of(unit))
        return max((member.num_tokens for member in members), default=0)

    def _displace(self, unit: Unit) -> bool:
        """Move units of lower priority from the batch to the queue, with KV, for an urgent one."""
        urgent = first_member(unit)
        if not self._state.is_urgent(urgent):
            return False
        later = [u for u in self._batch if first_member(u).priority > urgent.priority]
        if self._free_rows + sum(map(num_rows, later)) < num_rows(unit):
            return False
        later.sort(key=_order_of)
        while self._free_rows < num_rows(unit):
            del self._batch[later.pop()]
        return True

    # ---- swap space ----------------------------------------------------------------------------

    def _moves(self) -> BatchSwaps:
        """Swap out units that have just been prefilled; swap in those that are needed soon."""
        queue = [u for u in self._queue(self._admitted) if self._is_swapped(u) or is_prefilled(u)]
        soon, needed_rows = list[Unit](), self._rows_soon_free()
        rest = list(queue)
        while rest and count_rows(dict.fromkeys(soon)) < needed_rows:
            soon.append(self._next(rest))
            rest.remove(soon[-1])
        out = [
            u
            for u in rest
            if holds_kv(u) and all(m.progress.num_admissions == 1 for m in members_of(u))
        ]
        back = [first_member(unit) for unit in soon if not holds_kv(unit)]
        return BatchSwaps([first_member(unit) for unit in out], back)

    def _rows_soon_free(self) -> int:
        """Rows free now or within `lead_steps`; at least 1, since outputs can end early."""
        ending = (unit for unit in self._batch if _steps_left(unit) <= self._options.lead_steps)
        return max(1, self._free_rows + sum(map(num_rows, ending)))

    def _is_swapped(self, unit: Unit) -> bool:
        """Whether a unit's KV is held in swap space for a free row."""
        if not self._options.on_host or holds_kv(unit):
            return False
        swapped = [m.memory.swapped for m in members_of(unit) if m.memory.swapped is not None]
        return any(not each.keep_from for each in swapped)

    def _is_preempted(self, unit: Unit) -> bool:
        return waits(unit, self._state.waiting) and not self._is_swapped(unit)

    # ---- a step --------------------------------------------------------------------------------

    def decoding(self, ready: list[Request]) -> list[Request]:
        return [] if self._fills else [r for r in ready if unit_of(r) in self._batch]

    def candidate(self, head: Request, budget: int) -> Request | None:
        if self._state.is_urgent(head):
            return head
        for unit in self._admitted:
            if self._is_preempted(unit):
                return first_member(unit)
        new = self._first_new(head)
        if new is None or (self._options.prefills_apart and not self._fills):
            return None
        chosen = self._order.choose(new)
        rows = count_rows(self._admitted) + num_rows(unit_of(chosen))
        return chosen if rows <= self._state.max_num_seqs + self._options.rows else None

    def _first_new(self, head: Request) -> Request | None:
        """The tenant's first request that is not admitted, alone or with its group.

        A member that was admitted with its group and then split off it is a request of its own.
        """
        if unit_of(head) not in self._admitted:
            return head
        waiting = self._state.waiting.of_tenant(head.tenant)
        return next(
            (request for request in waiting if unit_of(request) not in self._admitted), None
        )

    def admitted(self, request: Request) -> None:
        self._remove_ended()  # an urgent request is admitted before `begin`
        unit = unit_of(request)
        self._admitted[unit] = None
        if not any(m.is_running for m in members_of(unit) if m is not request):
            # It was preempted after the last step: it has lost its row to the units before it. Else
            # it could resume and be preempted forever while they wait for its row.
            self._batch.pop(unit, None)
        self._fill()

    def may_compute(self, request: Request) -> bool:
        if not waits_to_decode(request):
            return True
        return not self._fills and unit_of(request) in self._batch

    def prefill_tokens(self, budget: int) -> int:
        if not self._options.tokens or self._free_rows > 0 or self._fills:
            return budget
        prefills = (r for r in self._state.running if not waits_to_decode(r))
        if any(map(self._state.is_urgent, prefills)):
            return budget
        return min(budget, self._options.tokens)

    def stalled(self) -> bool:
        """See `Batcher`: the queue cannot be filled further."""
        filled, self._fills = self._fills, False
        return filled and bool(self._batch)


def _order_of(unit: Unit) -> Order:
    return first_member(unit).order


def _steps_left(unit: Unit) -> int | float:
    """Maximum steps until the first of its sequences ends."""
    left = (m.params.max_tokens - len(m.output_token_ids) for m in members_of(unit))
    return min(left, default=inf)
