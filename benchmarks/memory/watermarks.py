"""Part `watermarks`: fraction of the KV memory up to which new requests are admitted.

More requests arrive than the memory holds, so the watermark decides how many run at once. Admission
is optimistic: outputs grow after admission, into the memory that the low watermark keeps free. Both
watermarks of the scheduler are swept. The low watermark runs alone: no request is admitted above
it. It also runs with a high watermark two points above it, above which a request is preempted.

Source: papers call the fraction at which admission stops the watermark.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.common.result import Chart, Numbers, PartResult, Table
from benchmarks.memory.simulated import SimulatedConfig
from quire.sim.metrics import percentiles, summarise
from quire.sim.run import SimConfig, simulate
from quire.sim.traces.base import Trace, TraceOptions

COMPARED = 98  # percentage that the best watermark is compared with
_ABOVE = 0.02  # high watermark minus low watermark


@dataclass(frozen=True, slots=True, kw_only=True)
class WatermarkConfig:
    """Configuration of the sweep.

    Attributes:
        per_cents: low watermarks in percent; COMPARED must be one of them.
        time_scale: factor on the times between arrivals, so that requests wait for memory.
        memory: KV memory.
        max_num_seqs: most running sequences; large enough that memory is the limit.
        requests: most requests of the trace.
    """

    per_cents: tuple[int, ...] = (70, 85, 90, 95, 98)
    time_scale: float = 0.5
    memory: str = "12GiB"
    max_num_seqs: int = 1_024
    requests: int = 8_000


@dataclass(frozen=True, slots=True, kw_only=True)
class WatermarkRun:
    """Measurements of one run.

    Attributes:
        per_cent: low watermark in percent.
        preempts: whether a high watermark was set, two points above the low one.
        largest_batch, mean_batch: number of running sequences.
        tokens_per_s: generated tokens per second while requests wait.
        preemptions_per_minute: preemptions per simulated minute.
        recomputed_fraction: fraction of processed tokens that were recomputed.
        numbers: percentiles of latencies.
    """

    per_cent: int
    preempts: bool
    largest_batch: int
    mean_batch: float
    tokens_per_s: float
    preemptions_per_minute: float
    recomputed_fraction: float
    numbers: Numbers


def measure_watermarks(
    config: WatermarkConfig, simulated: SimulatedConfig
) -> Iterator[WatermarkRun]:
    """Yield a run for each low watermark, without and with a high watermark."""
    trace = simulated.conversations(TraceOptions(time_scale=config.time_scale))
    trace = replace(trace, requests=trace.requests[: config.requests])
    on = simulated.run_config()
    on = replace(on, kv=replace(on.kv, memory=config.memory))
    for preempts in (False, True):
        for per_cent in config.per_cents:
            yield _run(trace, on, config.max_num_seqs, per_cent=per_cent, preempts=preempts)


def _run(
    trace: Trace, on: SimConfig, max_num_seqs: int, *, per_cent: int, preempts: bool
) -> WatermarkRun:
    low = per_cent / 100
    schedule = replace(
        on.schedule,
        max_num_seqs=max_num_seqs,
        admission="optimistic",
        low_watermark=low,
        high_watermark=min(1.0, round(low + _ABOVE, 4)) if preempts else 1.0,
    )
    kv = replace(on.kv, swap_space=0)
    result = simulate(trace, replace(on, kv=kv, schedule=schedule))
    numbers = summarise(result)
    finished = [r for r in result.records if r.finished]
    stall = percentiles("service", (r.finish_s - r.admitted_s for r in finished))
    return WatermarkRun(
        per_cent=per_cent,
        preempts=preempts,
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
    """Run the part."""
    runs = list(measure_watermarks(config, simulated))
    return PartResult(
        claims=claims(runs),
        tables=(_table(runs, config, simulated),),
        charts=(_chart(runs),),
        raw={"runs": [{"per_cent": r.per_cent, "preempts": r.preempts} | r.numbers for r in runs]},
    )


def claims(runs: list[WatermarkRun]) -> Numbers:
    """Best watermark by throughput, its throughput over that at 98 %, and values of each watermark.

    Among throughputs that differ by at most 0.1 %, the shortest p99 of token times decides.

    """
    plain = [run for run in runs if not run.preempts]
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
            f"{run.per_cent} %" + (f", high {run.per_cent + 2} %" * run.preempts),
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
            "its rate, optimistic admission, preempted requests recompute. Service: from admission "
            "to the end; end to end: with the queue time."
        ),
        columns=(
            "watermarks",
            "largest batch",
            "mean batch",
            "generated tokens/s",
            "preemptions/min",
            "recomputed %",
            "p99 time per token ms",
            "p99 service s",
            "p99 end to end s",
        ),
        rows=rows,
    )


def _milliseconds(value_s: int | float | None) -> float | None:
    """Convert to milliseconds; None if every output had one token."""
    return None if value_s is None else 1e3 * value_s


def _chart(runs: list[WatermarkRun]) -> Chart:
    words = {False: "low watermark only", True: "with a high watermark"}
    lines = {
        words[preempts]: tuple(
            (run.per_cent, run.preemptions_per_minute) for run in runs if run.preempts == preempts
        )
        for preempts in words
    }
    return Chart(
        name="watermarks",
        title="Preemptions by low watermark",
        x_label="low watermark, % of the KV memory",
        y_label="preemptions per minute",
        lines=lines,
    )
