"""Batches that run to completion: alternating prefill and decoding phases.

prefill  | prompts of up to `held` rows; no request decodes
decoding | batches of up to `max_num_seqs` of these rows, each until its last row ends
prefill  | ...

`Phases` implements this for paged KV. On dense rows, a `RunToEnd` rule opens no row before all rows
have ended.
"""

from quire.scheduler.batchers.base import Batcher, BatchState, BatchSwaps, BatchView, DenseRule, Q
from quire.scheduler.batchers.prefill_order import PrefillOrder
from quire.scheduler.batchers.units import (
    Unit,
    count_rows,
    first_member,
    has_ended,
    holds_kv,
    is_prefilled,
    num_rows,
    unit_of,
    waits,
    waits_to_decode,
    was_preempted,
)
from quire.scheduler.request import Request


class Phases(Batcher):
    """Admits no request while a batch decodes, except preempted requests of the batch.

    Args:
        state: the scheduler's state.
        held: number of rows that are prefilled before any of them decodes.
        order: chooses the request to prefill next.
    """

    def __init__(self, state: BatchState, held: int, order: PrefillOrder) -> None:
        self._state, self._held, self._order = state, held, order
        self._admitted: dict[Unit, None] = {}  # in the order of admission
        self._batch: dict[Unit, None] = {}
        self._prefills = True

    def begin(self) -> BatchSwaps | None:
        self._admitted = {unit: None for unit in self._admitted if not has_ended(unit)}
        self._batch = {unit: None for unit in self._batch if unit in self._admitted}
        if self._is_over or self._is_too_large:
            self._next_batch()
        return None

    @property
    def _is_over(self) -> bool:
        """Whether the batch has ended."""
        return not self._prefills and not self._batch

    @property
    def _is_too_large(self) -> bool:
        """Whether a unit was preempted in the prefill phase: end it, or units would alternate."""
        preempted = self._prefills and any(map(was_preempted, self._admitted))
        return preempted and any(map(is_prefilled, self._admitted))

    def _next_batch(self) -> None:
        self._batch = {}
        rows = 0
        for unit in sorted(self._admitted, key=lambda unit: not holds_kv(unit)):
            rows += num_rows(unit)
            if self._batch and rows > self._state.max_num_seqs:
                break
            self._batch[unit] = None
        self._prefills = not self._batch

    def decoding(self, ready: list[Request]) -> list[Request]:
        return [] if self._prefills else [r for r in ready if unit_of(r) in self._batch]

    def candidate(self, head: Request, budget: int) -> Request | None:
        for unit in self._admitted if self._prefills else self._batch:
            if waits(unit, self._state.waiting):
                return first_member(unit)
        chosen = self._order.choose(head) if self._prefills else None
        if chosen is None or count_rows(self._admitted) + num_rows(unit_of(chosen)) > self._held:
            return None
        return chosen

    def admitted(self, request: Request) -> None:
        self._admitted[unit_of(request)] = None

    def may_compute(self, request: Request) -> bool:
        if not waits_to_decode(request):
            return True
        return not self._prefills and unit_of(request) in self._batch

    def prefill_tokens(self, budget: int) -> int:
        return budget

    def stalled(self) -> bool:
        """See `Batcher`: the prefill phase is over, or a preempted batch cannot resume."""
        if not self._prefills and any(map(holds_kv, self._batch)):
            return False
        self._next_batch()
        return any(map(holds_kv, self._batch))


class RunToEnd(DenseRule):
    """Fills dense rows only when all rows are free."""

    runs_to_end = True

    def open_rows(self, view: BatchView[Q]) -> int:
        """See `DenseRule`: all rows once no row is live, else none."""
        return 0 if view.live else view.size
