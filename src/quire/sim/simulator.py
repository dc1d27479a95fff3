"""Simulation of a trace with the engine's scheduler and KV memory, in virtual time.

    requests that arrived   -> submit -> schedule -> seconds of the step -> commit -> next tokens
                 ^                                          |
                 '------------------- clock ----------------'

The scheduler, admission, page tables and allocator are the engine's. A timer replaces the model,
and outputs have the lengths of the trace. The simulation is deterministic: the same trace and
options produce the same result, bit for bit.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.config.sampling_params import SamplingParams
from quire.errors import InvariantError, NeverFits
from quire.layout.eviction import KEEP_ALL, EvictionSpec
from quire.layout.layout import statistics_used
from quire.scheduler.events import KVEvent
from quire.scheduler.request import Request
from quire.scheduler.request_parts import RequestEviction, RequestMemory, RequestSpec
from quire.scheduler.scheduler import Scheduler
from quire.sim.fairness import ServedTokens
from quire.sim.records import NEVER_FITS, Gauges, RequestRecord, open_record, read
from quire.sim.stand_ins import TimedCopies, VirtualClock, token_ids
from quire.sim.timing import StepTimer
from quire.sim.traces.base import Trace, TraceRequest
from quire.tenancy.tenants import parse_tenants

# ---- tally ---------------------------------------------------------------------------------------

# Totals of the scheduler's events: lost work, and KV copied between device and host.

_SWAPS = ("swapped_out", "swapped_in")


@dataclass(slots=True)
class EventTally:
    """A listener of KV events.

    Attributes:
        lost_tokens: tokens whose KV was freed by preemptions.
        num_swaps_out, num_swaps_in: sequences swapped out and in.
        swapped_bytes: KV bytes of all swaps, both directions.
        copied_bytes: KV bytes of pages copied on write because they are shared.
    """

    lost_tokens: int = 0
    num_swaps_out: int = 0
    num_swaps_in: int = 0
    swapped_bytes: int = 0
    copied_bytes: int = 0

    def __call__(self, event: KVEvent) -> None:
        """Count an event."""
        if event.kind in _SWAPS:
            self.swapped_bytes += int(event.data["kv_bytes"])
            self.num_swaps_out += event.kind == "swapped_out"
            self.num_swaps_in += event.kind == "swapped_in"
        elif event.kind == "preempted":
            self.lost_tokens += int(event.data["lost_tokens"])
        elif event.kind == "copied":
            self.copied_bytes += int(event.data["kv_bytes"])


# ---- simulator -----------------------------------------------------------------------------------

Progress = Callable[[float, int], None]  # (virtual seconds, arrived requests)
_PROGRESS_STEPS = 1000


@dataclass(slots=True)
class SimResult:
    """The result of a simulated trace.

    Attributes:
        trace: the simulated trace.
        memory_bytes: size of the arena.
        records: one for each request, in the order of arrival.
        gauges: statistics of the memory and queue, recorded at every step.
        served: tokens of each tenant while all tenants were backlogged.
        tally: totals of the events.
        num_steps: number of steps.
        processed_tokens: tokens that the steps processed, including recomputed tokens.
        busy_s: duration of all steps; the rest of the time was idle.
    """

    trace: Trace
    memory_bytes: int
    records: list[RequestRecord] = field(default_factory=list)
    gauges: Gauges = field(default_factory=Gauges)
    served: ServedTokens = field(default_factory=lambda: ServedTokens(()))
    tally: EventTally = field(default_factory=EventTally)
    num_steps: int = 0
    processed_tokens: int = 0
    busy_s: float = 0.0


@dataclass(slots=True)
class _Job:
    """A submitted request: its record, and its output tokens."""

    record: RequestRecord
    answer: list[int]


class Simulator:
    """Simulation of one trace with one KV memory.

    Args:
        trace: the requests and their arrival times.
        scheduler: scheduler of an empty simulated memory; its events use the clock's time.
        timer: computes the duration of steps.
        clock: the virtual clock, at 0.
        copies: copies of the host pool; the next step waits for them.
        eviction: eviction of a request, as a function of its prompt length.
    """

    def __init__(
        self,
        trace: Trace,
        scheduler: Scheduler,
        timer: StepTimer,
        clock: VirtualClock,
        copies: TimedCopies,
        eviction: Callable[[int], EvictionSpec] = lambda tokens: KEEP_ALL,
    ) -> None:
        self.scheduler, self.memory = scheduler, scheduler.memory
        self.eviction = eviction
        self.timer, self.clock, self.copies = timer, clock, copies
        weights = {spec.name: spec.weight for spec in parse_tenants(scheduler.config.tenants)}
        served = ServedTokens(trace.tenants, weights)
        self.result = SimResult(trace, self.memory.total_bytes, served=served)
        scheduler.sequence_memory.events.subscribe(self.result.tally)
        self._arrivals = trace.requests
        self._num_arrived = 0
        self._jobs: dict[str, _Job] = {}
        self._not_admitted: set[str] = set()

    def run(self, progress: Progress | None = None) -> SimResult:
        """Run until every request is finished or rejected.

        Raises:
            InvariantError: a request can neither run nor be rejected, or a page was lost.
        """
        while True:
            self._submit_arrived()
            if self.scheduler.has_work:
                self._step()
            elif self._num_arrived < len(self._arrivals):
                self._wait(self._arrivals[self._num_arrived].arrival_s)
            else:
                break
            if progress is not None and self.result.num_steps % _PROGRESS_STEPS == 0:
                progress(self.clock.now_s, self._num_arrived)
        self._check()
        return self.result

    # ---- requests ------------------------------------------------------------------------------

    def _submit_arrived(self) -> None:
        while self._num_arrived < len(self._arrivals):
            arrived = self._arrivals[self._num_arrived]
            if arrived.arrival_s > self.clock.now_s:
                return
            self._num_arrived += 1
            record = open_record(arrived, self.timer.model.max_positions)
            self.result.records.append(record)
            if record.refused is None:
                self._submit(arrived, record)

    def _submit(self, arrived: TraceRequest, record: RequestRecord) -> None:
        spec = RequestSpec(
            request_id=str(self._num_arrived),
            prompt_token_ids=token_ids(arrived.prompt),
            params=SamplingParams(max_tokens=record.answer_tokens),
            priority=arrived.priority,
            deadline_s=record.due_s,
            arrival=self._num_arrived,
            arrival_s=arrived.arrival_s,
            tenant=arrived.tenant,
        )
        request = Request(
            spec,
            memory=RequestMemory(statistics=statistics_used(self.scheduler.memory.layout, ())),
            eviction=RequestEviction(spec=self.eviction(arrived.prompt_tokens)),
        )
        try:
            self.scheduler.submit(request)
        except NeverFits:
            record.refused = NEVER_FITS
            return
        answer = token_ids([arrived.answer._replace(tokens=record.answer_tokens)])
        self._jobs[request.request_id] = _Job(record, answer)
        self._not_admitted.add(request.request_id)
        self.result.served.arrived(arrived.tenant)

    # ---- a step --------------------------------------------------------------------------------

    def _step(self) -> None:
        backlogged = self.result.served.all_backlogged
        plan = self.scheduler.schedule()
        if not plan.requests:
            return self._wait_blocked()
        requests = plan.requests
        new = np.array(plan.tokens, dtype=np.int64)
        before = np.fromiter((r.progress.num_computed for r in requests), np.int64, len(requests))
        self._note_entries(requests)
        if backlogged:
            self.result.served.served(requests, plan.tokens)
        self.scheduler.commit(plan)
        ready = [r for r in requests if r.progress.num_computed == _known_tokens(r)]
        seconds = self.timer.seconds(new, before, len(ready))
        seconds += self.copies.unpaid_s()
        self._hold(seconds)
        self.result.num_steps += 1
        self.result.busy_s += seconds
        self.result.processed_tokens += int(new.sum())
        self._answer(ready)
        return None

    def _note_entries(self, requests: Sequence[Request]) -> None:
        if not self._not_admitted:
            return
        for request in requests:
            if request.request_id in self._not_admitted:
                self._not_admitted.remove(request.request_id)
                record = self._jobs[request.request_id].record
                record.admitted_s = self.clock.now_s
                record.cached_tokens = request.progress.cached_tokens
                self.result.served.admitted(request.tenant)

    def _answer(self, ready: Sequence[Request]) -> None:
        for request in ready:
            job, output = self._jobs[request.request_id], request.output_token_ids
            output.append(job.answer[len(output)])
            if len(output) == 1:
                job.record.first_token_s = self.clock.now_s
            if len(output) == len(job.answer):
                self.scheduler.finish(request)
                job.record.finish_s = self.clock.now_s
                job.record.preemptions = request.progress.num_preemptions
                del self._jobs[request.request_id]

    # ---- time ----------------------------------------------------------------------------------

    def _wait_blocked(self) -> None:
        """No request can run: advance the clock to the next arrival."""
        if self._num_arrived < len(self._arrivals):
            self._wait(self._arrivals[self._num_arrived].arrival_s)
        elif self.scheduler.has_work:
            raise InvariantError("requests are waiting, but no step can be planned")

    def _wait(self, until_s: float) -> None:
        self._hold(until_s - self.clock.now_s)
        self.clock.now_s = until_s  # exact, without the rounding error of the sum

    def _hold(self, seconds: float) -> None:
        reading = read(
            self.memory,
            time_s=self.clock.now_s,
            running=len(self.scheduler.running),
            waiting=self.scheduler.num_waiting,
        )
        self.result.gauges.add(reading, seconds)
        self.clock.now_s += seconds

    def _check(self) -> None:
        self.memory.check()
        lost = [r for r in self.result.records if r.refused is None and math.isnan(r.finish_s)]
        if lost or len(self.memory.live_rows):
            raise InvariantError(f"{len(lost)} requests were neither finished nor refused")


def _known_tokens(request: Request) -> int:
    return len(request.prompt_token_ids) + len(request.output_token_ids)
