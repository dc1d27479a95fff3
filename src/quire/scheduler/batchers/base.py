"""Interface of batching rules, for paged KV and for dense rows, and the units of a batch.

A rule has a name and options. `PagedRule` creates the `Batcher` of a scheduler, whose KV is in
pages. `DenseRule` selects queries for a `DynamicBatch`, whose rows are in one contiguous slab. Most
rules are both. The scheduler calls a `Batcher` in every step:

    begin        once, before the step is planned
    decoding     which of the ready rows decode
    candidate    which waiting request may be admitted
    may_compute  which running requests may get tokens in addition to the decoding rows
    stalled      no request could be planned: may other rows decode?

A batcher does not move KV or count pages. Admission, limits and preemption are the same for all
batchers. A batcher without running requests must return a candidate.

A unit of a batch is a single request, or a whole group of sequences of one prompt:

    waiting ---> prefill ---> prefilled: has its first output token ---> decoding ---> ended
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar, runtime_checkable

from quire.scheduler.request import Request, RequestGroup, RequestState
from quire.tenancy.fair_queue import FairQueue

Unit = Request | RequestGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchState:
    """Scheduler state that a batcher may read.

    Attributes:
        running: the scheduler's list of running requests.
        waiting: the scheduler's queue of waiting requests.
        max_num_seqs: rows of a batch.
        max_num_batched_tokens: maximum tokens of a step.
        chunk_tokens: maximum tokens of one prompt in a step.
        urgent: largest priority value of an urgent request; None: no request is urgent.
    """

    running: list[Request]
    waiting: FairQueue[Request]
    max_num_seqs: int
    max_num_batched_tokens: int
    chunk_tokens: int
    urgent: int | None = None

    def is_urgent(self, request: Request) -> bool:
        """Whether a request is urgent, so that it may take the row of another one."""
        return self.urgent is not None and request.priority <= self.urgent


@dataclass(frozen=True, slots=True)
class BatchSwaps:
    """Swaps of prefilled requests before a step, as far as memory allows.

    Attributes:
        swap_out: running requests to swap out.
        swap_in: waiting requests to swap in.
    """

    swap_out: Sequence[Request] = ()
    swap_in: Sequence[Request] = ()


class Batcher(ABC):
    """One scheduler's batch."""

    @abstractmethod
    def begin(self) -> BatchSwaps | None:
        """Update the batch after the last step, and fill free rows.

        Returns:
            The swaps before this step; None if there are none.
        """

    @abstractmethod
    def decoding(self, ready: list[Request]) -> list[Request]:
        """Return the requests that decode in this step.

        Args:
            ready: running requests whose KV lacks one token.
        """

    @abstractmethod
    def candidate(self, head: Request, budget: int) -> Request | None:
        """Return the request of a tenant to admit next; None if none may be admitted now.

        Args:
            head: the tenant's first waiting request, or the first that was never admitted.
            budget: tokens that the step has left for prefill.
        """

    @abstractmethod
    def admitted(self, request: Request) -> None:
        """Record that a request was admitted or resumed."""

    @abstractmethod
    def may_compute(self, request: Request) -> bool:
        """Whether a running request that is not in the plan may get tokens of this step."""

    @abstractmethod
    def prefill_tokens(self, budget: int) -> int:
        """Return the maximum number of prompt tokens in this step.

        Args:
            budget: tokens that the decoding rows leave.
        """

    @abstractmethod
    def stalled(self) -> bool:
        """Release rows after an empty plan; return whether more requests may decode now."""


class BatcherRule(ABC):
    """A batching rule with its options, which are its fields.

    Concrete classes are frozen dataclasses, and are a `PagedRule`, a `DenseRule` or both.
    """

    name: ClassVar[str]


class PagedRule(BatcherRule):
    """Batching rule of a scheduler, whose KV is in pages."""

    @property
    def swaps_out_prefilled(self) -> bool:
        """Whether prefilled requests are swapped out until a row is free."""
        return False

    def num_rows(self, max_num_seqs: int) -> int:
        """Rows of the KV memory for batches of `max_num_seqs` rows."""
        return max_num_seqs

    @abstractmethod
    def make(self, state: BatchState) -> Batcher:
        """Create the batcher of one scheduler."""


