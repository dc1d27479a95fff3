"""Parts `w1` and `w2`: BATON's workloads, with every arm at every batch size, and the bound."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.common.result import Cell, Chart, Numbers, PartResult, Table
from benchmarks.rebatch.arms import Models, run_arm, warm_up
from benchmarks.rebatch.bound import Costs, fit, ideal_s
from benchmarks.rebatch.config import (
    CONTINUOUS,
    EMBEDDING,
    SHAPING,
    STATIC,
    RebatchConfig,
    WorkloadConfig,
)
from benchmarks.rebatch.load import Load, workload
from benchmarks.rebatch.run import RebatchRun

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


def run_w1(config: RebatchConfig) -> PartResult:
    """Run the part `w1`."""
    return _run(config, config.w1)


def run_w2(config: RebatchConfig) -> PartResult:
    """Run the part `w2`."""
    return _run(config, config.w2)


def _run(config: RebatchConfig, options: WorkloadConfig) -> PartResult:
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
    return Table(
        name=f"rebatch_{options.name}_b{at.batch}",
        caption=(
            f"{options.name}: {len(load)} queries at the start, lengths times {options.scale:g}, "
            f"{at.batch} rows, random-weight Llama ({config.model}), float32. The bound is ideal "
            "first-come list scheduling at the costs measured in the round; static's makespan over "
            f"the bound is {at.median(lambda runs, ideal: runs[STATIC].total_s / ideal):.2f}. "
            "Idle: rows of ended queries; padded: slots without a token that attention reads. "
            f"Medians of {len(at.rounds)} rounds, arms in turn."
        ),
        columns=(
            "batcher",
            "makespan s",
            "over static",
            "bound over makespan",
            "tokens/s",
            "answered",
            "idle",
            "padded",
            "peak KV MiB",
            "first token p50 s",
            "first token p99 s",
            "token p50 ms",
            "token p99 ms",
        ),
        rows=tuple(_row(at, arm) for arm in options.arms),
    )


def _row(at: AtBatch, arm: str) -> tuple[Cell, ...]:
    def median(number: Callable[[RebatchRun], float]) -> float:
        return at.median(lambda runs, _: number(runs[arm]))

    dense = arm != CONTINUOUS
    whole = median(lambda run: run.answered) == 1
    return (
        arm,
        median(lambda run: run.total_s),
        _speedup(at, arm, STATIC) if whole else None,
        at.median(lambda runs, ideal: ideal / runs[arm].total_s) if whole else None,
        median(lambda run: run.tokens_per_s),
        median(lambda run: run.answered),
        median(lambda run: run.idle_fraction) if dense else None,
        median(lambda run: run.padded_fraction) if dense else None,
        median(lambda run: run.kv_peak_bytes / 2**20),
        median(lambda run: run.first_s(50)),
        median(lambda run: run.first_s(99)),
        median(lambda run: run.token_s(50) * 1e3),
        median(lambda run: run.token_s(99) * 1e3),
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
