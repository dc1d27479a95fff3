"""One simulated engine: the engine's scheduler and KV memory, with computed step times.

    deliver -> [inbox] -> submit -> schedule -> seconds of the step -> commit -> next tokens
                         |<--------------- begin_step --------------------->|<- end_step ->|

A timer replaces the model, and outputs have the lengths of the trace. Between `begin_step` and
`end_step` the engine's clock shows the end of the step.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.errors import ConfigError, InvariantError, NeverFits
from quire.kv.compaction import commit_compaction, plan_compaction
from quire.kv.memory import KVMemory
from quire.kv.pages import PageNumbers
from quire.kv.prefix import Block, BlockChain
from quire.layout.eviction import KEEP_ALL, EvictionSpec
from quire.layout.layout import layout_for, statistics_used
from quire.layout.model import ModelSpec
from quire.layout.pages import CacheLayout, LaneGroup, PageClass, choose_slab_bytes
from quire.plan.roofline import RowTokens, attention_cost, step_parts
from quire.scheduler.events import KVEvent
from quire.scheduler.eviction_trace import EvictionEntry
from quire.scheduler.lanes import Evicted, Evictor, Slots, evicting_lanes
from quire.scheduler.request import Request, RequestEviction, RequestMemory, RequestSpec
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.step import StepPlan
from quire.sim.machine import Rates
from quire.sim.records import NEVER_FITS, Gauges, RequestRecord, open_record, read
from quire.sim.traces.base import Trace, TraceRequest, TraceSegment
from quire.tenancy.tenants import parse_tenants

Counts = NDArray[np.int64]

MIN_ENTRIES = 10


class ServedTokens:
    """Tokens processed for each tenant in steps that find requests of every tenant waiting.

    Only such steps measure fairness: a tenant with few requests gets few tokens. The interval of
    such steps must also be long: in a short interval a tenant can wait for a request of another
    tenant to finish, and gets no tokens. An interval therefore counts as settled if at least
    `MIN_ENTRIES` requests of every tenant were admitted during it.

    Attributes:
        tokens: tokens of each tenant in all such steps.
        settled: tokens of each tenant in settled intervals.
    """

    def __init__(
        self, tenants: Iterable[str], weights: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        self.tokens: dict[str, int] = dict.fromkeys(tenants, 0)
        self.settled = dict(self.tokens)
        self._weights = weights
        self._waiting: Counter[str] = Counter()
        self._stretch: Counter[str] = Counter()
        self._entries: Counter[str] = Counter()

    def arrived(self, tenant: str) -> None:
        self._waiting[tenant] += 1

    def admitted(self, tenant: str) -> None:
        if self.all_backlogged:
            self._entries[tenant] += 1
        self._waiting[tenant] -= 1

    @property
    def all_backlogged(self) -> bool:
        return all(self._waiting[tenant] > 0 for tenant in self.tokens)

    @property
    def by_weight(self) -> dict[str, float]:
        """Settled tokens of each tenant over its weight: equal values mean fair shares."""
        return {
            tenant: tokens / self._weights.get(tenant, 1.0)
            for tenant, tokens in self.settled.items()
        }

    def served(self, requests: Iterable[Request], tokens: Iterable[int]) -> None:
        """Count a step's tokens; the caller checks `all_backlogged` before the step."""
        for request, number in zip(requests, tokens, strict=True):
            self.tokens[request.tenant] += number
            self._stretch[request.tenant] += number
        if not self.all_backlogged:
            self._end_stretch()

    def _end_stretch(self) -> None:
        if all(self._entries[tenant] >= MIN_ENTRIES for tenant in self.tokens):
            for tenant, number in self._stretch.items():
                self.settled[tenant] += number
        self._stretch.clear()
        self._entries.clear()


def jain_index(served: Mapping[str, float]) -> float | None:
    """Jain's index: 1 for equal service, 1 / n if one of n tenants got all; None if all got 0.

    Args:
        served: tenant -> service divided by weight.

    Source: Jain, Chiu and Hawe, 1984: (sum x)^2 / (n sum x^2).
    """
    total, squares = sum(served.values()), sum(value * value for value in served.values())
    return total * total / (len(served) * squares) if squares else None


