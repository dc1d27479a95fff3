"""Parts of the rebatch benchmark.

w1, w2   BATON's workloads, with every arm at every batch size, and the bound
trace    recorded arrivals with urgent requests, in a KV memory that is too small. The arrival rate
         is `load` times the rate of ideal list scheduling. The clock skips idle time.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.common.result import Chart, Numbers, PartResult, Table
from benchmarks.common.tables import table_of
from benchmarks.rebatch.bound import Costs, fit, ideal_s
from benchmarks.rebatch.config import (
    CONTINUOUS,
    EMBEDDING,
    SHAPING,
    STATIC,
    TRACE,
    W1,
    W2,
    RebatchConfig,
    WorkloadConfig,
)
from benchmarks.rebatch.load import Load, recorded, workload
from benchmarks.rebatch.run import Models, RebatchRun, run_arm, warm_up

Round = Mapping[str, RebatchRun]


@dataclass(frozen=True, slots=True)
class AtBatch:
    """Measurements at one batch size.

    Attributes:
        batch: number of rows.
        rounds: runs of every arm, by round.
        ideals_s: ideal makespan of each round, from the costs of that round.
    """

    batch: int
    rounds: Sequence[Round]
    ideals_s: Sequence[float]

    def median(self, number: Callable[[Round, float], float]) -> float:
        """Median over rounds of a function of a round and its ideal makespan."""
        pairs = zip(self.rounds, self.ideals_s, strict=True)
        return statistics.median(number(runs, ideal) for runs, ideal in pairs)


def run_workload(config: RebatchConfig, options: WorkloadConfig) -> PartResult:
    """Run the part `w1` or `w2`."""
    found = measure(config, options)
    return PartResult(
        claims=claims(options, found),
        tables=tuple(_table(config, options, at) for at in found),
        charts=tuple(chart for at in found for chart in _charts(options, at)),
        raw={
            str(at.batch): [
                {"ideal_s": ideal, "arms": {arm: run.to_json() for arm, run in runs.items()}}
                for runs, ideal in zip(at.rounds, at.ideals_s, strict=True)
            ]
            for at in found
        },
    )


def measure(config: RebatchConfig, options: WorkloadConfig) -> list[AtBatch]:
    """Run every arm at every batch size; arms run in turn."""
    load = workload(options.name, options.scale, options.queries)
    models = Models.of(config.model)
    warm_up(models, load, config)
    found = []
    for batch in options.batches:
        rounds: list[Round] = [
            {arm: run_arm(models, load, arm, batch, config) for arm in options.arms}
            for _ in range(config.repeats)
        ]
        found.append(AtBatch(batch, rounds, [ideal_s(load, batch, costs(runs)) for runs in rounds]))
    return found


def costs(runs: Round) -> Costs:
    """Costs fitted to the round's dense arms."""
    return fit([run.forwards for arm, run in runs.items() if arm != CONTINUOUS])


def claims(options: WorkloadConfig, found: Sequence[AtBatch]) -> Numbers:
    """Ratios within rounds, medians over rounds. A speed ratio is first arm over second arm.

    W_batonpd_over_bound_bB: speed of vector embedding over ideal list scheduling.
    W_bound_bB: speed of ideal list scheduling over static batches.
    W_batonpd_over_static_bB, W_continuous_over_static_bB: ratios of speeds by makespan.
    W_batonpd_over_baton_shaping_bB: ratio of tokens per second, until shaping finished all queries
        or its slab was full. Without _bB: at the largest batch.
    W_baton_shaping_completed_bB: fraction of the queries that shaping finished.
    W_batonpd_idle_fraction: most rows with ended queries while others wait, as a fraction.
    W_batonpd_peak_over_static_bB: ratio of peak KV bytes, with prefilled queue and slab growth.

    """
    name = options.name
    numbers: Numbers = {}
    for at in found:
        mark = f"b{at.batch}"
        numbers[f"{name}_batonpd_over_bound_{mark}"] = at.median(
            lambda runs, ideal: ideal / runs[EMBEDDING].total_s
        )
        numbers[f"{name}_bound_{mark}"] = at.median(
            lambda runs, ideal: runs[STATIC].total_s / ideal
        )
        numbers[f"{name}_batonpd_over_static_{mark}"] = _speedup(at, EMBEDDING, STATIC)
        numbers[f"{name}_continuous_over_static_{mark}"] = _speedup(at, CONTINUOUS, STATIC)
        numbers[f"{name}_batonpd_peak_over_static_{mark}"] = at.median(
            lambda runs, _: runs[EMBEDDING].kv_peak_bytes / runs[STATIC].kv_peak_bytes
        )
        if SHAPING in options.arms:
            numbers |= _shaping(name, at)
    if SHAPING in options.arms:
        last = f"{name}_batonpd_over_baton_shaping"
        numbers[last] = numbers[f"{last}_b{found[-1].batch}"]
    numbers[f"{name}_batonpd_idle_fraction"] = max(
        runs[EMBEDDING].idle_while_queued for at in found for runs in at.rounds
    )
    return numbers