@runtime_checkable
class DenseQuery(Protocol):
    """Properties of a query for a row, for batching rules."""

    @property
    def number(self) -> int: ...
    @property
    def priority(self) -> int: ...
    @property
    def num_to_read(self) -> int: ...


Q = TypeVar("Q", bound=DenseQuery)


@dataclass(frozen=True, slots=True)
class BatchView(Generic[Q]):
    """State of a dense batch, for batching rules.

    Attributes:
        size: maximum number of rows now.
        live: queries in rows.
        waiting: queries to prefill, in order.
        ready: prefilled queries without a row, in order.
        columns: columns of the longest row.
        group_tokens: maximum tokens of one prefill group, padding included.
    """

    size: int
    live: Sequence[Q]
    waiting: Sequence[Q]
    ready: Sequence[Q]
    columns: int
    group_tokens: int

    @property
    def free(self) -> int:
        """Number of free rows."""
        return self.size - len(self.live)


class DenseRule(BatcherRule):
    """Batching rule of a dense batch: order of prefills, and queries for free rows.

    Attributes:
        shapes: prompts are prefilled in the batch's own forward, all rows padded to the longest.
        runs_to_end: finished rows are not refilled until all rows have finished.
        reads_ahead: prompts may be prefilled in the background, before a row is free.
        min_ready: number of prefilled queries to choose from when a row is free.
        dense_options: options that have an effect on dense rows.
    """

    shapes: ClassVar[bool] = False
    runs_to_end: ClassVar[bool] = False
    reads_ahead: ClassVar[bool] = False
    min_ready: ClassVar[int] = 1
    dense_options: ClassVar[tuple[str, ...]] = ()

    def open_rows(self, view: BatchView[Q]) -> int:
        """Number of rows that may be filled now."""
        return view.free

    @abstractmethod
    def next_group(self, view: BatchView[Q]) -> list[Q]:
        """Return the waiting queries to prefill together next; empty if none waits."""

    def choose(self, view: BatchView[Q]) -> Q | None:
        """Return the ready query to insert next; None to prefill others first."""
        if not view.ready:
            return None
        first = view.ready[0]
        outranked = view.waiting and view.waiting[0].priority < first.priority
        return None if outranked else first


# ---- units of a batch ----------------------------------------------------------------------------


def unit_of(request: Request) -> Unit:
    """Return the request's group, or the request itself without a group."""
    return request if request.group is None else request.group


def members_of(unit: Unit) -> list[Request]:
    """Return the active sequences of a unit."""
    return unit.members if isinstance(unit, RequestGroup) else [unit]


def num_rows(unit: Unit) -> int:
    """Number of rows of a unit, including reserved ones."""
    return unit.num_rows if isinstance(unit, RequestGroup) else 1


def count_rows(units: "dict[Unit, None]") -> int:
    """Number of rows of several units."""
    return sum(map(num_rows, units))


def has_ended(unit: Unit) -> bool:
    """Whether all members have finished."""
    return all(member.progress.state is RequestState.FINISHED for member in members_of(unit))


def holds_kv(unit: Unit) -> bool:
    """Whether any member is running."""
    return any(member.is_running for member in members_of(unit))


def was_preempted(unit: Unit) -> bool:
    """Whether any member was preempted after its first admission, resumed ones included."""
    return not holds_kv(unit) or any(
        member.progress.num_admissions > 1 for member in members_of(unit)
    )


def first_member(unit: Unit) -> Request:
    """Return the first active member, which represents the unit in the queue."""
    return members_of(unit)[0]


def waits(unit: Unit, waiting: FairQueue[Request]) -> bool:
    """Whether a unit is in the queue."""
    return not has_ended(unit) and first_member(unit) in waiting


def waits_to_decode(request: Request) -> bool:
    """Whether a running request has an output token and lacks only the KV of its last token."""
    return request.num_uncomputed == 1 and bool(request.output_token_ids)


def is_prefilled(unit: Unit) -> bool:
    """Whether some running member is ready to decode."""
    return any(member.is_running and waits_to_decode(member) for member in members_of(unit))
