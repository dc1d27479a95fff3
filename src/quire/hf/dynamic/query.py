"""A query: its prompt, its output and its entire state.

No state of a query is indexed by its row. Sampler, seed, penalties, stop rules and positions
therefore remain valid when the query is preempted and resumed.
"""

import enum
import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, NamedTuple, Protocol, runtime_checkable

from quire.config.sampling_params import SamplingParams
from quire.kv.dense.space import ByteMeter
from quire.sampling.detokenizer import OutputText

CANCELLED = "cancelled"


@runtime_checkable
class OutsideKV(Protocol):
    """KV of a query that is in no row; implemented in `quire.kv.dense.row`."""

    @property
    def num_bytes(self) -> int: ...
    def lies_in(self, meter: ByteMeter) -> bool: ...
    def moved(self, device: Any, meter: ByteMeter) -> "OutsideKV": ...
    def free(self) -> None: ...


class QueryState(enum.Enum):
    """State of a query."""

    WAITING = "waiting"  # for its prefill
    READING = "reading"  # its prefill is in progress
    READY = "ready"  # has its KV and a next token, but no row
    RUNNING = "running"  # in a row
    EXTRACTED = "extracted"  # in no batch
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Query:
    """One query; `DynamicBatch.submit` returns it as the handle."""

    number: int
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    sampling_seed: int = 0  # used if `params.seed` is None
    priority: int = 0  # lower values first; may preempt higher ones
    # on the batch's clock; of equal priorities the earliest runs first
    deadline_s: int | float | None = None
    output_token_ids: list[int] = field(default_factory=list)
    text: str = ""  # final text of the output; empty without a tokenizer
    # one for each output token, if `params.logprobs` is set
    logprobs: list[Any] = field(default_factory=list)
    output_text: OutputText | None = None
    state: QueryState = QueryState.WAITING
    stop_reason: str | int | None = None  # the stop text or token id that ended the output
    finish_reason: str | None = None  # stop, length, cancelled or "error: ..."
    row: int | None = None  # of the batch
    kv: OutsideKV | None = None  # outside of the batch
    # of each generated token, on the batch's clock
    times_s: list[float] = field(default_factory=list)
    submitted_s: int | float = 0.0
    started_s: float | None = None  # start of its prefill
    finished_s: float | None = None
    preemptions: int = 0

    @property
    def matcher(self) -> None:
        """None: a dynamic batch has no structured outputs."""
        return None

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens generated so far."""
        return len(self.output_token_ids)

    @property
    def token_ids(self) -> list[int]:
        """Tokens generated so far."""
        return self.output_token_ids

    @property
    def finished(self) -> bool:
        """Whether the query is finished."""
        return self.state is QueryState.FINISHED

    @property
    def to_read(self) -> list[int]:
        """Tokens with KV that the next token attends to: all but the newest output token."""
        return [*self.prompt_token_ids, *self.output_token_ids[:-1]]

    @property
    def num_to_read(self) -> int:
        return len(self.prompt_token_ids) + max(0, len(self.output_token_ids) - 1)

    @property
    def tokens_left(self) -> int:
        return self.params.max_tokens - len(self.output_token_ids)

    @property
    def columns_left(self) -> int:
        """Columns needed in addition to those of `to_read`; the last token needs no column."""
        return self.tokens_left - (not self.output_token_ids)

    @property
    def final_tokens(self) -> int:
        """Maximum number of slots at the end of the query; the last token needs no slot."""
        return len(self.prompt_token_ids) + self.params.max_tokens - 1

    @property
    def certain_tokens(self) -> int:
        """Slots certain to be needed: `final_tokens` if no stop condition can end the query."""
        params = self.params
        may_end = params.stop_token_ids or params.stop or not params.ignore_eos
        return self.num_to_read if may_end else self.final_tokens

    def finish(self, reason: str, now_s: float) -> None:
        self.state, self.finish_reason, self.finished_s = QueryState.FINISHED, reason, now_s

    def drop_kv(self) -> None:
        if self.kv is not None:
            self.kv.free()
            self.kv = None

    @property
    def rank(self) -> tuple[int, int | float, int]:
        """Sort key in the queues: priority, then deadline, then arrival."""
        deadline_s = math.inf if self.deadline_s is None else self.deadline_s
        return (self.priority, deadline_s, self.number)


# The queues: queries that wait for their prefill, and queries with KV but no row.

_QUEUED = (QueryState.WAITING, QueryState.READY)


class QueryQueues:
    """Two queues, by rank."""

    def __init__(self) -> None:
        self.waiting: list[Query] = []
        self.ready: list[Query] = []
        self._longest: list[tuple[int, int, Query]] = []  # heap; entries are removed lazily

    def __len__(self) -> int:
        return len(self.waiting) + len(self.ready)

    def wait(self, query: Query) -> None:
        self._enter(query, self.waiting, QueryState.WAITING)

    def add_ready(self, query: Query) -> None:
        self._enter(query, self.ready, QueryState.READY)

    def _enter(self, query: Query, queue: list[Query], state: QueryState) -> None:
        query.state = state
        insort(queue, query, key=lambda found: found.rank)
        heappush(self._longest, (-query.certain_tokens, query.number, query))

    @property
    def certain_tokens(self) -> int:
        while self._longest and self._longest[0][-1].state not in _QUEUED:
            heappop(self._longest)
        return -self._longest[0][0] if self._longest else 0

    def leave(self, query: Query) -> None:
        (self.waiting if query.state is QueryState.WAITING else self.ready).remove(query)

    def first(self) -> Query | None:
        """The first query of both queues; None if both are empty."""
        heads = [queue[0] for queue in (self.waiting, self.ready) if queue]
        return min(heads, key=lambda found: found.rank, default=None)


# Records of a step of a dynamic batch: tokens for the user, measurements for benchmarks.


class NewToken(NamedTuple):
    """A token of a query."""

    query: Query
    token_id: int


@dataclass(slots=True)
class ReadRecord:
    """A prefill forward."""

    rows: int  # of the forward, as columns, pads counted
    columns: int
    seconds: float  # sampling excluded


@dataclass(slots=True)
class StepRecord:
    """One step."""

    rows: int = 0  # of the slab, free and finished ones included; 0 if no row decoded
    live: int = 0  # rows with a running query
    columns: int = 0  # in attention
    new_columns: int = 0  # of the forward; more than 1 if it also prefilled prompts
    valid_tokens: int = 0  # sum of the live rows' lengths
    queued: bool = False  # whether queries were queued at the decode forward
    decode_s: float = 0.0  # with sampling
    reads: list[ReadRecord] = field(default_factory=list)  # separate prefill forwards
    kv_bytes: int = 0  # on the device at the end of the step
