"""Part `waste`: fraction of the allocated KV memory without a token, by store and workload.

Every store serves the same requests in the same bytes, with the engine's scheduler. Waste is
averaged over time: slots without a token, over slots allocated to running sequences.

In the baseline `contiguous_max`, a static slab, every sequence has a row of one maximum length for
as long as it runs. It is computed with the paged engine, which admits as many sequences as rows fit
into the bytes: each slot of a row that holds no token is waste. Bytes, arrival order and scheduler
are those of the paged run. Nothing is shared: a row belongs to one sequence.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Final

from benchmarks.common.result import Chart, Numbers, PartResult, Table
from benchmarks.memory.simulated import SimulatedConfig
from quire.config.kv_config import PrefixCacheConfig
from quire.errors import ConfigError
from quire.layout.codec_refusals import stored_codec
from quire.layout.model import ModelSpec
from quire.sim.engine import SimResult, folded_layout
from quire.sim.run import SimConfig, simulate
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
        max_tokens: lengths of the slab's rows, in addition to the trace's longest request.
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
        reserved: length of a row of the slab, in tokens or OWN; None: no slab.
        reserved_tokens: the same length as a number.
        dropped: number of requests that exceed this length.
        waste_fraction: waste over time.
        end_waste_fraction: waste over requests at their end; None with windows.
        running_mean: mean number of running sequences over time.
        tokens_per_s: generated tokens per second.
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
        yield _run(workload, trace, on)
        lanes = {str(tokens): tokens for tokens in config.max_tokens} | {OWN: longest_tokens(trace)}
        for reserved, tokens in lanes.items():
            yield _run(workload, trace, on, reserved=reserved, reserved_tokens=tokens)
    yield _run("window", fewer, replace(on, model=ModelSpec.from_config(WINDOWED)))


def _run(
    workload: str,
    trace: Trace,
    on: SimConfig,
    *,
    reserved: str | None = None,
    reserved_tokens: int | None = None,
) -> StoreRun:
    served = tuple(
        r for r in trace.requests if reserved_tokens is None or r.tokens <= reserved_tokens
    )
    kv = replace(on.kv, prefix_cache=PrefixCacheConfig(enabled=False))
    config, row_bytes = replace(on, kv=kv), 0
    if reserved_tokens is not None:
        config, row_bytes = _of_slab_rows(config, reserved_tokens)
    result = simulate(replace(trace, requests=served), config)
    generated = sum(r.answer_tokens for r in result.records if r.finished)
    return StoreRun(
        workload=workload,
        store="paged" if reserved is None else STORE,
        reserved=reserved,
        reserved_tokens=reserved_tokens,
        dropped=len(trace.requests) - len(served),
        waste_fraction=_waste_of_rows(result, row_bytes),
        # pages outside a window are freed before the end
        end_waste_fraction=None
        if workload == "window"
        else request_waste(result, reserved_tokens or kv.page_tokens),
        running_mean=result.gauges.mean("running"),
        tokens_per_s=generated / result.gauges.time_s,
    )


def _of_slab_rows(config: SimConfig, row_tokens: int) -> tuple[SimConfig, int]:
    """Limit the sequences to the rows of `row_tokens` that the KV memory has; return their bytes.

    Raises:
        ConfigError: the KV memory cannot hold one row.
    """
    layout = folded_layout(
        config.model,
        codec=stored_codec(config.kv.codec, config.dtype),
        page_tokens=config.kv.page_tokens,
    )
    row_bytes = sum(
        group.page_class.pages_for(row_tokens) * group.page_class.page_bytes * group.num_lanes
        for group in layout.groups
    )
    assert config.kv.memory is not None, "the slab has the size of the KV memory"
    # sequences are admitted up to the watermark in every store
    num_rows = int(config.kv.memory * config.schedule.low_watermark) // row_bytes
    if num_rows < 1:
        raise ConfigError(
            f"a KV memory of {config.kv.memory:,} B cannot hold a row of {row_tokens} tokens"
        )
    num_rows = min(num_rows, config.schedule.max_num_seqs)
    return replace(config, schedule=replace(config.schedule, max_num_seqs=num_rows)), row_bytes


def _waste_of_rows(result: SimResult, row_bytes: int) -> float:
    """Waste over time, in rows of `row_bytes` for each running sequence; 0: in its pages."""
    gauges = result.gauges
    if not row_bytes:
        return gauges.waste_fraction
    reserved_byte_s = gauges.running_s * row_bytes
    return 1 - (gauges.allocated_byte_s - gauges.wasted_byte_s) / reserved_byte_s


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
    """Fractions of the workload `real`, and of the window model."""
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
        ),
        rows=rows,
    )


def _chart(runs: list[StoreRun]) -> Chart:
    real = [run for run in runs if run.workload == "real"]
    points = tuple(
        (
            "paged" if r.reserved is None else f"contiguous {r.reserved_tokens}",
            100 * r.waste_fraction,
        )
        for r in real
    )
    return Chart(
        name="waste",
        title="Allocated KV memory without a token, real lengths",
        x_label="store",
        y_label="%",
        lines={"wasted": points},
    )


def longest_tokens(trace: Trace) -> int:
    """Length of a trace's longest request."""
    return max(request.tokens for request in trace.requests)


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
