"""What the server counts: engine events, HTTP requests, and the values of all metrics.

The observer runs in the engine's thread, HTTP counts in the event loop. A reading is taken between
two steps.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPMethod

from starlette.types import Scope

from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.engine.async_steps import AsyncStats
from quire.engine.core import Engine
from quire.engine.decode_graphs import GraphStats
from quire.engine.inspection.request_log import FinishedRequest
from quire.engine.inspection.totals import overview, tenant_rows
from quire.sampling.outputs import OutputDelta
from quire.scheduler.events import KVEvent
from quire.serve.metrics.definitions import BY_NAME, METRICS
from quire.serve.tracing import RequestTraces


class Distribution:
    """Counts values by bucket; several times as fast as the histogram of prometheus-client.

    That one takes a lock for every value. This one is filled and read in the engine's thread.
    """

    __slots__ = ("_counts", "bounds", "total")

    def __init__(self, bounds: Sequence[float | int]) -> None:
        self.bounds = tuple(bounds)
        self.total = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float | int, times: int = 1) -> None:
        self._counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def add_all(self, values: Iterable[float | int]) -> None:
        for value in values:
            self.add(value)

    def cumulative(self) -> list[tuple[str, float]]:
        """Each bound, as Prometheus writes it, with the number of values up to it."""
        found, so_far = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self._counts, strict=True):
            so_far += count
            found.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(so_far)))
        return found


@dataclass(slots=True)
class _Open:
    """A request that runs: the time of its submission, and of the last token of each output."""

    arrival_s: float
    prompt_tokens: int
    last_s: dict[int, float]


class EngineObserver:
    """Observes an engine; all methods run in the engine's thread.

    Attributes:
        distributions: histograms by the name of the metric.
        finished: finished sequences by reason.
        transferred_bytes: bytes of KV by kind of the transfer.
        prompt_tokens: prompt tokens of the requests that have a first token or an embedding.
    """

    def __init__(self, engine: Engine, traces: RequestTraces | None = None) -> None:
        self._engine, self._traces = engine, traces
        self._open: dict[str, _Open] = {}
        self.distributions: Mapping[str, Distribution] = {
            metric.name: Distribution(metric.buckets)
            for metric in METRICS
            if metric.kind == "histogram" and not metric.name.startswith("http_")
        }
        self.finished: Counter[str] = Counter()
        self.transferred_bytes: Counter[str] = Counter()
        self.prompt_tokens = 0
        engine.events.subscribe(self._heard)

    def close(self) -> None:
        self._engine.events.unsubscribe(self._heard)

    def submitted(self, request_id: str, request: GenerationRequest) -> None:
        now_s, params = self._engine.events.now_s(), request.sampling or SamplingParams()
        self._open[request_id] = _Open(now_s, len(request.prompt), {})
        self.distributions["request_max_tokens"].add(params.max_tokens)
        self.distributions["request_outputs"].add(params.n)
        self.distributions["request_prompt_tokens"].add(len(request.prompt))

    def published(self, deltas: Sequence[OutputDelta]) -> None:
        now_s = self._engine.events.now_s()
        self.distributions["step_tokens"].add(sum(len(delta.token_ids) for delta in deltas))
        for delta in deltas:
            if delta.token_ids:
                self._count_tokens(delta, now_s)
            if delta.finish_reason is not None:
                self.finished[delta.finish_reason] += 1
            if delta.is_last:
                self._end(delta)
        sequences = self._engine.request_log.newly_finished
        for sequence in sequences:
            self._count_sequence(sequence)
        if sequences and self._traces is not None:
            self._traces.finish(sequences, self._engine.events.now_s())

    def _end(self, delta: OutputDelta) -> None:
        """Forget a request; count its prompt if it has no output tokens, as an embedding."""
        opened = self._open.pop(delta.request_id, None)
        if opened is not None and not opened.last_s and delta.finish_reason == "length":
            self.prompt_tokens += opened.prompt_tokens

    def _count_tokens(self, delta: OutputDelta, now_s: float) -> None:
        opened = self._open.get(delta.request_id)
        if opened is None:
            return
        last_s = opened.last_s.get(delta.index)
        if last_s is not None:
            self.distributions["inter_token_latency_seconds"].add(now_s - last_s)
        elif not opened.last_s:
            self.prompt_tokens += opened.prompt_tokens
            self.distributions["time_to_first_token_seconds"].add(now_s - opened.arrival_s)
        opened.last_s[delta.index] = now_s

    def _count_sequence(self, sequence: FinishedRequest) -> None:
        found = self.distributions
        found["request_latency_seconds"].add(sequence.finish_s - sequence.arrival_s)
        found["request_generation_tokens"].add(sequence.output_tokens)
        found["request_preemptions"].add(sequence.num_preemptions)
        found["request_evicted_tokens"].add(sequence.evicted_tokens)
        found["request_kv_peak_bytes"].add(sequence.kv_peak_bytes)
        times = (event.time_s for event in sequence.timeline.events if event.kind == "admitted")
        admitted_s = next(times, None)
        if admitted_s is None:
            return
        found["request_queue_seconds"].add(admitted_s - sequence.arrival_s)
        found["request_inference_seconds"].add(sequence.finish_s - admitted_s)
        if not sequence.first_token_s:
            return
        decode_s = sequence.finish_s - sequence.first_token_s
        found["request_prefill_seconds"].add(max(0.0, sequence.first_token_s - admitted_s))
        found["request_decode_seconds"].add(decode_s)
        if sequence.output_tokens > 1:
            found["time_per_output_token_seconds"].add(decode_s / (sequence.output_tokens - 1))

    def _heard(self, event: KVEvent) -> None:
        if event.kind in ("swapped_out", "swapped_in", "offloaded"):
            self.transferred_bytes[event.kind] += int(event.data["kv_bytes"])


Labelled = dict[tuple[str, ...], float | int]
Buckets = tuple[list[tuple[str, float]], float]
"""Bounds with cumulative counts, and the sum of the values."""

MAX_TENANTS = 100
OTHER_TENANTS = "(more tenants)"


@dataclass(slots=True)
class Reading:
    """Values by the name of the metric."""

    numbers: dict[str, float | int] = field(default_factory=dict)
    labelled: dict[str, Labelled] = field(default_factory=dict)
    histograms: dict[str, Buckets] = field(default_factory=dict)


def read_engine(engine: Engine, observer: EngineObserver) -> Reading:
    """Read an engine between two steps, in its thread."""
    found = Reading()
    _read_totals(engine, observer, found)
    _read_launches(engine, found)
    _read_tenants(engine, found)
    found.labelled["requests_finished"] = _by_one_label(observer.finished)
    found.labelled["kv_transfer_bytes"] = _by_one_label(observer.transferred_bytes)
    for name, distribution in observer.distributions.items():
        found.histograms[name] = buckets_of(distribution)
    return found


def buckets_of(distribution: Distribution) -> Buckets:
    """A copy of a histogram's counts."""
    return distribution.cumulative(), distribution.total


