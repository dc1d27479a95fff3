"""Part `trace`: recorded arrivals with urgent requests, in a KV memory that is too small.

The arrival rate is `load` times the rate of ideal list scheduling. The clock skips idle time.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from benchmarks.common.result import Cell, Chart, Numbers, PartResult, Table
from benchmarks.rebatch.arms import Models, run_arm, warm_up
from benchmarks.rebatch.bound import fit, ideal_s
from benchmarks.rebatch.config import CONTINUOUS, EMBEDDING, STATIC, RebatchConfig
from benchmarks.rebatch.load import Load, recorded
from benchmarks.rebatch.run import RebatchRun

Round = Mapping[str, RebatchRun]


def run_trace(config: RebatchConfig) -> PartResult:
    """Run the part."""
    load, memory_bytes, rounds = measure(config)
    return PartResult(
        claims=claims(rounds, memory_bytes),
        tables=(_table(config, load, memory_bytes, rounds),),
        charts=(_chart(rounds[0]),),
        raw={
            "memory_bytes": memory_bytes,
            "rounds": [{arm: run.to_json() for arm, run in runs.items()} for runs in rounds],
        },
    )


def measure(config: RebatchConfig) -> tuple[Load, int, list[Round]]:
    """Measure every arm in turn; return the load, the KV memory and the rounds."""
    trace = config.trace
    models = Models.of(config.model)
    together = recorded(trace.requests, trace.scale, 0.0, trace.urgent_every)
    warm_up(models, together, config)
    free = run_arm(models, together, EMBEDDING, trace.batch, config)
    span_s = ideal_s(together, trace.batch, fit([free.forwards])) / trace.load
    load = recorded(trace.requests, trace.scale, span_s, trace.urgent_every)
    memory_bytes = max(int(free.kv_peak_bytes * trace.memory_share), _min_bytes(models, load))
    rounds: list[Round] = [
        {
            arm: run_arm(models, load, arm, trace.batch, config, memory_bytes=memory_bytes)
            for arm in trace.arms
        }
        for _ in range(config.repeats)
    ]
    return load, memory_bytes, rounds


def _min_bytes(models: Models, load: Load) -> int:
    """KV bytes that the longest query needs alone during prefill and the copy into a slab."""
    longest = max(query.final_tokens for query in load)
    return 3 * models.paged.spec.kv_bytes(longest, 4)


def claims(rounds: Sequence[Round], memory_bytes: int) -> Numbers:
    """Medians over rounds.

    trace_ARM_first_p99_s, trace_ARM_token_p99_s, and p50: percentiles over all queries.
    trace_ARM_makespan_s: makespan; trace_ARM_peak_over_memory: peak KV bytes over the KV memory.
    trace_batonpd_over_static_first_p99: static's time over vector embedding's.
    """
    numbers: Numbers = {}
    for arm in rounds[0]:
        runs = [found[arm] for found in rounds]
        for percent in (50, 99):
            first = statistics.median(run.first_s(percent) for run in runs)
            token = statistics.median(run.token_s(percent) for run in runs)
            numbers[f"trace_{arm}_first_p{percent}_s"] = first
            numbers[f"trace_{arm}_token_p{percent}_s"] = token
        numbers[f"trace_{arm}_makespan_s"] = _median(runs, lambda run: run.total_s)
        numbers[f"trace_{arm}_peak_over_memory"] = _median(
            runs, lambda run: run.kv_peak_bytes / memory_bytes
        )
        numbers[f"trace_{arm}_preemptions"] = _median(runs, lambda run: run.preemptions)
    numbers["trace_batonpd_over_static_first_p99"] = statistics.median(
        found[STATIC].first_s(99) / found[EMBEDDING].first_s(99) for found in rounds
    )
    return numbers


def _median(runs: Sequence[RebatchRun], number: Callable[[RebatchRun], float]) -> float:
    return float(statistics.median(map(number, runs)))


def _table(config: RebatchConfig, load: Load, memory_bytes: int, rounds: Sequence[Round]) -> Table:
    trace = config.trace
    return Table(
        name="rebatch_trace",
        caption=(
            f"The first {len(load)} requests of the Azure conversation trace, lengths times "
            f"{trace.scale:g}, arrivals over {load[-1].arrival_s:.1f} s: "
            f"{trace.load:.0%} of what "
            f"ideal list scheduling completes. {trace.batch} rows, {memory_bytes / 2**20:.1f} "
            "MiB of "
            f"KV, every {trace.urgent_every}th request urgent. Rows are preempted for "
            "urgent requests "
            "and when memory is full, except by static and pd, which start smaller batches. "
            f"Medians of {len(rounds)} rounds, arms in turn."
        ),
        columns=(
            "batcher",
            "first token p50 s",
            "first token p99 s",
            "urgent first p99 s",
            "token p50 ms",
            "token p99 ms",
            "makespan s",
            "peak KV MiB",
            "preempted rows",
            "answered",
        ),
        rows=tuple(_row(load, [found[arm] for found in rounds]) for arm in rounds[0]),
    )


def _row(load: Load, runs: Sequence[RebatchRun]) -> tuple[Cell, ...]:
    return (
        runs[0].arm,
        _median(runs, lambda run: run.first_s(50)),
        _median(runs, lambda run: run.first_s(99)),
        _median(runs, lambda run: urgent(run, load).first_s(99)),
        _median(runs, lambda run: run.token_s(50) * 1e3),
        _median(runs, lambda run: run.token_s(99) * 1e3),
        _median(runs, lambda run: run.total_s),
        _median(runs, lambda run: run.kv_peak_bytes / 2**20),
        _median(runs, lambda run: run.preemptions),
        _median(runs, lambda run: run.answered),
    )


def urgent(run: RebatchRun, load: Load) -> RebatchRun:
    """The same run, restricted to the urgent requests."""
    waited = [
        times[0] - query.arrival_s
        for times, query in zip(run.times_s, load, strict=False)
        if times and query.priority == 0
    ]
    return replace(run, waited_s=waited)


def _chart(runs: Round) -> Chart:
    return Chart(
        name="rebatch_trace_kv",
        title="Azure conversation trace: MiB of KV held",
        x_label="seconds",
        y_label="MiB of KV held",
        lines={arm: runs[arm].kv_curve() for arm in (STATIC, EMBEDDING, CONTINUOUS) if arm in runs},
    )