class StepTimer:
    """Computes the duration of a model's steps at the rates of a machine.

    A step takes its overhead plus, part after part (projections, attention, MLP, head), the larger
    of bytes over the read rate and FLOPs over the product rate: `plan.roofline`, for whole batches.
    Attention over rows of one step is one part; a chunk's products may hide another row's reads.
    """

    def __init__(self, model: ModelSpec, rates: Rates, *, bytes_per_value: int = 2) -> None:
        self.model, self.rates, self.bytes_per_value = model, rates, bytes_per_value
        self._dense_s: dict[tuple[int, int], float] = {}

    def seconds(self, new: Counts, before: Counts, sampled_rows: int) -> float:
        """`new` [rows] are tokens processed, `before` [rows] tokens with computed KV."""
        key = int(new.sum()), sampled_rows
        dense_s = self._dense_s.get(key)
        if dense_s is None:
            dense_s = self._dense_s[key] = self._dense_seconds(*key)
        return self.rates.overhead_s + dense_s + self._attention_seconds(new, before)

    def _dense_seconds(self, tokens: int, sampled_rows: int) -> float:
        """All parts whose cost depends on the number of tokens alone."""
        parts = step_parts(
            self.model,
            [RowTokens(new=tokens, before=0)],
            sampled_rows=sampled_rows,
            bytes_per_value=self.bytes_per_value,
        )
        rates = self.rates
        return sum(
            part.floor_s(rates.read_bytes_per_s, rates.flops_per_s)
            for part in parts
            if part.name != "attention"
        )

    def _attention_seconds(self, new: Counts, before: Counts) -> float:
        kv_bytes, flops = attention_cost(self.model, new, before, self.bytes_per_value)
        return max(kv_bytes / self.rates.read_bytes_per_s, flops / self.rates.flops_per_s)


# The virtual clock of a simulation, advanced by the simulator.


