"""What a simulation remembers of each request."""

import math
from dataclasses import dataclass, field

from quire.kv.memory import KVMemory
from quire.sim.traces.base import TraceRequest

TOO_LONG = "context"
NEVER_FITS = "memory"


@dataclass(slots=True)
class RequestRecord:
    """One request's life, in virtual seconds; NaN where it never came so far.

    Attributes:
        line: of the trace.
        tenant: on whose account.
        arrival_s: when it came.
        prompt_tokens: of its prompt.
        answer_tokens: generated in the end; an answer of 0 tokens counts as 1, for a request that
            runs samples once.
        cut_tokens: of its recorded answer, left out because the context ended.
        refused: why it never ran: its prompt does not fit the model's context, or its KV the
            memory. None: it was answered.
        admitted_s: begin of the first step with it.
        first_token_s, finish_s: ends of the steps with its first and last token.
        cached_tokens: of its prompt, found in the cache when it entered.
        preemptions: times it was thrown out.
        deadline_s: seconds from its arrival in which its answer was wanted; None: whenever.
    """

    line: int
    tenant: str
    arrival_s: float
    prompt_tokens: int
    answer_tokens: int
    cut_tokens: int = 0
    refused: str | None = None
    admitted_s: float = math.nan
    first_token_s: float = math.nan
    finish_s: float = math.nan
    cached_tokens: int = 0
    preemptions: int = 0
    deadline_s: float | None = None

    @property
    def finished(self) -> bool:
        """Whether it was answered."""
        return not math.isnan(self.finish_s)

    @property
    def due_s(self) -> float:
        """When its answer is wanted; infinity where that does not matter."""
        return math.inf if self.deadline_s is None else self.arrival_s + self.deadline_s

    @property
    def in_time(self) -> bool:
        """Whether it was answered by then."""
        return self.finish_s <= self.due_s

    @property
    def queue_s(self) -> float:
        """From its arrival to its first step."""
        return self.admitted_s - self.arrival_s

    @property
    def ttft_s(self) -> float:
        """Time to its first token."""
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """Time per token after the first; NaN for an answer of one token."""
        if self.answer_tokens < 2:
            return math.nan
        return (self.finish_s - self.first_token_s) / (self.answer_tokens - 1)

    @property
    def e2e_s(self) -> float:
        """From its arrival to its end."""
        return self.finish_s - self.arrival_s


def open_record(request: TraceRequest, max_positions: int) -> RequestRecord:
    """The record of a request that has just come.

    An answer that would pass the model's context is cut there, as an engine cuts it; a prompt that
    leaves no room for a token is refused.
    """
    prompt, wanted = request.prompt_tokens, max(1, request.answer.tokens)
    room = max_positions - prompt
    answer = max(0, min(wanted, room))
    return RequestRecord(
        line=request.line,
        tenant=request.tenant,
        arrival_s=request.arrival_s,
        prompt_tokens=prompt,
        answer_tokens=answer,
        cut_tokens=wanted - answer,
        deadline_s=request.deadline_s,
        refused=None if answer else TOO_LONG,
    )


# ---- gauges --------------------------------------------------------------------------------------

# What is read off a simulation at every step, weighted by the time the step takes.

_SAMPLES_AT_MOST = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One look.

    Attributes:
        time_s: begin of the step.
        used_bytes: of the arena, pages that wait in the prefix cache included.
        allocated_bytes: pages of running sequences, as often as a sequence names them, and pages
            reserved for them.
        wasted_bytes: of these, slots without a token.
        running, waiting: requests.
    """

    time_s: float
    used_bytes: int
    allocated_bytes: int
    wasted_bytes: int
    running: int
    waiting: int


def read(memory: KVMemory, *, time_s: float, running: int, waiting: int) -> Reading:
    """Look at a memory. Slots a step is about to write count as filled."""
    allocated = wasted = 0
    for table in memory.tables.values():
        page = table.group.page_class
        pages, slots = int(table.num_pages.sum()), int(table.num_slots.sum())
        if memory.placement.reserves:
            pages += int(memory.placement.reserved_pages(table, memory.live_rows).sum())
        allocated += pages * page.page_bytes
        wasted += (pages * page.tokens - slots) * page.page_bytes // page.tokens
    return Reading(
        time_s=time_s,
        used_bytes=memory.total_bytes - memory.free_bytes,
        allocated_bytes=allocated,
        wasted_bytes=wasted,
        running=running,
        waiting=waiting,
    )


@dataclass(slots=True)
class Gauges:
    """Sums, peaks, and a thinned series of readings.

    Attributes:
        time_s: held so far.
        used_byte_s, allocated_byte_s, wasted_byte_s, running_s, waiting_s: readings x seconds.
        peak_used_bytes, peak_running, peak_waiting: the most.
        samples: every so many readings, at most 4,096 of them.
    """

    time_s: float = 0.0
    used_byte_s: float = 0.0
    allocated_byte_s: float = 0.0
    wasted_byte_s: float = 0.0
    running_s: float = 0.0
    waiting_s: float = 0.0
    peak_used_bytes: int = 0
    peak_running: int = 0
    peak_waiting: int = 0
    samples: list[Reading] = field(default_factory=list)
    _stride: int = 1
    _held: int = 0

    def hold(self, reading: Reading, seconds: float) -> None:
        """Count a reading that stands for so many seconds."""
        self.time_s += seconds
        self.used_byte_s += reading.used_bytes * seconds
        self.allocated_byte_s += reading.allocated_bytes * seconds
        self.wasted_byte_s += reading.wasted_bytes * seconds
        self.running_s += reading.running * seconds
        self.waiting_s += reading.waiting * seconds
        self.peak_used_bytes = max(self.peak_used_bytes, reading.used_bytes)
        self.peak_running = max(self.peak_running, reading.running)
        self.peak_waiting = max(self.peak_waiting, reading.waiting)
        self._sample(reading)

    def _sample(self, reading: Reading) -> None:
        if self._held % self._stride == 0:
            self.samples.append(reading)
            if len(self.samples) > _SAMPLES_AT_MOST:
                self.samples = self.samples[::2]
                self._stride *= 2
        self._held += 1

    @property
    def waste_fraction(self) -> float:
        """Allocated slots without a token, over allocated slots, over time."""
        return self.wasted_byte_s / self.allocated_byte_s if self.allocated_byte_s else 0.0

    def mean(self, name: str) -> float:
        """Mean over time of `used_byte`, `running` or `waiting`."""
        total: float = getattr(self, f"{name}_s")
        return total / self.time_s if self.time_s else 0.0
