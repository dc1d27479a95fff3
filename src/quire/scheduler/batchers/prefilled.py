"""BATON: a free row is filled with a new query at once.

baton               a new prompt is prefilled in the free row, in the batch's own forward
baton_pd            a free row is filled from a queue of prefilled queries
baton_pd_best_fit   as `baton_pd`, but the query is chosen by length

waiting --- prefill, in groups ---> queue --- a row is free ---> batch, decodes
                                     ^  |
                       needed soon   |  v   hold=host
                                   swap space

step   row 0         row 1             prefill in the same step
7      decodes a     decodes b, ends   chunks of c, d and e, for the queue
8      decodes a     decodes c         next chunks
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeVar

from quire.errors import UnknownName
from quire.policies.options import check_at_least
from quire.scheduler.batchers.base import (
    Batcher,
    BatchState,
    BatchSwaps,
    BatchView,
    DenseRule,
    PagedRule,
    Q,
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
from quire.scheduler.batchers.phases import SimilarLengths, similar_group
from quire.scheduler.request import Request
from quire.tenancy.fair_queue import Order

T = TypeVar("T")
PREFILLS = ("async", "sync")
LOCATIONS = ("device", "host")
_MIN_GROUP_DIVISOR = 4  # of the batch's rows


# ---- the next query of the queue -----------------------------------------------------------------


def best_fit(queue: Sequence[T], num_tokens: Callable[[T], int], longest: int) -> T | None:
    """Return the longest query that is not longer than the longest row; None if there is none.

    Args:
        queue: prefilled queries, best first; the first of equal lengths is returned.
        num_tokens: returns the tokens of a query.
        longest: tokens of the longest row.
    """
    fitting = [each for each in queue if num_tokens(each) <= longest]
    return max(fitting, key=num_tokens, default=None)


class Insertion(ABC):
    """Chooses the next query from the queue of prefilled queries."""

    @abstractmethod
    def choose(self, queue: Sequence[Unit], longest: int) -> Unit:
        """Return the query to insert next.

        Args:
            queue: prefilled queries, at least one, best first.
            longest: tokens of the longest row of the batch; 0 for an empty batch.
        """

    @abstractmethod
    def inserted(self, unit: Unit, first: Unit) -> None:
        """Record that a query was inserted while `first` was the first of the queue."""


class FirstPrefilled(Insertion):
    """The order of the queue."""

    def choose(self, queue: Sequence[Unit], longest: int) -> Unit:
        return queue[0]

    def inserted(self, unit: Unit, first: Unit) -> None:
        pass


class BestFit(Insertion):
    """The longest query that is not longer than the longest row; if none is, the first.

    Args:
        patience: maximum queries that may be inserted before the first one.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._first: Unit | None = None
        self._passed = 0

    def choose(self, queue: Sequence[Unit], longest: int) -> Unit:
        if queue[0] is self._first and self._passed >= self._patience:
            return queue[0]
        return best_fit(queue, lambda unit: first_member(unit).num_tokens, longest) or queue[0]

    def inserted(self, unit: Unit, first: Unit) -> None:
        if first is not self._first:
            self._first, self._passed = first, 0
        self._passed += unit is not first


# ---- the queue -----------------------------------------------------------------------------------


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
        if self._state.is_urgent(first_member(queue[0])):
            return queue[0]
        members = (member for unit in self._batch for member in members_of(unit))
        longest = max((member.num_tokens for member in members), default=0)
        return self._insertion.choose(queue, longest)

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
        # rows free now or within `lead_steps`; at least 1, since outputs can end early
        ending = [unit for unit in self._batch if _steps_left(unit) <= self._options.lead_steps]
        soon, needed_rows = list[Unit](), max(1, self._free_rows + sum(map(num_rows, ending)))
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

    def _is_swapped(self, unit: Unit) -> bool:
        """Whether a unit's KV is held in swap space for a free row."""
        on_host = self._options.on_host and not holds_kv(unit)
        return on_host and any(member.memory.is_swapped_whole for member in members_of(unit))

    # ---- a step --------------------------------------------------------------------------------

    def decoding(self, ready: list[Request]) -> list[Request]:
        return [] if self._fills else [r for r in ready if unit_of(r) in self._batch]

    def candidate(self, head: Request, budget: int) -> Request | None:
        if self._state.is_urgent(head):
            return head
        for unit in self._admitted:
            if waits(unit, self._state.waiting) and not self._is_swapped(unit):  # preempted
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
        """The queue cannot be filled further."""
        filled, self._fills = self._fills, False
        return filled and bool(self._batch)


def _order_of(unit: Unit) -> Order:
    return first_member(unit).order


def _steps_left(unit: Unit) -> int | float:
    """Maximum steps until the first of its sequences ends."""
    left = (m.params.max_tokens - len(m.output_token_ids) for m in members_of(unit))
    return min(left, default=inf)