class VirtualClock:
    """Virtual time in seconds since the first arrival."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


# ---- copies --------------------------------------------------------------------------------------

# Copies between device and host that transfer no bytes, but take simulated time.


class TimedCopies:
    """`HostCopies` in simulated time: a copy takes its bytes divided by the rate."""

    def __init__(self, bytes_per_s: float) -> None:
        self.seconds = 0.0
        self._bytes_per_s = bytes_per_s
        self._paid_s = 0.0

    def __call__(self) -> float:
        return self.seconds

    def save(self, page_class: PageClass, pages: PageNumbers, start: int) -> None:
        self.seconds += len(pages) * page_class.page_bytes / self._bytes_per_s

    def load(self, page_class: PageClass, pages: PageNumbers, start: int) -> None:
        self.save(page_class, pages, start)

    def wait(self) -> None: ...

    def unpaid_s(self) -> float:
        """Copy time since the last call; the next step waits for it."""
        unpaid_s, self._paid_s = self.seconds - self._paid_s, self.seconds
        return unpaid_s


# ---- tokens --------------------------------------------------------------------------------------

# Token ids for text segments that are known only by identity and length.

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_ID_BITS = 31  # packed ids fit into int32


def token_ids(segments: Sequence[TraceSegment]) -> list[int]:
    """Ids of a sequence of segments, computed from their contents and offsets.

    Equal contents have equal ids at equal offsets. Ids of different contents collide with
    probability 2^-31 per token. Ids are not entries of a vocabulary.

    Source: the mixing function of SplitMix64 (Steele et al., 2014).
    """
    lengths = np.array([segment.tokens for segment in segments], dtype=np.int64)
    contents = np.array([segment.content for segment in segments], dtype=np.int64)
    total = int(lengths.sum())
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    offsets = (np.arange(total) - starts).astype(np.uint64)
    seeds = _mixed(np.repeat(contents, lengths).view(np.uint64))
    ids: list[int] = (_mixed(seeds + offsets) >> np.uint64(64 - _ID_BITS)).astype(np.int64).tolist()
    return ids


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = values * _STEP + _STEP  # overflow is intended
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed


# ---- eviction ------------------------------------------------------------------------------------

# Eviction without tensors: the choice of slots does not change page counts, so evict the oldest.


class OldestFirstEvictor(Evictor):
    """Evicts the oldest slots of a request until its lanes fit their capacities."""

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory

    def evict(
        self, request: Request, keep: Slots, *, min_gain: int | None = None
    ) -> Evicted | None:
        memory, lanes = self._memory, evicting_lanes(self._memory)
        assert lanes is not None, "only called for a layout that evicts"
        row = request.memory.row
        held = lanes.held(request)
        keep = np.where(keep < 0, held, keep)
        slot = np.arange(int(held.max(initial=0)))
        mask = (slot >= (held - keep)[:, None]) & (slot < held[:, None])
        plans = [
            plan_compaction(memory, table.group.name, row, mask[places])
            for table, places in zip(lanes.tables, lanes.places, strict=True)
        ]
        if min_gain is not None and sum(plan.gain_bytes for plan in plans) < min_gain:
            return None
        commit_compaction(memory, *plans)
        return Evicted(int((held - keep).clip(min=0).sum()), len(held))

    def repeat(self, request: Request, entry: EvictionEntry) -> None:
        """Raise: no evictions are recorded, so none can be repeated."""
        raise InvariantError(
            f"request {request.request_id} repeats an eviction that was not recorded"
        )

    def finalize(self, request: Request) -> None:
        """Do nothing: a division of the cap after the prompt needs a model."""


# ---- memory --------------------------------------------------------------------------------------

# A KV memory without bytes, which holds the sequences of a simulation.

MAX_PAGES = 1 << 28
"""Maximum pages of a simulated memory: each page needs a few bytes of bookkeeping."""


def folded_layout(
    model: ModelSpec, *, codec: str, page_tokens: int, evicting: bool = False
) -> CacheLayout:
    """A sequence's lane groups with one lane in place of each group's layers.

    Layers of a group hold the same number of slots of every sequence. One table whose pages are as
    large as those of all layers together allocates and frees the same bytes, in less time. If
    layers have different windows, the waste at slab boundaries can differ by a page or two.
    """
    layout = layout_for(model, codec=codec, page_tokens=page_tokens, evicting=evicting)
    return CacheLayout(tuple(map(_folded, layout.groups)), layout.shared)


def _folded(group: LaneGroup) -> LaneGroup:
    page_class = replace(group.page_class, layers=len(group.layers))
    return replace(group, page_class=page_class, layers=group.layers[:1])


def make_memory(
    layout: CacheLayout,
    config: KVConfig,
    lengths: Sequence[int],
    max_num_seqs: int,
) -> KVMemory:
    """Create a KV memory with bookkeeping only: its arena is not allocated."""
    total_bytes = bytes_for_all(layout, lengths) if config.memory is None else config.memory
    smallest = min(page_class.page_bytes for page_class in layout.page_classes)
    if total_bytes // smallest > MAX_PAGES:
        raise ConfigError(
            f"a simulated KV memory of {total_bytes:,} B has {total_bytes // smallest:,} pages, "
            f"expected at most {MAX_PAGES:,}; lower --kv-memory, use fewer or shorter requests, "
            "or raise --block-size"
        )
    return KVMemory(layout, total_bytes, max_num_seqs)


def bytes_for_all(layout: CacheLayout, lengths: Sequence[int]) -> int:
    """Bytes of an arena that holds every request of a trace at once: it never runs full."""
    total_bytes = 0
    for group in layout.groups:
        pages = sum(group.page_class.pages_for(tokens) + 1 for tokens in lengths)
        total_bytes += pages * group.page_class.page_bytes * group.num_lanes
    sizes = [page_class.page_bytes for page_class in layout.page_classes]
    # pages may cross slab boundaries, and each class can leave a slab half empty
    slack_bytes = (len(sizes) + 1) * choose_slab_bytes(1 << 60, sizes)
    return (total_bytes * 3 // 2 if len(sizes) > 1 else total_bytes) + slack_bytes


# ---- result --------------------------------------------------------------------------------------


@dataclass(slots=True)
class EventTally:
    """A listener of KV events."""

    lost_tokens: int = 0  # KV freed by preemptions
    num_swaps_out: int = 0
    num_swaps_in: int = 0
    swapped_bytes: int = 0  # both directions
    copied_bytes: int = 0  # pages copied on write because they are shared

    def __call__(self, event: KVEvent) -> None:
        if event.kind in ("swapped_out", "swapped_in"):
            self.swapped_bytes += int(event.data["kv_bytes"])
            self.num_swaps_out += event.kind == "swapped_out"
            self.num_swaps_in += event.kind == "swapped_in"
        elif event.kind == "preempted":
            self.lost_tokens += int(event.data["lost_tokens"])
        elif event.kind == "copied":
            self.copied_bytes += int(event.data["kv_bytes"])


@dataclass(slots=True)
class SimResult:
    """The result of a simulated trace."""

    trace: Trace
    memory_bytes: int  # size of the arena
    records: list[RequestRecord] = field(default_factory=list)  # in the order of arrival
    gauges: Gauges = field(default_factory=Gauges)  # recorded at every step
    # tokens of each tenant while all tenants were backlogged
    served: ServedTokens = field(default_factory=lambda: ServedTokens(()))
    tally: EventTally = field(default_factory=EventTally)
    num_steps: int = 0
    processed_tokens: int = 0  # including recomputed tokens, without scoring passes
    busy_s: float = 0.0  # the rest of the time was idle


# ---- engine --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Job:
    """A request of the trace, ready to be delivered."""

    record: RequestRecord
    request: Request | None  # None if it was rejected
    answer: list[int]  # its output tokens
    pending_tokens: int = 0  # prompt tokens that are not computed yet


class SimulatedEngine:
    """An engine in virtual time; `eviction` depends on a request's prompt length."""

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
        """Create the job of a request; it changes nothing in this engine."""
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
        prefix = self.scheduler.sequence_memory.prefix
        return 0 if prefix is None else prefix.cached_tokens(self._blocks(job))

    def _blocks(self, job: Job) -> Iterator[Block]:
        """Whole blocks of a job's prompt without its last token, hashed on first use."""
        memory, request = self.scheduler.sequence_memory, job.request
        if memory.prefix is None or request is None:
            return
        if request.memory.chain is None:  # the engine's lookup goes on with this chain
            identity = memory.identities.of(request)
            block_tokens = memory.prefix.block_tokens
            request.memory.chain = BlockChain(identity, block_tokens, request.token_ids)
        yield from request.memory.chain.blocks(len(request.prompt_token_ids) - 1)

    def deliver(self, job: Job) -> None:
        """Queue a job; it is submitted before the next step is planned."""
        self._inbox.append(job)
        self.pending_tokens += job.pending_tokens

    def take_rejected(self) -> list[Job]:
        taken, self._rejected = self._rejected, []
        return taken

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of the prefix cache; of a page without one."""
        prefix = self.scheduler.sequence_memory.prefix
        groups = self.memory.layout.groups
        return groups[0].page_class.tokens if prefix is None else prefix.block_tokens

    @property
    def num_waiting(self) -> int:
        """Requests that were delivered and not admitted, or preempted."""
        return self.scheduler.num_waiting + len(self._inbox)

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def active_bytes(self) -> int:
        return self.memory.total_bytes - self.scheduler.sequence_memory.available_bytes

    @property
    def has_work(self) -> bool:
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
        """Run a step up to the end of its computation; False if nothing can run."""
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
        gauges = self.result.gauges  # layers of a prompt may have been cut within the step
        gauges.peak_used_bytes = max(gauges.peak_used_bytes, self.memory.arena_peak_bytes)
        self._ready = [r for r in requests if r.progress.num_computed == _known_tokens(r)]
        self._note_prefill(requests)
        scored = np.array(
            [row for request in plan.scored for row in _scoring_rows(request)], dtype=np.int64
        )
        rows = np.concatenate([np.stack([new, before], axis=1), scored.reshape(-1, 2)])
        seconds = self.timer.seconds(rows[:, 0], rows[:, 1], len(self._ready))
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


def _scoring_rows(request: Request) -> list[tuple[int, int]]:
    """The chunks of a scoring pass: tokens, and tokens before them."""
    spec, prompt_tokens = request.eviction.spec, len(request.prompt_token_ids)
    assert spec.scoring is not None, "only called for requests that are scored"
    chunks = -(-prompt_tokens // spec.scoring.chunk_tokens)
    return [(spec.scoring_tokens(prompt_tokens) // chunks, prompt_tokens)] * chunks


def _known_tokens(request: Request) -> int:
    return len(request.prompt_token_ids) + len(request.output_token_ids)
