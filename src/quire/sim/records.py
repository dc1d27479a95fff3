"""Records of simulated requests, and statistics over all steps."""

import math
from dataclasses import dataclass, field

from quire.kv.memory import KVMemory
from quire.sim.traces.base import TraceRequest

TOO_LONG = "context"
NEVER_FITS = "memory"


@dataclass(slots=True)
class RequestRecord:
    """Times and lengths of one request, in virtual seconds; NaN for stages it did not reach."""

    line: int  # in the trace
    tenant: str
    arrival_s: float
    prompt_tokens: int
    answer_tokens: int  # an output of 0 tokens counts as 1: a request that runs samples once
    cut_tokens: int = 0  # of the recorded output beyond the context length
    refused: str | None = None  # the reason if the request was rejected
    admitted_s: float = math.nan  # start of the first step with the request
    first_token_s: float = math.nan  # end of a step, as finish_s
    finish_s: float = math.nan
    cached_tokens: int = 0  # found in the prefix cache at admission
    preemptions: int = 0
    deadline_s: float | None = None  # seconds from arrival

    @property
    def finished(self) -> bool:
        return not math.isnan(self.finish_s)

    @property
    def due_s(self) -> float:
        return math.inf if self.deadline_s is None else self.arrival_s + self.deadline_s

    @property
    def in_time(self) -> bool:
        return self.finish_s <= self.due_s

    @property
    def queue_s(self) -> float:
        return self.admitted_s - self.arrival_s

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        if self.answer_tokens < 2:
            return math.nan
        return (self.finish_s - self.first_token_s) / (self.answer_tokens - 1)

    @property
    def e2e_s(self) -> float:
        return self.finish_s - self.arrival_s


def open_record(request: TraceRequest, max_positions: int) -> RequestRecord:
    """The record of a new request.

    As in the engine, an output is truncated at the model's context length. A request is rejected
    if its prompt fills the whole context.
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


# Statistics recorded at every step, weighted by the duration of the step.

_SAMPLES_AT_MOST = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedReading:
    """State of the memory and the queue at one step."""

    time_s: float  # start of the step
    used_bytes: int  # including pages in the prefix cache
    allocated_bytes: int  # pages of running sequences; a shared page counts once for each sequence
    wasted_bytes: int  # slots without a token in these pages
    running: int
    waiting: int


def read(memory: KVMemory, *, time_s: float, running: int, waiting: int) -> SimulatedReading:
    """Read the state of a memory. Slots that the step will write count as filled."""
    allocated = wasted = 0
    for table in memory.tables.values():
        page = table.group.page_class
        pages, slots = int(table.num_pages.sum()), int(table.num_slots.sum())
        allocated += pages * page.page_bytes
        wasted += (pages * page.tokens - slots) * page.page_bytes // page.tokens
    return SimulatedReading(
        time_s=time_s,
        used_bytes=memory.total_bytes - memory.free_bytes,
        allocated_bytes=allocated,
        wasted_bytes=wasted,
        running=running,
        waiting=waiting,
    )


@dataclass(slots=True)
class Gauges:
    """Sums, peaks, and a thinned series of readings."""

    time_s: float = 0.0  # total duration of the readings
    used_byte_s: float = 0.0  # readings x seconds, as the next
    allocated_byte_s: float = 0.0
    wasted_byte_s: float = 0.0
    running_s: float = 0.0
    waiting_s: float = 0.0
    peak_used_bytes: int = 0
    peak_running: int = 0
    peak_waiting: int = 0
    # at regular intervals, at most 4,096
    samples: list[SimulatedReading] = field(default_factory=list)
    _stride: int = 1
    _held: int = 0

    def add(self, reading: SimulatedReading, seconds: float) -> None:
        self.time_s += seconds
        self.used_byte_s += reading.used_bytes * seconds
        self.allocated_byte_s += reading.allocated_bytes * seconds
        self.wasted_byte_s += reading.wasted_bytes * seconds
        self.running_s += reading.running * seconds
        self.waiting_s += reading.waiting * seconds
        self.peak_used_bytes = max(self.peak_used_bytes, reading.used_bytes)
        self.peak_running = max(self.peak_running, reading.running)
        self.peak_waiting = max(self.peak_waiting, reading.waiting)
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