def _speedup(at: AtBatch, arm: str, over: str) -> float:
    return at.median(lambda runs, _: runs[over].total_s / runs[arm].total_s)


def _shaping(name: str, at: AtBatch) -> Numbers:
    return {
        f"{name}_batonpd_over_baton_shaping_b{at.batch}": at.median(
            lambda runs, _: runs[EMBEDDING].tokens_per_s / runs[SHAPING].tokens_per_s
        ),
        f"{name}_baton_shaping_completed_b{at.batch}": at.median(
            lambda runs, _: runs[SHAPING].answered
        ),
    }


def _table(config: RebatchConfig, options: WorkloadConfig, at: AtBatch) -> Table:
    load: Load = workload(options.name, options.scale, options.queries)

    def median(arm: str, number: Callable[[RebatchRun], float]) -> float:
        return at.median(lambda runs, _: number(runs[arm]))

    def whole(arm: str, number: float) -> float | None:
        return number if median(arm, lambda run: run.answered) == 1 else None

    def dense(arm: str, number: Callable[[RebatchRun], float]) -> float | None:
        return None if arm == CONTINUOUS else median(arm, number)

    return table_of(
        f"rebatch_{options.name}_b{at.batch}",
        f"{options.name}: {len(load)} queries at the start, lengths times {options.scale:g}, "
        f"{at.batch} rows, random-weight Llama ({config.model}), float32. The bound is ideal "
        "first-come list scheduling at the costs measured in the round; static's makespan over "
        f"the bound is {at.median(lambda runs, ideal: runs[STATIC].total_s / ideal):.2f}. "
        "Idle: rows of ended queries; padded: slots without a token that attention reads. "
        f"Medians of {len(at.rounds)} rounds, arms in turn.",
        options.arms,
        {
            "batcher": lambda arm: arm,
            "makespan s": lambda arm: median(arm, lambda run: run.total_s),
            "over static": lambda arm: whole(arm, _speedup(at, arm, STATIC)),
            "bound over makespan": lambda arm: whole(
                arm, at.median(lambda runs, ideal: ideal / runs[arm].total_s)
            ),
            "tokens/s": lambda arm: median(arm, lambda run: run.tokens_per_s),
            "answered": lambda arm: median(arm, lambda run: run.answered),
            "idle": lambda arm: dense(arm, lambda run: run.idle_fraction),
            "padded": lambda arm: dense(arm, lambda run: run.padded_fraction),
            "peak KV MiB": lambda arm: median(arm, lambda run: run.kv_peak_bytes / 2**20),
            "first token p50 s": lambda arm: median(arm, lambda run: run.first_s(50)),
            "first token p99 s": lambda arm: median(arm, lambda run: run.first_s(99)),
            "token p50 ms": lambda arm: median(arm, lambda run: run.token_s(50) * 1e3),
            "token p99 ms": lambda arm: median(arm, lambda run: run.token_s(99) * 1e3),
        },
    )


_SHOWN = (STATIC, SHAPING, EMBEDDING, CONTINUOUS)


