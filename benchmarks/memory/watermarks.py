"""Part `watermarks`: fraction of the KV memory up to which new requests are admitted.

More requests arrive than the memory holds, so the watermark decides how many run at once. Admission
is optimistic: outputs grow after admission, into the memory that the low watermark keeps free. Both
watermarks of the scheduler are swept. The low watermark runs alone: no request is admitted above
it. It also runs with a high watermark two points above it, above which a request is preempted.

Source: papers call the mark at which admission stops the watermark; its table is re-measured here.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.common.result import Chart, Numbers, PartResult, Table
from benchmarks.memory.simulated import SimulatedConfig
from quire.sim.metrics import percentiles, summarise
from quire.sim.run import SimConfig, simulate
from quire.sim.traces.base import Trace, TraceOptions

COMPARED = 98  # per cent: what the best is held against
_ABOVE = 0.02  # of the high mark over the low one


@dataclass(frozen=True, slots=True, kw_only=True)
class WatermarkConfig:
    """What is swept.

    Attributes:
        per_cents: low watermarks; COMPARED must be among them.
        time_scale: factor on the times between arrivals: requests must wait for memory.
        memory: KV bytes.
        max_num_seqs: sequences at once; large enough that memory is the limit.
        requests: of the trace, at most.
    """

    per_cents: tuple[int, ...] = (70, 85, 90, 95, 98)
    time_scale: float = 0.5
    memory: str = "12GiB"
    max_num_seqs: int = 1_024
    requests: int = 8_000


@dataclass(frozen=True, slots=True, kw_only=True)
class WatermarkRun:
    """One run.

    Attributes:
        per_cent: the low mark.
        gives_way: whether a high watermark was set, two points above the low one.
        largest_batch, mean_batch: sequences at once.
        tokens_per_s: generated, while requests wait.
        preemptions_per_minute: of the time the run took.
        recomputed_fraction: fraction of processed tokens that were recomputed.
        numbers: percentiles of latencies.
    """

    per_cent: int
    gives_way: bool
    largest_batch: int
    mean_batch: float
    tokens_per_s: float
    preemptions_per_minute: float
    recomputed_fraction: float
    numbers: Numbers


def measure_watermarks(
    config: WatermarkConfig, simulated: SimulatedConfig
) -> Iterator[WatermarkRun]:
    """Yield a run for each mark, without and with a high one."""
    trace = simulated.conversations(TraceOptions(time_scale=config.time_scale))
    trace = replace(trace, requests=trace.requests[: config.requests])
    on = simulated.run_config()
    on = replace(on, kv=replace(on.kv, memory=config.memory))
    for gives_way in (False, True):
        for per_cent in config.per_cents:
            yield _run(trace, on, config.max_num_seqs, per_cent=per_cent, gives_way=gives_way)


def _run(
    trace: Trace, on: SimConfig, max_num_seqs: int, *, per_cent: int, gives_way: bool
) -> WatermarkRun:
    low = per_cent / 100
    schedule = replace(
        on.schedule,
        max_num_seqs=max_num_seqs,
        low_watermark=low,
        high_watermark=min(1.0, round(low + _ABOVE, 4)) if gives_way else 1.0,
    )
    result = simulate(trace, replace(on, schedule=schedule))
    numbers = summarise(result)
    finished = [r for r in result.records if r.finished]
    stall = percentiles("service", (r.finish_s - r.admitted_s for r in finished))
    return WatermarkRun(
        per_cent=per_cent,
        gives_way=gives_way,
        largest_batch=int(numbers["running_peak"]),
        mean_batch=numbers["running_mean"],
        tokens_per_s=numbers["generated_tokens_per_s"],
        preemptions_per_minute=numbers["preemptions_per_minute"],
        recomputed_fraction=numbers["recomputed_fraction"],
        numbers={
            name: value for name, value in (numbers | stall).items() if name.endswith("_p99_s")
        },
    )


def run_watermarks(config: WatermarkConfig, simulated: SimulatedConfig) -> PartResult:
    """The part."""
    runs = list(measure_watermarks(config, simulated))
    return PartResult(
        claims=claims(runs),
        tables=(_table(runs, config, simulated),),
        charts=(_chart(runs),),
        raw={
            "runs": [{"per_cent": r.per_cent, "gives_way": r.gives_way} | r.numbers for r in runs]
        },
    )


def claims(runs: list[WatermarkRun]) -> Numbers:
    """The mark with the highest throughput, its throughput over that at 98 %, and every mark's.

    Marks of equal throughput (to one part in a thousand): the one with the shorter p99 of tokens.
    """
    plain = [run for run in runs if not run.gives_way]
    most = max(run.tokens_per_s for run in plain)
    near = [run for run in plain if run.tokens_per_s >= 0.999 * most]
    best = min(near, key=lambda run: (run.numbers.get("tpot_p99_s", 0.0), run.per_cent))
    [compared] = (run for run in plain if run.per_cent == COMPARED)
    made: Numbers = {
        "watermark_best": best.per_cent,
        "throughput_best_over_98": best.tokens_per_s / compared.tokens_per_s,
    }
    for run in plain:
        made[f"throughput_{run.per_cent}"] = run.tokens_per_s
        made[f"preemptions_per_minute_{run.per_cent}"] = run.preemptions_per_minute
    return made


def _table(runs: list[WatermarkRun], config: WatermarkConfig, simulated: SimulatedConfig) -> Table:
    rows = tuple(
        (
            f"{run.per_cent} %" + (f", gives way above {run.per_cent + 2} %" * run.gives_way),
            run.largest_batch,
            run.mean_batch,
            run.tokens_per_s,
            run.preemptions_per_minute,
            100 * run.recomputed_fraction,
            _milliseconds(run.numbers.get("tpot_p99_s")),
            run.numbers.get("service_p99_s"),
            run.numbers.get("e2e_p99_s"),
        )
        for run in runs
    )
    return Table(
        name="watermarks",
        caption=(
            f"Low watermark: {simulated.model} in {config.memory} of KV on a simulated "
            f"{simulated.machine}, requests of the Azure trace at {1 / config.time_scale:g} times "
            "its rate, optimistic admission, who gives way is read again. Service: from entering "
            "to the end; whole: the queue too."
        ),
        columns=(
            "let in up to",
            "largest batch",
            "mean batch",
            "generated tokens/s",
            "preemptions/min",
            "read again %",
            "p99 per token ms",
            "p99 service s",
            "p99 whole s",
        ),
        rows=rows,
    )


def _milliseconds(value_s: int | float | None) -> float | None:
    """Nothing where every answer had one token."""
    return None if value_s is None else 1e3 * value_s


def _chart(runs: list[WatermarkRun]) -> Chart:
    words = {False: "low mark alone", True: "with a high mark"}
    lines = {
        words[gives_way]: tuple(
            (run.per_cent, run.preemptions_per_minute) for run in runs if run.gives_way == gives_way
        )
        for gives_way in words
    }
    return Chart(
        name="watermarks",
        title="Requests thrown out, by the mark up to which others are let in",
        x_label="low watermark, % of the KV memory",
        y_label="preemptions per minute",
        lines=lines,
    )