# ---- baton ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Baton(DenseRule):
    """All free rows are filled at once; every row is padded to the longest new prompt.

    The padded columns are never removed. The rule is for comparison: a slab with padding may exceed
    its capacity, which raises `SlabFull`.

    Source: Cong et al., BATON, section 4.1 (vector shaping).
    """

    name = "baton"

    shapes = True

    def next_group(self, view: BatchView[Q]) -> list[Q]:
        """As many queries as there are free rows."""
        return list(view.waiting[: view.free])


# ---- baton_pd ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BatonPD(PagedRule, DenseRule):
    """Free rows are filled from a queue of prefilled queries; no row is idle while it has any.

    Source: Cong et al., BATON, section 4.2 (vector embedding with prefill and decoding apart).

    Differs from the paper: with paged KV, inserting a query needs no padding and no copy. The queue
    is prefilled in the same steps as the batch, within a token budget. On dense rows, prompts of
    similar length are prefilled separately and inserted without padding; the queue is that of the
    `DynamicBatch`.

    Attributes:
        queue: maximum rows of prefilled queries, in addition to the batch; 0: as many as the batch.
        tokens: maximum prompt tokens of a step with a full batch; 0: all tokens that are left.
        prefill: async (in the steps of the batch), sync (the whole queue whenever it is empty;
            no request decodes meanwhile).
        hold: where KV of the queue is held: device, or host (swapped in before a row ends).
        lead: number of steps before a row's end at which KV is swapped in.
        window: maximum waiting requests searched for similar lengths.
    """

    name = "baton_pd"

    reads_ahead = True

    queue: int = 0
    tokens: int = 256
    prefill: str = "async"
    hold: str = "device"
    lead: int = 4
    window: int = 64

    def __post_init__(self) -> None:
        check_at_least(0, queue=self.queue, tokens=self.tokens, lead=self.lead)
        check_at_least(1, window=self.window)
        if self.prefill not in PREFILLS:
            raise UnknownName("prefill mode", self.prefill, PREFILLS)
        if self.hold not in LOCATIONS:
            raise UnknownName("location of prefilled KV", self.hold, LOCATIONS)

    def queue_options(self, max_num_seqs: int) -> QueueOptions:
        """Return the options of the queue for a batch of `max_num_seqs` rows."""
        return QueueOptions(
            rows=self.queue or max_num_seqs,
            tokens=self.tokens,
            prefills_apart=self.prefill == "sync",
            on_host=self.hold == "host",
            lead_steps=self.lead,
            window=self.window,
        )

    @property
    def swaps_out_prefilled(self) -> bool:
        return self.hold == "host"

    def num_rows(self, max_num_seqs: int) -> int:
        return max_num_seqs + self.queue_options(max_num_seqs).rows

    def make(self, state: BatchState) -> Batcher:
        return PrefilledQueue(state, self.queue_options(state.max_num_seqs), FirstPrefilled())

    def next_group(self, view: BatchView[Q]) -> list[Q]:
        """The first query and similar ones, as many as there are free rows.

        At least a quarter of a batch is prefilled together. Larger groups would need fewer
        forwards, but their KV would be held for longer.
        """
        most = max(1, view.free, view.size // _MIN_GROUP_DIVISOR)
        return similar_group(view.waiting, most, view.group_tokens)


# ---- baton_pd_best_fit ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BatonPDBestFit(BatonPD):
    """As `baton_pd`, but the query is chosen by length.

    On dense rows this reduces padding. If no query fits, the shortest is inserted. A query that
    `patience` later ones have overtaken is inserted next. Paged KV has no padding; there the rows
    of the batch keep similar lengths.

    Attributes:
        queue, tokens, prefill, hold, lead, window: see `BatonPD`.
        patience: maximum queries that may be inserted before the first of the queue.
    """

    name = "baton_pd_best_fit"

    min_ready = 3
    dense_options = ("patience",)

    patience: int = 8

    def __post_init__(self) -> None:
        BatonPD.__post_init__(self)  # not super(): `slots=True` creates a new class
        check_at_least(0, patience=self.patience)

    def make(self, state: BatchState) -> Batcher:
        options = self.queue_options(state.max_num_seqs)
        return PrefilledQueue(state, options, BestFit(self.patience))

    def choose(self, view: BatchView[Q]) -> Q | None:
        """The best fit among the ready queries of the best priority."""
        first = BatonPD.choose(self, view)
        if first is None:
            return None
        equals = [query for query in view.ready if query.priority == first.priority]
        if max(query.number for query in (*equals, *view.live)) - first.number > self.patience:
            return first
        equals.sort(key=lambda query: query.number)
        fitting = best_fit(equals, lambda query: query.num_to_read, view.columns)
        return fitting or min(equals, key=lambda query: query.num_to_read)