def _read_totals(engine: Engine, observer: EngineObserver, found: Reading) -> None:
    totals, stats = overview(engine, None), engine.stats()
    memory, counters = totals["memory"], totals["counters"]
    states = ("requests", "cached", "border", "free")
    found.labelled["kv_bytes"] = {(state,): memory[f"{state}_bytes"] for state in states}
    levels = () if stats.tier is None else stats.tier.levels
    found.labelled["prefix_tier_damaged"] = {(one.name,): one.num_damaged for one in levels}
    found.labelled["prefix_tier_outages"] = {(one.name,): one.num_outages for one in levels}
    found.numbers |= {
        "engine_up": 1,
        "requests_running": totals["num_running"],
        "requests_waiting": totals["num_waiting"],
        "kv_usage_ratio": memory["requests_bytes"] / memory["total_bytes"],
        "kv_memory_bytes": memory["total_bytes"],
        "kv_peak_bytes": memory["peak_bytes"],
        "swap_bytes": stats.host_bytes,
        "kv_offloaded_bytes": stats.offloaded_bytes,
        "activation_bytes": stats.activation_bytes,
        "weight_bytes": stats.weight_bytes,
        "host_weight_bytes": stats.host_weight_bytes,
        "prompt_tokens": observer.prompt_tokens,
        "generation_tokens": counters["generated_tokens"],
        "processed_tokens": counters["processed_tokens"],
        "steps": counters["steps"],
        "preemptions": counters["preemptions"],
        "swaps": counters["swaps"],
        "evictions": counters["evictions"],
        "evicted_tokens": counters["evicted_tokens"],
        "prefix_cache_queries": counters["queried_tokens"],
        "prefix_cache_hits": counters["cached_tokens"],
        "prefix_tier_loaded_tokens": 0 if stats.tier is None else stats.tier.loaded_tokens,
        "sparse_pages_read": stats.sparse_pages_read,
        "sparse_pages_held": stats.sparse_pages_held,
        "sparse_pages_fetched": stats.sparse_pages_fetched,
        "sparse_page_hits": stats.sparse_page_hits,
        "spec_decode_drafts": stats.num_drafts,
        "spec_decode_draft_tokens": stats.draft_tokens,
        "spec_decode_accepted_tokens": stats.accepted_draft_tokens,
        "offload_recomputed_tokens": stats.recomputed_tokens,
        "offload_cpu_attended_tokens": stats.cpu_attended_tokens,
        "weight_transfer_bytes": stats.offloaded_weight_bytes,
    }


