"""One simulated engine: the engine's scheduler and KV memory, with computed step times.

    deliver -> [inbox] -> submit -> schedule -> seconds of the step -> commit -> next tokens
                         |<--------------- begin_step --------------------->|<- end_step ->|

A timer replaces the model, and outputs have the lengths of the trace. Between `begin_step` and
`end_step` the engine's clock shows the end of the step.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.config.sampling_params import SamplingParams
from quire.errors import NeverFits
from quire.kv.prefix_key import Block, BlockChain
from quire.layout.eviction import KEEP_ALL, EvictionSpec
from quire.layout.layout import statistics_used
from quire.scheduler.events import KVEvent
from quire.scheduler.request import Request
from quire.scheduler.request_parts import RequestEviction, RequestMemory, RequestSpec
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.step import StepPlan
from quire.sim.fairness import ServedTokens
from quire.sim.records import NEVER_FITS, Gauges, RequestRecord, open_record, read
from quire.sim.stand_ins import TimedCopies, VirtualClock, token_ids
from quire.sim.timing import StepTimer
from quire.sim.traces.base import Trace, TraceRequest
from quire.tenancy.tenants import parse_tenants

# ---- result --------------------------------------------------------------------------------------

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


# ---- engine --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Job:
    """A request of the trace, ready to be delivered.

    Attributes:
        record: its record.
        request: the engine's request; None if it was rejected.
        answer: its output tokens.
        pending_tokens: prompt tokens that are not computed yet.
    """

    record: RequestRecord
    request: Request | None
    answer: list[int]
    pending_tokens: int = 0


class SimulatedEngine:
    """An engine in virtual time.

    Args:
        trace: the trace from which its requests come.
        scheduler: scheduler of an empty simulated memory; its events use the clock's time.
        timer: computes the duration of steps.
        clock: the virtual clock, at 0.
        copies: copies of the host pool; the next step waits for them.
        eviction: eviction of a request, as a function of its prompt length.

    Attributes:
        result: records and statistics so far.
        pending_tokens: prompt tokens of delivered requests that are not computed yet.
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
        self.timer, self.clock, self.copies = timer, clock, copies
        weights = {spec.name: spec.weight for spec in parse_tenants(scheduler.config.tenants)}
        served = ServedTokens(trace.tenants, weights)
        self.result = SimResult(trace, self.memory.total_bytes, served=served)
        self.pending_tokens = 0
        scheduler.sequence_memory.events.subscribe(self.result.tally)
        self._eviction = eviction
        self._statistics = statistics_used(self.memory.layout, ())
        self._inbox: list[Job] = []
        self._jobs: dict[str, Job] = {}
        self._not_admitted: set[str] = set()
        self._prefilling: dict[str, Job] = {}
        self._ready: list[Request] = []  # of the step that is running
        self._rejected: list[Job] = []

    # ---- requests ------------------------------------------------------------------------------

    def open_job(self, arrived: TraceRequest, number: int) -> Job:
        """Create the job of a request; it changes nothing in this engine.

        Args:
            arrived: the request.
            number: its number in the order of arrival, from 1.
        """
        record = open_record(arrived, self.timer.model.max_positions)
        if record.refused is not None:
            return Job(record, None, [])
        spec = RequestSpec(
            request_id=str(number),
            prompt_token_ids=token_ids(arrived.prompt),
            params=SamplingParams(max_tokens=record.answer_tokens),
            priority=arrived.priority,
            deadline_s=record.due_s,
            arrival=number,
            arrival_s=arrived.arrival_s,
            tenant=arrived.tenant,
        )
        request = Request(
            spec,
            memory=RequestMemory(statistics=self._statistics),
            eviction=RequestEviction(spec=self._eviction(arrived.prompt_tokens)),
        )
        answer = token_ids([arrived.answer._replace(tokens=record.answer_tokens)])
        return Job(record, request, answer, pending_tokens=record.prompt_tokens)

    def block_hashes(self, job: Job) -> tuple[bytes, ...]:
        """Hashes of the blocks of a job's prompt that an engine may find in its prefix cache."""
        return tuple(block.key for block in self._blocks(job))

    def cached_tokens(self, job: Job) -> int:
        """Prompt tokens of a job that are in the prefix cache now."""
        prefix = self.scheduler.sequence_memory.sharing.prefix
        return 0 if prefix is None else prefix.cached_tokens(self._blocks(job))

    def _blocks(self, job: Job) -> Iterator[Block]:
        """Whole blocks of a job's prompt without its last token, hashed on first use."""
        sharing, request = self.scheduler.sequence_memory.sharing, job.request
        if sharing.prefix is None or request is None:
            return
        if request.memory.chain is None:  # the engine's lookup goes on with this chain
            identity = sharing.identities.of(request)
            block_tokens = sharing.prefix.block_tokens
            request.memory.chain = BlockChain(identity, block_tokens, request.token_ids)
        yield from request.memory.chain.blocks(len(request.prompt_token_ids) - 1)

    def deliver(self, job: Job) -> None:
        """Queue a job; it is submitted before the next step is planned."""
        self._inbox.append(job)
        self.pending_tokens += job.pending_tokens

    def take_rejected(self) -> list[Job]:
        """Delivered jobs that were rejected since the last call."""
        taken, self._rejected = self._rejected, []
        return taken

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of the prefix cache; of a page without one."""
        prefix = self.scheduler.sequence_memory.sharing.prefix
        groups = self.memory.layout.groups
        return groups[0].page_class.tokens if prefix is None else prefix.block_tokens

    @property
    def num_waiting(self) -> int:
        """Requests that were delivered and not admitted, or preempted."""
        return self.scheduler.num_waiting + len(self._inbox)

    @property
    def num_running(self) -> int:
        """Admitted requests."""
        return len(self.scheduler.running)

    @property
    def active_bytes(self) -> int:
        """KV bytes of running requests."""
        return self.memory.total_bytes - self.scheduler.sequence_memory.sharing.available_bytes

    @property
    def has_work(self) -> bool:
        """Whether requests wait or run."""
        return bool(self._inbox) or self.scheduler.has_work

    def _submit(self, job: Job) -> None:
        self.result.records.append(job.record)
        if job.request is None:
            self._rejected.append(job)
            return
        try:
            self.scheduler.submit(job.request)
        except NeverFits:
            job.record.refused = NEVER_FITS
            self.pending_tokens -= job.pending_tokens
            self._rejected.append(job)
            return
        self._jobs[job.request.request_id] = job
        self._prefilling[job.request.request_id] = job
        self._not_admitted.add(job.request.request_id)
        self.result.served.arrived(job.request.tenant)

    # ---- a step --------------------------------------------------------------------------------

    def begin_step(self) -> bool:
        """Submit delivered requests, and run a step up to the end of its computation.

        Returns:
            Whether a step began. Otherwise no request can run before the next one is delivered.
        """
        for job in self._inbox:
            self._submit(job)
        self._inbox.clear()
        if not self.scheduler.has_work:
            return False
        backlogged = self.result.served.all_backlogged
        plan = self.scheduler.schedule()
        if plan.requests:
            self._run(plan, backlogged=backlogged)
        return bool(plan.requests)

    def _run(self, plan: StepPlan, *, backlogged: bool) -> None:
        requests = plan.requests
        new = np.array(plan.tokens, dtype=np.int64)
        before = np.fromiter((r.progress.num_computed for r in requests), np.int64, len(requests))
        self._note_entries(requests)
        if backlogged:
            self.result.served.served(requests, plan.tokens)
        self.scheduler.commit(plan)
        self._ready = [r for r in requests if r.progress.num_computed == _known_tokens(r)]
        self._note_prefill(requests)
        seconds = self.timer.seconds(new, before, len(self._ready))
        seconds += self.copies.unpaid_s()
        self.hold(seconds)
        self.result.num_steps += 1
        self.result.busy_s += seconds
        self.result.processed_tokens += int(new.sum())

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

    def _note_prefill(self, requests: Sequence[Request]) -> None:
        if not self._prefilling:
            return
        for request in requests:
            job = self._prefilling.get(request.request_id)
            if job is not None:
                left = max(0, job.record.prompt_tokens - request.progress.num_computed)
                self.pending_tokens += left - job.pending_tokens
                job.pending_tokens = left
                if not left:
                    del self._prefilling[request.request_id]

    def end_step(self) -> list[Job]:
        """Sample the tokens of the step that began; return the jobs that finished."""
        finished = []
        for request in self._ready:
            job, output = self._jobs[request.request_id], request.output_token_ids
            output.append(job.answer[len(output)])
            if len(output) == 1:
                job.record.first_token_s = self.clock.now_s
            if len(output) == len(job.answer):
                self.scheduler.finish(request)
                job.record.finish_s = self.clock.now_s
                job.record.preemptions = request.progress.num_preemptions
                finished.append(self._jobs.pop(request.request_id))
        self._ready = []
        return finished

    # ---- time ----------------------------------------------------------------------------------

    def wait(self, until_s: float) -> None:
        """Advance the clock; no step is running."""
        self.hold(until_s - self.clock.now_s)
        self.clock.now_s = until_s  # exact, without the rounding error of the sum

    def hold(self, seconds: float) -> None:
        """Record the state of memory and queue for some time, and advance the clock."""
        reading = read(
            self.memory,
            time_s=self.clock.now_s,
            running=len(self.scheduler.running),
            waiting=self.scheduler.num_waiting,
        )
        self.result.gauges.add(reading, seconds)
        self.clock.now_s += seconds


def _known_tokens(request: Request) -> int:
    return len(request.prompt_token_ids) + len(request.output_token_ids)
