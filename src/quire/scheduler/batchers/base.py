"""The seam of batchers: what a rule decides for pages, and what it decides for dense rows.

A rule has a name and options. `PagedRule` makes the `Batcher` of a scheduler, whose KV is in pages;
`DenseRule` chooses for a `DynamicBatch`, whose rows lie side by side in one slab. Most rules do
both. A `Batcher` is asked at every step:

    begin        once, before anything of the step is planned
    decoding     which rows decode of those that could
    candidate    whom to let in, where somebody may enter
    reads        who may get tokens beside the decoding rows
    stalled      nobody got anything: may those that were held back move?

A batcher moves no KV itself and never counts pages: admission, limits and preemption go on as they
are under every one of them, and one that has nobody in must let somebody in.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar, runtime_checkable

from quire.scheduler.request import Request
from quire.tenancy.fair_queue import FairQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchState:
    """What a batcher may look at.

    Attributes:
        running: all that hold KV; the scheduler's own list.
        waiting: those that do not; the scheduler's own queue.
        max_num_seqs: rows of a batch.
        max_num_batched_tokens: tokens of a step at most.
        chunk_tokens: tokens of one prompt that a step reads at most.
        urgent: priority from which on, downwards, a request does not wait for others; None: none.
    """

    running: list[Request]
    waiting: FairQueue[Request]
    max_num_seqs: int
    max_num_batched_tokens: int
    chunk_tokens: int
    urgent: int | None = None

    def is_urgent(self, request: Request) -> bool:
        """Whether it takes the place of others."""
        return self.urgent is not None and request.priority <= self.urgent


@dataclass(frozen=True, slots=True)
class Moves:
    """KV of prefilled requests to be moved before a step, as far as there is room.

    Attributes:
        out: running requests; their KV waits on the host.
        back: waiting requests whose KV does.
    """

    out: Sequence[Request] = ()
    back: Sequence[Request] = ()


class Batcher(ABC):
    """One scheduler's batch."""

    @abstractmethod
    def begin(self) -> Moves | None:
        """Note who has ended, left or come since the last step, and fill rows that are free.

        Returns:
            What is to be moved; None for nothing.
        """

    @abstractmethod
    def decoding(self, ready: list[Request]) -> list[Request]:
        """Those that decode in this step.

        Args:
            ready: running requests that lack the KV of one token only.
        """

    @abstractmethod
    def candidate(self, head: Request, budget: int) -> Request | None:
        """Whom to try to let in; None where nobody of this tenant may enter now.

        Args:
            head: the first in line of its tenant, or the first that was never in.
            budget: tokens that the step has left to read.
        """

    @abstractmethod
    def entered(self, request: Request) -> None:
        """A request has entered the KV memory, for the first time or again."""

    @abstractmethod
    def reads(self, request: Request) -> bool:
        """Whether a running request that is not in the plan may get tokens of this step."""

    @abstractmethod
    def prefill_tokens(self, budget: int) -> int:
        """Tokens of prompts this step reads.

        Args:
            budget: what the decoding rows leave of a step.
        """

    @abstractmethod
    def stalled(self) -> bool:
        """Nobody could be planned: whether more requests may decode now than before."""


class BatcherRule(ABC):
    """A rule as it is configured: its fields are its options, with defaults.

    Final classes are frozen dataclasses, and are a `PagedRule`, a `DenseRule` or both.
    """

    name: ClassVar[str]


# ---- pages -------------------------------------------------------------------------------------


class PagedRule(BatcherRule):
    """Decides which requests of a scheduler are in the batch."""

    @property
    def holds_on_host(self) -> bool:
        """Whether KV of prefilled requests waits on the host."""
        return False

    def num_rows(self, max_num_seqs: int) -> int:
        """Rows of KV memory it uses, where a batch has `max_num_seqs`."""
        return max_num_seqs

    @abstractmethod
    def make(self, state: BatchState) -> Batcher:
        """The batcher of one scheduler."""


# ---- dense rows --------------------------------------------------------------------------------


@runtime_checkable
class DenseQuery(Protocol):
    """What a rule may look at of a query that wants a row."""

    @property
    def number(self) -> int: ...  # noqa: D102
    @property
    def priority(self) -> int: ...  # noqa: D102
    @property
    def num_to_read(self) -> int: ...  # noqa: D102


Q = TypeVar("Q", bound=DenseQuery)


@dataclass(frozen=True, slots=True)
class BatchView(Generic[Q]):
    """What a rule sees of a dense batch.

    Attributes:
        size: rows the batch may have now.
        live: queries in rows.
        waiting: prompts to be read, in line.
        ready: queries with KV and no row, in line.
        columns: of the longest row.
        group_tokens: most tokens, pads counted, that are read together.
    """

    size: int
    live: Sequence[Q]
    waiting: Sequence[Q]
    ready: Sequence[Q]
    columns: int
    group_tokens: int

    @property
    def free(self) -> int:
        """Rows that may be filled."""
        return self.size - len(self.live)


class DenseRule(BatcherRule):
    """Decides which prompts are read when, and which query gets which free row.

    Attributes:
        shapes: prompts are read by the batch's own forward, all rows padded to the longest.
        runs_to_end: rows stay as they are, finished ones too, until all have ended.
        reads_ahead: prompts may be read in the background, before a row is free.
        least_ready: prefilled queries wanted to choose from when a row is free.
        dense_options: options that have an effect on dense rows.
    """

    shapes: ClassVar[bool] = False
    runs_to_end: ClassVar[bool] = False
    reads_ahead: ClassVar[bool] = False
    least_ready: ClassVar[int] = 1
    dense_options: ClassVar[tuple[str, ...]] = ()

    def open_rows(self, view: BatchView[Q]) -> int:
        """Rows that may be filled now."""
        return view.free

    @abstractmethod
    def next_group(self, view: BatchView[Q]) -> list[Q]:
        """Which waiting queries are read together next; empty where none waits."""

    def choose(self, view: BatchView[Q]) -> Q | None:
        """Which ready query enters next; None to read others first."""
        if not view.ready:
            return None
        first = view.ready[0]
        outranked = view.waiting and view.waiting[0].priority < first.priority
        return None if outranked else first