def _charts(options: WorkloadConfig, at: AtBatch) -> tuple[Chart, ...]:
    """Figures 5 to 7 of the paper, at the largest batch."""
    if at.batch != max(options.batches):
        return ()
    runs = {arm: at.rounds[0][arm] for arm in _SHOWN if arm in options.arms}

    def chart(what: str, label: str, lines: Mapping[str, object]) -> Chart:
        return Chart(
            name=f"rebatch_{options.name}_{what}",
            title=f"{options.name}, {at.batch} rows: {label}",
            x_label="seconds",
            y_label=label,
            lines=lines,  # type: ignore[arg-type]
        )

    return (
        chart("queries", "queries answered", {a: r.answered_curve() for a, r in runs.items()}),
        chart("tokens", "tokens generated", {a: r.token_curve() for a, r in runs.items()}),
        chart("kv", "MiB of KV held", {a: r.kv_curve() for a, r in runs.items()}),
    )


def run_trace(config: RebatchConfig) -> PartResult:
    """Run the part."""
    load, memory_bytes, rounds = measure_trace(config)
    return PartResult(
        claims=trace_claims(rounds),
        tables=(_trace_table(config, load, memory_bytes, rounds),),
        charts=(_trace_chart(rounds[0]),),
        raw={
            "memory_bytes": memory_bytes,
            "rounds": [{arm: run.to_json() for arm, run in runs.items()} for runs in rounds],
        },
    )


def measure_trace(config: RebatchConfig) -> tuple[Load, int, list[Round]]:
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


def trace_claims(rounds: Sequence[Round]) -> Numbers:
    """Time to first token of static batches over that of vector embedding, p99, median ratio."""
    ratios = [found[STATIC].first_s(99) / found[EMBEDDING].first_s(99) for found in rounds]
    return {"trace_batonpd_over_static_first_p99": statistics.median(ratios)}


def _trace_table(
    config: RebatchConfig, load: Load, memory_bytes: int, rounds: Sequence[Round]
) -> Table:
    trace = config.trace

    def median(arm: str, number: Callable[[RebatchRun], float]) -> float:
        return float(statistics.median(number(found[arm]) for found in rounds))

    return table_of(
        "rebatch_trace",
        f"The first {len(load)} requests of the Azure conversation trace, lengths times "
        f"{trace.scale:g}, arrivals over {load[-1].arrival_s:.1f} s: {trace.load:.0%} of what "
        f"ideal list scheduling completes. {trace.batch} rows, {memory_bytes / 2**20:.1f} MiB of "
        f"KV, every {trace.urgent_every}th request urgent. Rows are preempted for urgent requests "
        "and when memory is full, except by static and pd, which start smaller batches. "
        f"Medians of {len(rounds)} rounds, arms in turn.",
        rounds[0],
        {
            "batcher": lambda arm: arm,
            "first token p50 s": lambda arm: median(arm, lambda run: run.first_s(50)),
            "first token p99 s": lambda arm: median(arm, lambda run: run.first_s(99)),
            "urgent first p99 s": lambda arm: median(
                arm, lambda run: urgent(run, load).first_s(99)
            ),
            "token p50 ms": lambda arm: median(arm, lambda run: run.token_s(50) * 1e3),
            "token p99 ms": lambda arm: median(arm, lambda run: run.token_s(99) * 1e3),
            "makespan s": lambda arm: median(arm, lambda run: run.total_s),
            "peak KV MiB": lambda arm: median(arm, lambda run: run.kv_peak_bytes / 2**20),
            "preempted rows": lambda arm: median(arm, lambda run: run.preemptions),
            "answered": lambda arm: median(arm, lambda run: run.answered),
        },
    )


def urgent(run: RebatchRun, load: Load) -> RebatchRun:
    """The same run, restricted to the urgent requests."""
    waited = [
        times[0] - query.arrival_s
        for times, query in zip(run.times_s, load, strict=False)
        if times and query.priority == 0
    ]
    return replace(run, waited_s=waited)


def _trace_chart(runs: Round) -> Chart:
    return Chart(
        name="rebatch_trace_kv",
        title="Azure conversation trace: MiB of KV held",
        x_label="seconds",
        y_label="MiB of KV held",
        lines={arm: runs[arm].kv_curve() for arm in (STATIC, EMBEDDING, CONTINUOUS) if arm in runs},
    )


PARTS: Mapping[str, Callable[[RebatchConfig], PartResult]] = {
    W1: lambda config: run_workload(config, config.w1),
    W2: lambda config: run_workload(config, config.w2),
    TRACE: run_trace,
}
