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
from quire.kv.dense.meter import ByteMeter
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
    """One query; `DynamicBatch.submit` returns it as the handle.

    Attributes:
        number: sequence number in the order of arrival.
        params: sampling parameters and stop conditions.
        sampling_seed: seed used if `params.seed` is None.
        priority: lower values are scheduled first, as in the engine, and may preempt higher ones.
        deadline_s: deadline on the batch's clock; of equal priorities the earliest runs first.
        output_token_ids: tokens generated so far.
        text: text of the output that is final; empty without a tokenizer.
        logprobs: a `SampledToken` for each output token, if `params.logprobs` is set.
        choices: the completions of the prompt, this one first; one if n is 1.
        forks: completions that start when the prompt is prefilled.
        output_text: detokenizes the output and applies its stop rules.
        finish_reason: stop, length, cancelled or "error: ..."; None until it is finished.
        stop_reason: the stop text or token id that ended the output.
        row: row of the batch; None if it has none.
        kv: KV outside of the batch; None if it has none.
        times_s: time of each generated token, on the batch's clock.
        submitted_s, started_s, finished_s: likewise; started_s is the start of its prefill.
    """

    number: int
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    sampling_seed: int = 0
    priority: int = 0
    deadline_s: int | float | None = None
    output_token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    choices: "list[Query]" = field(default_factory=list)
    forks: "list[Query]" = field(default_factory=list)
    output_text: OutputText | None = None
    state: QueryState = QueryState.WAITING
    stop_reason: str | int | None = None
    finish_reason: str | None = None
    row: int | None = None
    kv: OutsideKV | None = None
    times_s: list[float] = field(default_factory=list)
    submitted_s: int | float = 0.0
    started_s: float | None = None
    finished_s: float | None = None
    preemptions: int = 0

    @property
    def matcher(self) -> None:
        """None: a dynamic batch has no structured outputs."""
        return None

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def token_ids(self) -> list[int]:
        return self.output_token_ids

    @property
    def finished(self) -> bool:
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
        """Free the query's KV outside of the batch."""
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
    """A prefill forward.

    Attributes:
        rows, columns: shape of the forward, pads counted.
        seen: columns processed before the forward.
        seconds: duration, sampling excluded.
    """

    rows: int
    columns: int
    seen: int
    seconds: float


@dataclass(slots=True)
class StepRecord:
    """One step.

    Attributes:
        rows: rows of the slab, free and finished ones included; 0 if no row decoded.
        live: rows with a running query.
        new_columns: columns of the forward; more than 1 if it also prefilled prompts.
        valid_tokens: sum of the live rows' lengths.
        queued: whether queries were queued at the decode forward.
        decode_s: duration of the decode forward and of sampling.
        reads: separate prefill forwards.
        kv_bytes: KV bytes on the device at the end of the step.
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
