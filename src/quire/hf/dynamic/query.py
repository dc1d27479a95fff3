"""A query: what was asked, what has been answered, where it stands. All of its state is here.

Nothing about a query is kept by the number of its row, so sampler, seed, penalties, stop rules and
positions travel with it when it is taken out of a batch and put back.
"""

import enum
import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, NamedTuple, Protocol, runtime_checkable

from quire.config.sampling_params import SamplingParams
from quire.kv.dense.meter import ByteMeter


@runtime_checkable
class OutsideKV(Protocol):
    """KV of a query that is in no row; `quire.kv.dense.row` has it."""

    @property
    def num_bytes(self) -> int: ...  # noqa: D102
    def lies_in(self, meter: ByteMeter) -> bool: ...  # noqa: D102
    def moved(self, device: Any, meter: ByteMeter) -> "OutsideKV": ...  # noqa: D102
    def free(self) -> None: ...  # noqa: D102


class QueryState(enum.Enum):
    """Where a query is in its life."""

    WAITING = "waiting"  # to be read
    READING = "reading"  # its prompt, in the background
    READY = "ready"  # has its KV and a next token, and no row
    RUNNING = "running"  # in a row
    EXTRACTED = "extracted"  # in no batch
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Query:
    """One query, which is also the handle its sender gets.

    Attributes:
        number: in the order of arrival.
        prompt_token_ids: what was asked.
        params: how tokens are chosen and when to stop.
        sampling_seed: where `params.seed` is None.
        priority: lower goes first, as in the engine, and may take the row of a higher one.
        deadline_s: on the batch's clock; of equal priorities the earliest goes first.
        output_token_ids: what has been answered.
        state: where it stands.
        finish_reason: stop, length or cancelled; None while it goes on.
        row: of the batch.
        kv: where it has some outside the batch.
        times_s: when each token came, on the batch's clock.
        submitted_s, entered_s, finished_s: likewise; entered when its prompt was begun.
        preemptions: how often it was taken out.
    """

    number: int
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    sampling_seed: int = 0
    priority: int = 0
    deadline_s: int | float | None = None
    output_token_ids: list[int] = field(default_factory=list)
    state: QueryState = QueryState.WAITING
    finish_reason: str | None = None
    row: int | None = None
    kv: OutsideKV | None = None
    times_s: list[float] = field(default_factory=list)
    submitted_s: int | float = 0.0
    entered_s: float | None = None
    finished_s: float | None = None
    preemptions: int = 0

    @property
    def token_ids(self) -> list[int]:
        """The answer so far."""
        return self.output_token_ids

    @property
    def finished(self) -> bool:
        """Whether no more tokens come."""
        return self.state is QueryState.FINISHED

    @property
    def to_read(self) -> list[int]:
        """Tokens whose KV it needs before its next one: all but the newest of the answer."""
        return [*self.prompt_token_ids, *self.output_token_ids[:-1]]

    @property
    def num_to_read(self) -> int:
        """How many those are."""
        return len(self.prompt_token_ids) + max(0, len(self.output_token_ids) - 1)

    @property
    def tokens_left(self) -> int:
        """Tokens to be generated at most."""
        return self.params.max_tokens - len(self.output_token_ids)

    @property
    def columns_left(self) -> int:
        """Columns that follow those it has to read; the last token takes none."""
        return self.tokens_left - (not self.output_token_ids)

    @property
    def final_tokens(self) -> int:
        """Slots it takes at its end at most; the last token has none."""
        return len(self.prompt_token_ids) + self.params.max_tokens - 1

    @property
    def certain_tokens(self) -> int:
        """Slots it will take for certain: to its end where nothing can end it early."""
        may_end = self.params.stop_token_ids or not self.params.ignore_eos
        return self.num_to_read if may_end else self.final_tokens

    def finish(self, reason: str, now_s: float) -> None:
        """No more tokens come."""
        self.state, self.finish_reason, self.finished_s = QueryState.FINISHED, reason, now_s

    def drop_kv(self) -> None:
        """Give back what it has outside the batch."""
        if self.kv is not None:
            self.kv.free()
            self.kv = None

    @property
    def rank(self) -> tuple[int, int | float, int]:
        """Its place in line: by priority, then deadline, then arrival."""
        deadline_s = math.inf if self.deadline_s is None else self.deadline_s
        return (self.priority, deadline_s, self.number)


# ---- queues --------------------------------------------------------------------------------------

# Who waits: prompts to be read, and queries with KV but no row, each in line.

_IN_LINE = (QueryState.WAITING, QueryState.READY)


class QueryQueues:
    """Two queues, by rank.

    Attributes:
        waiting: to be read.
        ready: read, or taken out of a row.
    """

    def __init__(self) -> None:
        self.waiting: list[Query] = []
        self.ready: list[Query] = []
        self._longest: list[tuple[int, int, Query]] = []  # heap; those who left stay for a while

    def __len__(self) -> int:
        return len(self.waiting) + len(self.ready)

    def wait(self, query: Query) -> None:
        """To be read."""
        self._enter(query, self.waiting, QueryState.WAITING)

    def stand_ready(self, query: Query) -> None:
        """Has its KV."""
        self._enter(query, self.ready, QueryState.READY)

    def _enter(self, query: Query, queue: list[Query], state: QueryState) -> None:
        query.state = state
        insort(queue, query, key=lambda found: found.rank)
        heappush(self._longest, (-query.certain_tokens, query.number, query))

    @property
    def certain_tokens(self) -> int:
        """Most that anybody in line will have for certain."""
        while self._longest and self._longest[0][-1].state not in _IN_LINE:
            heappop(self._longest)
        return -self._longest[0][0] if self._longest else 0

    def leave(self, query: Query) -> None:
        """Go, to a row or for good."""
        (self.waiting if query.state is QueryState.WAITING else self.ready).remove(query)

    def first(self) -> Query | None:
        """Whoever is first of both."""
        heads = [queue[0] for queue in (self.waiting, self.ready) if queue]
        return min(heads, key=lambda found: found.rank, default=None)


# ---- record --------------------------------------------------------------------------------------

# What a step of a dynamic batch did: tokens for the user, numbers for benches.


class NewToken(NamedTuple):
    """A token of a query.

    Attributes:
        query: whose.
        token_id: which.
    """

    query: Query
    token_id: int


@dataclass(slots=True)
class ReadRecord:
    """A forward over prompts.

    Attributes:
        rows, columns: of it, pads counted.
        seen: columns before it.
        seconds: it took, sampling left out.
    """

    rows: int
    columns: int
    seen: int
    seconds: float


@dataclass(slots=True)
class StepRecord:
    """One step.

    Attributes:
        rows: of the slab, empty ones and those that have ended included; 0 where none decoded.
        live: rows that went on.
        columns: that attention saw.
        new_columns: of the forward; more than 1 where prompts were read by it.
        valid_tokens: sum of the live rows' lengths.
        queued: whether others waited when it decoded.
        decode_s: the forward and choosing tokens.
        reads: prompts read apart.
        kv_bytes: held at the end.
    """

    rows: int = 0
    live: int = 0
    columns: int = 0
    new_columns: int = 0
    valid_tokens: int = 0
    queued: bool = False
    decode_s: float = 0.0
    reads: list[ReadRecord] = field(default_factory=list)
    kv_bytes: int = 0