def _read_launches(engine: Engine, found: Reading) -> None:
    """Counters of asynchronous scheduling and CUDA graphs; 0 in an engine without them."""
    stats = engine.stats()
    steps, graphs = stats.async_scheduling or AsyncStats(), stats.graphs or GraphStats()
    found.labelled["async_waits"] = _by_one_label(steps.waited)
    found.numbers |= {
        "async_steps": steps.ahead,
        "async_discarded_rows": steps.discarded,
        "graph_replays": graphs.replayed,
        "graph_captures": graphs.captures,
    }


_OF_TENANT = {
    "tenant_kv_bytes": "used_bytes",
    "tenant_requests_running": "num_running",
    "tenant_requests_waiting": "num_waiting",
    "tenant_prompt_tokens": "prompt_tokens",
    "tenant_generation_tokens": "output_tokens",
    "tenant_preemptions": "num_preemptions",
}


def _read_tenants(engine: Engine, found: Reading) -> None:
    """Values of the first tenants; the others are summed, to bound the number of time series."""
    rows = tenant_rows(engine, None)
    for metric, column in _OF_TENANT.items():
        values: Labelled = {(row["tenant"],): float(row[column] or 0) for row in rows[:MAX_TENANTS]}
        if len(rows) > MAX_TENANTS:
            rest: Sequence[Mapping[str, float]] = rows[MAX_TENANTS:]
            values[(OTHER_TENANTS,)] = float(sum(row[column] or 0 for row in rest))
        found.labelled[metric] = values


def _by_one_label(counts: Mapping[str, int]) -> Labelled:
    return {(label,): float(count) for label, count in counts.items()}


OTHER = "other"
_METHODS = frozenset(method.value for method in HTTPMethod)


class HttpRequests:
    """Counts of HTTP requests."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._seconds = Distribution(BY_NAME["http_request_seconds"].buckets)

    def add(self, scope: Scope, status: int, seconds: float) -> None:
        """Count an ended request by its route's path, so that clients cannot create time series."""
        method = scope["method"] if scope["method"] in _METHODS else OTHER
        self._counts[method, _path(scope), str(status)] += 1
        self._seconds.add(seconds)

    def read_into(self, reading: Reading) -> None:
        reading.labelled["http_requests"] = {k: float(v) for k, v in self._counts.items()}
        reading.histograms["http_request_seconds"] = buckets_of(self._seconds)


def _path(scope: Scope) -> str:
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else OTHER
