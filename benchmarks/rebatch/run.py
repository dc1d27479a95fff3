"""One arm on one load: processes all queries and records the cost of every query and step.

All arms have equal weights, one clock and one KV memory limit. The clock skips time in which no
query is waiting or running.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from benchmarks.common.models import SHAPES, random_model, random_weights
from benchmarks.rebatch.bound import Forwards
from benchmarks.rebatch.config import CONTINUOUS, EMBEDDING, SHAPING, RebatchConfig
from benchmarks.rebatch.load import Load, prompt_ids
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import InvariantError, SlabFull
from quire.hf.dynamic.batch import DynamicBatch
from quire.hf.dynamic.batch_options import BatchOptions
from quire.hf.dynamic.query import Query, StepRecord
from quire.models.loader import LoadedModel
from quire.scheduler.schedule_config import ScheduleConfig


class SkippingClock:
    """Clock in seconds since the start; skipped time counts as elapsed.

    Args:
        seconds: underlying clock.
    """

    def __init__(self, seconds: Callable[[], float] = time.perf_counter) -> None:
        self._seconds = seconds
        self._start_s = seconds()
        self._skipped_s = 0.0

    def __call__(self) -> float:
        """Seconds since the start, with the skipped time."""
        return self._seconds() - self._start_s + self._skipped_s

    def skip_to(self, when_s: float) -> None:
        """Advance to the given time, unless it has passed."""
        self._skipped_s += max(0.0, when_s - self())


_CURVE_POINTS = 48


@dataclass(slots=True)
class RebatchRun:
    """Measurements of one arm.

    Attributes:
        arm: name of the batcher.
        batch_size: number of rows.
        total_s: time until the last token, or until the slab was full.
        num_queries: number of queries in the load.
        times_s: time of each token of each query since the start.
        waited_s: time from arrival to first token, of each query with a token.
        kv_bytes: (seconds, bytes) after each step.
        kv_peak_bytes: peak KV bytes.
        preemptions: number of preempted rows.
        ended: why the arm stopped before all queries finished, or "".
        row_steps, dead_row_steps: rows over all steps; those whose query had ended.
        queued_row_steps, queued_dead_row_steps: the same for steps with waiting queries.
        slots, pad_slots: slots read by attention; those without a token.
        peak_columns: most columns of the slab.
        forwards: durations of single forwards.
        answers: output tokens of each query; empty for an unfinished query.
    """

    arm: str
    batch_size: int
    num_queries: int
    total_s: float = 0.0
    times_s: list[list[float]] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)
    kv_bytes: list[tuple[float, int]] = field(default_factory=list)
    kv_peak_bytes: int = 0
    preemptions: int = 0
    ended: str = ""
    row_steps: int = 0
    dead_row_steps: int = 0
    queued_row_steps: int = 0
    queued_dead_row_steps: int = 0
    slots: int = 0
    pad_slots: int = 0
    peak_columns: int = 0
    forwards: Forwards = field(default_factory=lambda: Forwards([], []))
    answers: list[list[int]] = field(default_factory=list)

    # ---- summary values ------------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """Number of generated tokens."""
        return sum(map(len, self.times_s))

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second, with prefill included in the time."""
        return self.tokens / self.total_s

    @property
    def answered(self) -> float:
        """Fraction of the queries that finished."""
        return sum(map(bool, self.answers)) / self.num_queries

    @property
    def idle_fraction(self) -> float:
        """Row-steps of ended queries over all row-steps."""
        return self.dead_row_steps / max(1, self.row_steps)

    @property
    def idle_while_queued(self) -> float:
        """Row-steps of ended queries over all row-steps, in steps with waiting queries."""
        return self.queued_dead_row_steps / max(1, self.queued_row_steps)

    @property
    def padded_fraction(self) -> float:
        """Slots without a token over all slots that attention read."""
        return self.pad_slots / max(1, self.slots)

    def first_s(self, percent: int) -> float:
        """Percentile of the time to first token."""
        return float(np.percentile(self.waited_s, percent))

    def token_s(self, percent: int) -> float:
        """Percentile over queries of the mean time between two tokens."""
        gaps = [(t[-1] - t[0]) / (len(t) - 1) for t in self.times_s if len(t) > 1]
        return float(np.percentile(gaps, percent))

    # ---- curves --------------------------------------------------------------------------------

    def answered_curve(self) -> tuple[tuple[float, int], ...]:
        """Number of finished queries over time."""
        ends = [t[-1] for t, answer in zip(self.times_s, self.answers, strict=True) if answer]
        return _counted(sorted(ends))

    def token_curve(self) -> tuple[tuple[float, int], ...]:
        """Number of generated tokens over time."""
        return _counted(sorted(when for times in self.times_s for when in times))

    def kv_curve(self) -> tuple[tuple[float, float], ...]:
        """KV in MiB over time."""
        every = max(1, len(self.kv_bytes) // _CURVE_POINTS)
        return tuple((when, count / 2**20) for when, count in self.kv_bytes[::every])

    def to_json(self) -> dict[str, Any]:
        """Values for the tables."""
        names = ("arm", "batch_size", "total_s", "tokens", "answered", "ended", "kv_peak_bytes")
        found: dict[str, Any] = {name: getattr(self, name) for name in names}
        for name in ("idle_fraction", "idle_while_queued", "padded_fraction", "peak_columns"):
            found[name] = getattr(self, name)
        for percent in (50, 99):
            found[f"first_p{percent}_s"] = self.first_s(percent)
            found[f"token_p{percent}_s"] = self.token_s(percent)
        return found | {"preemptions": self.preemptions}

    def record(self, step: StepRecord) -> None:
        """Record a step of a dense arm."""
        for read in step.reads:
            tokens = read.rows * read.columns
            pairs = read.rows * read.columns * (read.columns + 1) // 2
            self.forwards.reads.append((tokens, pairs, read.seconds))
        if not step.rows:
            return
        dead, slots = step.rows - step.live, step.rows * step.columns
        self.row_steps += step.rows
        self.dead_row_steps += dead
        if step.queued:
            self.queued_row_steps += step.rows
            self.queued_dead_row_steps += dead
        self.slots += slots
        self.pad_slots += slots - step.valid_tokens
        self.peak_columns = max(self.peak_columns, step.columns)
        if step.new_columns == 1:
            self.forwards.decodes.append((step.rows, slots, step.decode_s))


def _counted(times_s: list[float]) -> tuple[tuple[float, int], ...]:
    every = max(1, len(times_s) // _CURVE_POINTS)
    return tuple((when, i + 1) for i, when in enumerate(times_s) if (i + 1) % every == 0)


def run_dense(
    model: Any,
    load: Load,
    arm: str,
    batch_size: int,
    *,
    seconds: Callable[[], float],
    capacity_tokens: int | None = None,
    scale_at: int | None = None,
) -> RebatchRun:
    """Process a load with a `DynamicBatch`.

    Args:
        model: Transformers model.
        load: queries.
        arm: name of the batcher.
        batch_size: number of rows.
        seconds: clock.
        capacity_tokens: most columns of the slab; None: no limit.
        scale_at: KV bytes above which rows are preempted; None: no limit.
    """
    clock = SkippingClock(seconds)
    options = BatchOptions(
        batcher=arm,
        batch_size=batch_size,
        clock=clock,
        capacity_tokens=capacity_tokens,
        scale_at=scale_at,
    )
    batch = DynamicBatch(model, options)
    waiting = list(zip(prompt_ids(load, model.config.vocab_size), load, strict=True))
    queries: list[Query] = []
    run = RebatchRun(arm, batch_size, len(load))
    while waiting or batch.has_work:
        if not batch.has_work:
            clock.skip_to(waiting[0][1].arrival_s)
        while waiting and waiting[0][1].arrival_s <= clock():
            ids, trace_query = waiting.pop(0)
            params = SamplingParams(temperature=0.0, ignore_eos=True)
            queries.append(
                batch.submit(
                    ids, trace_query.new_tokens, sampling=params, priority=trace_query.priority
                )
            )
        try:
            batch.step()
        except SlabFull as error:
            run.ended = str(error)
            break
        run.record(batch.last)
        run.kv_bytes.append((clock(), batch.last.kv_bytes))
    run.total_s = clock()
    run.kv_peak_bytes = batch.device_meter.peak_bytes
    for query, recorded in zip(queries, load, strict=False):
        run.times_s.append(query.times_s)
        run.answers.append(query.token_ids if query.finished else [])
        run.preemptions += query.preemptions
        if query.times_s:
            run.waited_s.append(query.times_s[0] - recorded.arrival_s)
    return run


def run_paged(
    model: LoadedModel,
    load: Load,
    batch_size: int,
    *,
    seconds: Callable[[], float],
    memory_bytes: int,
) -> RebatchRun:
    """Process a load with the engine's continuous batching over pages.

    Args:
        model: the same weights in Quire's adapter.
        load: queries.
        batch_size: most running requests.
        seconds: clock.
        memory_bytes: bytes of the KV memory.
    """
    clock = SkippingClock(seconds)
    kv = KVConfig(
        memory=memory_bytes, swap_space=memory_bytes, prefix_cache=PrefixCacheConfig(enabled=False)
    )
    engine = Engine(model, kv, ScheduleConfig(max_num_seqs=batch_size, low_watermark=1.0))
    waiting = list(zip(prompt_ids(load, model.spec.vocab_size), load, strict=True))
    run = RebatchRun(CONTINUOUS, batch_size, len(load))
    numbers: dict[str, int] = {}
    while waiting or engine.has_work:
        if not engine.has_work:
            clock.skip_to(waiting[0][1].arrival_s)
        while waiting and waiting[0][1].arrival_s <= clock():
            ids, query = waiting.pop(0)
            params = SamplingParams(max_tokens=query.new_tokens, temperature=0.0, ignore_eos=True)
            numbers[engine.submit(GenerationRequest(ids, params, priority=query.priority))] = len(
                numbers
            )
            run.times_s.append([])
            run.answers.append([])
        for delta in engine.step():
            number = numbers[delta.request_id]
            run.times_s[number] += [clock()] * len(delta.token_ids)
            run.answers[number] += delta.token_ids
        run.kv_bytes.append((clock(), engine.pool.kv.memory.used_bytes))
    run.total_s = clock()
    stats = engine.stats()
    run.kv_peak_bytes, run.preemptions = stats.kv_peak_bytes, stats.num_preemptions
    for times, query in zip(run.times_s, load, strict=True):
        run.waited_s.append(times[0] - query.arrival_s)
    return run


_CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
_WARMUP_QUERIES = 4


@dataclass(frozen=True, slots=True)
class Models:
    """The same weights in both models.

    Attributes:
        dense: Transformers model with sdpa attention.
        paged: model in Quire's adapter.
    """

    dense: Any
    paged: LoadedModel

    @classmethod
    def of(cls, shape: str) -> "Models":
        """Random weights in float32."""
        config = SHAPES[shape]()
        dense = random_weights(config, dtype=torch.float32)
        return cls(dense, random_model(SHAPES[shape](), dtype=torch.float32))


def run_arm(
    models: Models,
    load: Load,
    arm: str,
    batch: int,
    config: RebatchConfig,
    *,
    memory_bytes: int | None = None,
) -> RebatchRun:
    """Run one arm on the whole load.

    Args:
        models: dense and paged model.
        load: the queries.
        arm: name of the batcher.
        batch: number of rows.
        config: clock, and the limit of vector shaping.
        memory_bytes: KV bytes above which rows are preempted; None: no limit.

    Raises:
        InvariantError: an output is too short or too long.
    """
    seconds = _CLOCKS[config.clock]
    longest = max(query.prompt_tokens for query in load) + max(query.new_tokens for query in load)
    if arm == CONTINUOUS:
        spec = models.paged.spec
        whole = spec.kv_bytes(longest + 2 * 16, 4) * batch  # 32 tokens for partly filled pages
        run = run_paged(
            models.paged, load, batch, seconds=seconds, memory_bytes=memory_bytes or whole
        )
    else:
        columns = longest * (config.shaping_columns if arm == SHAPING else 1)
        run = run_dense(
            models.dense,
            load,
            arm,
            batch,
            seconds=seconds,
            capacity_tokens=columns,
            scale_at=memory_bytes,
        )
    lengths = [len(answer) for answer in run.answers]
    if not run.ended and lengths != [query.new_tokens for query in load]:
        raise InvariantError(
            f"expected arm {run.arm} of the rebatch benchmark to finish all queries, "
            "got outputs of other lengths"
        )
    return run


def warm_up(models: Models, load: Load, config: RebatchConfig) -> None:
    """Run a few queries on both models without counting them."""
    few = tuple(load[:_WARMUP_QUERIES])
    for arm in (EMBEDDING, CONTINUOUS):
        run_arm(models, few, arm, 2, config)
