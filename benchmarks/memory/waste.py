"""Part `waste`: fraction of the allocated KV memory without a token, by store and workload.

Every store serves the same requests in the same bytes, with the engine's scheduler. Waste is
averaged over time: slots without a token, over slots allocated to running sequences.

In the baseline `contiguous_max`, every sequence reserves a contiguous lane of one maximum length.
Sequences, bytes, arrival order and scheduler are those of the paged run, and waste has the same
definition. Nothing is shared: a contiguous lane belongs to one sequence.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Final

from benchmarks.common.result import Chart, Numbers, PartResult, Table
from benchmarks.memory.simulated import SimulatedConfig
from quire.config.kv_config import PrefixCacheConfig, StoreName
from quire.layout.model import ModelSpec
from quire.sim.engine import SimResult
from quire.sim.run import SimConfig, make_simulator, simulate
from quire.sim.traces.base import Trace, TraceOptions

STORE: Final = "contiguous_max"
OWN = "own"  # the trace's longest request
WINDOWED = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "sliding_window": 1024,
}
"""Shape of Mistral 7B v0.1 with a window of 1,024 tokens instead of 4,096, which few requests of
the trace exceed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WasteConfig:
    """Configuration of the comparison.

    Attributes:
        max_tokens: lengths of contiguous lanes, in addition to the trace's longest request.
        short_scale: factor on all lengths for the workload of short requests.
        other_requests: most requests of the trace in the workloads `short` and `window`.
    """

    max_tokens: tuple[int, ...] = (4_096, 8_192)
    short_scale: float = 0.25
    other_requests: int = 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRun:
    """Measurements of one workload in one store.

    Attributes:
        workload, store: names of workload and store.
        reserved: maximum length of a reserved lane, in tokens or OWN; None: no maximum.
        reserved_tokens: the same length as a number.
        dropped: number of requests that exceed this length.
        waste_fraction: waste over time.
        end_waste_fraction: waste over requests at their end; None if lanes have no fixed size.
        running_mean: mean number of running sequences over time.
        tokens_per_s: generated tokens per second.
        copied_bytes: bytes copied for lanes that outgrew their allocation.
    """

    workload: str
    store: str
    reserved: str | None
    reserved_tokens: int | None
    dropped: int
    waste_fraction: float
    end_waste_fraction: float | None
    running_mean: float
    tokens_per_s: float
    copied_bytes: int


def measure_waste_of_stores(config: WasteConfig, simulated: SimulatedConfig) -> Iterator[StoreRun]:
    """Yield a run for each workload and store.

    Args:
        config: configuration of the comparison.
        simulated: trace and machine.
    """
    on = simulated.run_config()
    real = simulated.conversations()
    short = simulated.conversations(TraceOptions(length_scale=config.short_scale))
    short = replace(short, requests=short.requests[: config.other_requests])
    fewer = replace(real, requests=real.requests[: config.other_requests])
    for workload, trace in (("real", real), ("short", short)):
        yield _run(workload, trace, on, "paged")
        lanes = {str(tokens): tokens for tokens in config.max_tokens} | {OWN: longest_tokens(trace)}
        for reserved, tokens in lanes.items():
            yield _run(workload, trace, on, STORE, reserved=reserved, reserved_tokens=tokens)
        yield _run(workload, trace, on, "contiguous_growing")
    windowed = replace(on, model=ModelSpec.from_config(WINDOWED))
    for store in ("paged", "ring"):
        yield _run("window", fewer, windowed, store)


def _run(
    workload: str,
    trace: Trace,
    on: SimConfig,
    store: StoreName,
    *,
    reserved: str | None = None,
    reserved_tokens: int | None = None,
) -> StoreRun:
    served = tuple(
        r for r in trace.requests if reserved_tokens is None or r.tokens <= reserved_tokens
    )
    kv = replace(
        on.kv,
        store=store,
        store_tokens=reserved_tokens,
        prefix_cache=PrefixCacheConfig(enabled=False),
    )
    simulator = make_simulator(replace(trace, requests=served), replace(on, kv=kv))
    result = simulator.run()
    fixed = {"paged": kv.page_tokens, STORE: reserved_tokens}.get(store)
    generated = sum(r.answer_tokens for r in result.records if r.finished)
    return StoreRun(
        workload=workload,
        store=store,
        reserved=reserved,
        reserved_tokens=reserved_tokens,
        dropped=len(trace.requests) - len(served),
        waste_fraction=result.gauges.waste_fraction,
        # pages outside a window are freed before the end
        end_waste_fraction=request_waste(result, fixed) if fixed and workload != "window" else None,
        running_mean=result.gauges.mean("running"),
        tokens_per_s=generated / result.gauges.time_s,
        copied_bytes=simulator.engine.memory.placement.copied_bytes,
    )


