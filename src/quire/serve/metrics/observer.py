"""Counts what the engine does, in its thread: latencies, finish reasons, transferred bytes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.engine.inspection.request_log import FinishedRequest
from quire.sampling.outputs import OutputDelta
from quire.scheduler.events import KVEvent
from quire.serve.metrics.definitions import METRICS
from quire.serve.metrics.distribution import Distribution
from quire.serve.tracing import RequestTraces

_TRANSFERS = frozenset({"swapped_out", "swapped_in", "offloaded"})


@dataclass(slots=True)
class _Open:
    """A request that runs: the time of its submission, and of the last token of each output."""

    arrival_s: float
    prompt_tokens: int
    last_s: dict[int, float]


class EngineObserver:
    """Observes an engine; all methods run in the engine's thread.

    Args:
        engine: the engine; its event log is subscribed to.
        traces: creates spans of finished requests; None: no spans.

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
        """Stop to observe the engine."""
        self._engine.events.unsubscribe(self._heard)

    def submitted(self, request_id: str, request: GenerationRequest) -> None:
        """Count a request that the engine has accepted."""
        now_s, params = self._engine.events.now_s(), request.sampling or SamplingParams()
        self._open[request_id] = _Open(now_s, len(request.prompt), {})
        self.distributions["request_max_tokens"].add(params.max_tokens)
        self.distributions["request_outputs"].add(params.n)
        self.distributions["request_prompt_tokens"].add(len(request.prompt))

    def published(self, deltas: Sequence[OutputDelta]) -> None:
        """Count the outputs of a step."""
        now_s = self._engine.events.now_s()
        self.distributions["step_tokens"].add(sum(len(delta.token_ids) for delta in deltas))
        for delta in deltas:
            if delta.token_ids:
                self._count_tokens(delta, now_s)
            if delta.finish_reason is not None:
                self.finished[delta.finish_reason] += 1
            if delta.is_last:
                self._end(delta)
        self._count_finished()

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

    def _count_finished(self) -> None:
        """Count the numbers of the sequences that the step has finished."""
        sequences = self._engine.request_log.newly_finished
        for sequence in sequences:
            self._count_sequence(sequence)
        if sequences and self._traces is not None:
            self._traces.finish(sequences, self._engine.events.now_s())

    def _count_sequence(self, sequence: FinishedRequest) -> None:
        found = self.distributions
        found["request_latency_seconds"].add(sequence.finish_s - sequence.arrival_s)
        found["request_generation_tokens"].add(sequence.output_tokens)
        found["request_preemptions"].add(sequence.num_preemptions)
        found["request_evicted_tokens"].add(sequence.evicted_tokens)
        found["request_kv_peak_bytes"].add(sequence.kv_peak_bytes)
        admitted_s = _admitted_s(sequence)
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
        if event.kind in _TRANSFERS:
            self.transferred_bytes[event.kind] += int(event.data["kv_bytes"])


def _admitted_s(sequence: FinishedRequest) -> float | None:
    """Time of the first admission; None if it never ran."""
    times = (event.time_s for event in sequence.timeline.events if event.kind == "admitted")
    return next(times, None)
