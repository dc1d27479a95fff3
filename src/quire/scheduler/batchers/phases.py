"""Batches that run to their end: prompts are read, then rows decode, one after the other.

reads   | prompts of up to `held` rows, nobody decodes
decodes | up to `max_num_seqs` of them until the last one ends; the next of them; ...
reads   | ...

In pages `Phases` keeps to this; on dense rows a `RunToEnd` rule opens no row before all have ended.
"""

from quire.scheduler.batchers.base import Batcher, BatchState, BatchView, DenseRule, Moves, Q
from quire.scheduler.batchers.prefill_order import PrefillOrder
from quire.scheduler.batchers.units import (
    Unit,
    count_rows,
    first_member,
    has_ended,
    has_left,
    holds_kv,
    is_prefilled,
    num_rows,
    unit_of,
    waits,
    waits_to_decode,
)
from quire.scheduler.request import Request


class Phases(Batcher):
    """Lets nobody in while a batch decodes, except those of the batch that gave way.

    Args:
        state: of the scheduler.
        held: rows that are read before any of them decodes.
        order: whose prompt is read next.
    """

    def __init__(self, state: BatchState, held: int, order: PrefillOrder) -> None:
        self._state, self._held, self._order = state, held, order
        self._entered: dict[Unit, None] = {}  # in the order in which they came
        self._batch: dict[Unit, None] = {}
        self._reads = True

    def begin(self) -> Moves | None:
        """See `Batcher`."""
        self._entered = {unit: None for unit in self._entered if not has_ended(unit)}
        self._batch = {unit: None for unit in self._batch if unit in self._entered}
        if self._is_over or self._is_too_large:
            self._next_batch()
        return None

    @property
    def _is_over(self) -> bool:
        """Whether the batch has ended."""
        return not self._reads and not self._batch

    @property
    def _is_too_large(self) -> bool:
        """Whether not all fit whose prompts are read: without this they would take turns."""
        gave_way = self._reads and any(map(has_left, self._entered))
        return gave_way and any(map(is_prefilled, self._entered))

    def _next_batch(self) -> None:
        self._batch = {}
        rows = 0
        for unit in sorted(self._entered, key=lambda unit: not holds_kv(unit)):
            rows += num_rows(unit)
            if self._batch and rows > self._state.max_num_seqs:
                break
            self._batch[unit] = None
        self._reads = not self._batch

    def decoding(self, ready: list[Request]) -> list[Request]:
        """See `Batcher`."""
        return [] if self._reads else [r for r in ready if unit_of(r) in self._batch]

    def candidate(self, head: Request, budget: int) -> Request | None:
        """See `Batcher`."""
        for unit in self._entered if self._reads else self._batch:
            if waits(unit, self._state.waiting):
                return first_member(unit)
        chosen = self._order.choose(head) if self._reads else None
        if chosen is None or count_rows(self._entered) + num_rows(unit_of(chosen)) > self._held:
            return None
        return chosen

    def entered(self, request: Request) -> None:
        """See `Batcher`."""
        self._entered[unit_of(request)] = None

    def reads(self, request: Request) -> bool:
        """See `Batcher`."""
        if not waits_to_decode(request):
            return True
        return not self._reads and unit_of(request) in self._batch

    def prefill_tokens(self, budget: int) -> int:
        """See `Batcher`."""
        return budget

    def stalled(self) -> bool:
        """See `Batcher`: nothing is left to read, or a batch that is away finds no room."""
        if not self._reads and any(map(holds_kv, self._batch)):
            return False
        self._next_batch()
        return any(map(holds_kv, self._batch))


class RunToEnd(DenseRule):
    """Fills dense rows only when no query is left in any of them."""

    runs_to_end = True

    def open_rows(self, view: BatchView[Q]) -> int:
        """See `DenseRule`: all, once no row goes on."""
        return 0 if view.live else view.size