def run_waste(config: WasteConfig, simulated: SimulatedConfig) -> PartResult:
    """Run the part."""
    runs = list(measure_waste_of_stores(config, simulated))
    return PartResult(
        claims=claims(runs),
        tables=(_table(runs, simulated),),
        charts=(_chart(runs),),
        raw={"runs": [asdict(run) for run in runs]},
    )


def claims(runs: list[StoreRun]) -> Numbers:
    """Fractions of the workload `real`, and of the window model in both of its stores."""
    found: Numbers = {}
    for run in runs:
        if run.workload == "window":
            found[f"{run.store}_window_waste_fraction"] = run.waste_fraction
        elif run.workload == "real" and run.store == STORE:
            found[f"contiguous_waste_fraction_{run.reserved}"] = run.waste_fraction
            found[f"contiguous_dropped_{run.reserved}"] = run.dropped
        elif run.workload == "real":
            found[f"{run.store}_waste_fraction"] = run.waste_fraction
    return found


def _label(run: StoreRun) -> str:
    return run.store if run.reserved_tokens is None else f"{run.store} {run.reserved_tokens}"


def _table(runs: list[StoreRun], simulated: SimulatedConfig) -> Table:
    rows = tuple(
        (
            run.workload,
            _label(run),
            run.dropped,
            100 * run.waste_fraction,
            None if run.end_waste_fraction is None else 100 * run.end_waste_fraction,
            run.running_mean,
            run.tokens_per_s,
            run.copied_bytes / 2**30,
        )
        for run in runs
    )
    return Table(
        name="waste",
        caption=(
            f"KV memory without a token, by workload and store: {simulated.model} in "
            f"{simulated.memory} on a simulated {simulated.machine}. real: the trace's "
            "lengths; short: a quarter of them; window: the same lengths with a model whose layers "
            "attend to the last 1,024 tokens. Dropped requests exceed the lane length."
        ),
        columns=(
            "workload",
            "store",
            "dropped requests",
            "wasted %, mean over time",
            "wasted %, at the end of requests",
            "mean running requests",
            "generated tokens/s",
            "copied GiB",
        ),
        rows=rows,
    )


def _chart(runs: list[StoreRun]) -> Chart:
    real = [run for run in runs if run.workload == "real"]
    words = {"paged": "paged", "contiguous_growing": "growing"}
    points = tuple(
        (words.get(r.store, f"contiguous {r.reserved_tokens}"), 100 * r.waste_fraction)
        for r in real
    )
    return Chart(
        name="waste",
        title="Allocated KV memory without a token, real lengths",
        x_label="store",
        y_label="%",
        lines={"wasted": points},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ContiguousRun:
    """A trace served from contiguous lanes.

    Attributes:
        max_tokens: length of every lane.
        num_dropped: number of longer requests, which such an allocator cannot serve.
        waste_fraction: waste over time.
        request_waste_fraction: over requests: slots without a token when each request ends.
        result: simulation of the requests that fit; None if no request fits.
    """

    max_tokens: int
    num_dropped: int
    waste_fraction: float
    request_waste_fraction: float
    result: SimResult | None


def longest_tokens(trace: Trace) -> int:
    """Length of a trace's longest request."""
    return max(request.tokens for request in trace.requests)


def run_contiguous(trace: Trace, config: SimConfig, max_tokens: int) -> ContiguousRun:
    """Serve a trace from contiguous lanes of `max_tokens` slots in the same bytes.

    Raises:
        ConfigError: the memory cannot hold one lane.
    """
    fitting = tuple(r for r in trace.requests if r.tokens <= max_tokens)
    num_dropped = len(trace.requests) - len(fitting)
    if not fitting:
        return ContiguousRun(
            max_tokens=max_tokens,
            num_dropped=num_dropped,
            waste_fraction=0.0,
            request_waste_fraction=0.0,
            result=None,
        )
    served = replace(trace, requests=fitting, num_dropped=trace.num_dropped + num_dropped)
    kv = replace(
        config.kv,
        store=STORE,
        store_tokens=max_tokens,
        prefix_cache=PrefixCacheConfig(enabled=False),
    )
    result = simulate(served, replace(config, kv=kv))
    return ContiguousRun(
        max_tokens=max_tokens,
        num_dropped=num_dropped,
        waste_fraction=result.gauges.waste_fraction,
        request_waste_fraction=request_waste(result, max_tokens),
        result=result,
    )


def request_waste(result: SimResult, unit_tokens: int) -> float:
    """Slots without a token when each request ends, over the slots allocated to it.

    Args:
        result: simulation result.
        unit_tokens: slots of a page or of a contiguous lane.
    """
    # KV of the last output token is never written
    lengths = [r.prompt_tokens + r.answer_tokens - 1 for r in result.records if r.finished]
    slots = sum(-(-length // unit_tokens) * unit_tokens for length in lengths)
    return 1 - sum(lengths) / slots if slots else 0.0
