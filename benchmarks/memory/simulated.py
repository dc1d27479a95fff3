"""Parts of the memory benchmark that simulate recorded requests: scheduler and memory are real.

waste        fraction of the allocated KV memory without a token, by store and workload
watermarks   fraction of the KV memory up to which new requests are admitted
reuse        prefix cache hits in a trace of shared prefixes, by KV memory size
fairness     two tenants of equal weight; the large one sends 20 times as many requests
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.common.result import Cell, Chart, Numbers, PartResult
from benchmarks.common.tables import table_of
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.errors import ConfigError
from quire.layout.kv_format import stored_codec
from quire.layout.model import ModelSpec
from quire.sim.engine import SimResult, folded_layout, jain_index
from quire.sim.machine import MachineConfig, MachineName
from quire.sim.metrics import by_tenant, percentiles, summarise
from quire.sim.models import model_shape
from quire.sim.records import RequestRecord
from quire.sim.run import SimConfig, make_timer, simulate
from quire.sim.traces.base import Trace, TraceOptions
from quire.sim.traces.loading import load_trace

AZURE, MOONCAKE = "azure_conversation.csv.gz", "mooncake_conversation.jsonl.gz"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedConfig:
    """Configuration of simulated traces.

    Attributes:
        trace: file with lengths and times of conversations; "": the Azure trace shipped with Quire.
        prefix_trace: file with the shared prefixes of prompts; "": the start of Mooncake's
            conversation trace, shipped with Quire.
        requests: number of first requests of each trace; None: all.
        model: a model shape of `quire simulate`.
        machine: machine whose rates time the steps.
        memory: KV memory.
    """

    trace: str = ""
    prefix_trace: str = ""
    requests: int | None = None
    model: str = "llama-3.1-8b"
    machine: MachineName = "a100"
    memory: int | str = "16GiB"

    def conversations(
        self, options: TraceOptions | None = None, requests: int | None = None
    ) -> Trace:
        """The first requests of the trace of lengths and times.

        Raises:
            TraceError: the file cannot be read.
        """
        trace = self._load(self.trace, AZURE, options)
        return replace(trace, requests=trace.requests[:requests])

    def prefixes(self) -> Trace:
        """The trace of shared prefixes.

        Raises:
            TraceError: the file cannot be read.
        """
        return self._load(self.prefix_trace, MOONCAKE, None)

    def _load(self, named: str, packaged: str, options: TraceOptions | None) -> Trace:
        path = Path(named) if named else Path(str(resources.files("quire") / "assets" / packaged))
        return load_trace(path, replace(options or TraceOptions(), requests=self.requests))

    def run_config(self) -> SimConfig:
        """Simulation config with the engine's defaults."""
        return SimConfig(
            model=model_shape(self.model),
            rates=MachineConfig(name=self.machine).rates(),
            kv=KVConfig(memory=self.memory),
        )


# ---- waste ---------------------------------------------------------------------------------------
#
# Every store serves the same requests in the same bytes. Waste is averaged over time: slots without
# a token, over slots allocated to running sequences. In the baseline `contiguous_max`, a static
# slab, every sequence has a row of one maximum length for as long as it runs. It is computed with
# the paged engine, which admits as many sequences as rows fit into the bytes: each slot of a row
# that holds no token is waste.

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

    @property
    def label(self) -> str:
        """Store, with the length of its rows."""
        return self.store if self.reserved is None else f"{self.store} {self.reserved_tokens}"


def measure_waste_of_stores(config: WasteConfig, simulated: SimulatedConfig) -> Iterator[StoreRun]:
    """Yield a run for each workload and store."""
    on, fewer = simulated.run_config(), config.other_requests
    real = simulated.conversations()
    short = simulated.conversations(TraceOptions(length_scale=config.short_scale), fewer)
    for workload, trace in (("real", real), ("short", short)):
        yield _store_run(workload, trace, on)
        own = max(request.tokens for request in trace.requests)
        for reserved, tokens in ({str(n): n for n in config.max_tokens} | {OWN: own}).items():
            yield _store_run(workload, trace, on, reserved=reserved, reserved_tokens=tokens)
    windowed = replace(on, model=ModelSpec.from_config(WINDOWED))
    yield _store_run("window", replace(real, requests=real.requests[:fewer]), windowed)


def _store_run(
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
    config = replace(on, kv=replace(on.kv, prefix_cache=PrefixCacheConfig(enabled=False)))
    row_bytes = 0
    if reserved_tokens is not None:
        config, row_bytes = _of_slab_rows(config, reserved_tokens)
    result = simulate(replace(trace, requests=served), config)
    gauges = result.gauges
    used_byte_s = gauges.allocated_byte_s - gauges.wasted_byte_s
    slab_waste = 1 - used_byte_s / (gauges.running_s * row_bytes) if row_bytes else None
    generated = sum(r.answer_tokens for r in result.records if r.finished)
    return StoreRun(
        workload=workload,
        store="paged" if reserved is None else STORE,
        reserved=reserved,
        reserved_tokens=reserved_tokens,
        dropped=len(trace.requests) - len(served),
        waste_fraction=gauges.waste_fraction if slab_waste is None else slab_waste,
        # pages outside a window are freed before the end
        end_waste_fraction=None
        if workload == "window"
        else request_waste(result, reserved_tokens or config.kv.page_tokens),
        running_mean=gauges.mean("running"),
        tokens_per_s=generated / gauges.time_s,
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


def run_waste(config: WasteConfig, simulated: SimulatedConfig) -> PartResult:
    """Run the part."""
    runs = list(measure_waste_of_stores(config, simulated))
    table = table_of(
        "waste",
        f"KV memory without a token, by workload and store: {simulated.model} in "
        f"{simulated.memory} on a simulated {simulated.machine}. real: the trace's "
        "lengths; short: a quarter of them; window: the same lengths with a model whose layers "
        "attend to the last 1,024 tokens. Dropped requests exceed the lane length.",
        runs,
        {
            "workload": lambda run: run.workload,
            "store": lambda run: run.label,
            "dropped requests": lambda run: run.dropped,
            "wasted %, mean over time": lambda run: 100 * run.waste_fraction,
            "wasted %, at the end of requests": lambda run: (
                None if run.end_waste_fraction is None else 100 * run.end_waste_fraction
            ),
            "mean running requests": lambda run: run.running_mean,
            "generated tokens/s": lambda run: run.tokens_per_s,
        },
    )
    chart = Chart(
        name="waste",
        title="Allocated KV memory without a token, real lengths",
        x_label="store",
        y_label="%",
        lines={
            "wasted": tuple(
                (run.label, 100 * run.waste_fraction) for run in runs if run.workload == "real"
            )
        },
    )
    raw = {"runs": [asdict(run) for run in runs]}
    return PartResult(claims=waste_claims(runs), tables=(table,), charts=(chart,), raw=raw)


def waste_claims(runs: list[StoreRun]) -> Numbers:
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


# ---- watermarks ----------------------------------------------------------------------------------
#
# More requests arrive than the memory holds, so the watermark decides how many run at once.
# Admission is optimistic: outputs grow after admission, into the memory that the low watermark
# keeps free. The low watermark runs alone: no request is admitted above it. It also runs with a
# high watermark two points above it, above which a request is preempted.

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
        numbers: as `quire simulate` prints them, and percentiles from admission to the end.
    """

    per_cent: int
    preempts: bool
    numbers: Numbers


def measure_watermarks(
    config: WatermarkConfig, simulated: SimulatedConfig
) -> Iterator[WatermarkRun]:
    """Yield a run for each low watermark, without and with a high watermark."""
    options = TraceOptions(time_scale=config.time_scale)
    trace, on = simulated.conversations(options, config.requests), simulated.run_config()
    kv = replace(on.kv, memory=config.memory, swap_space=0)
    for preempts in (False, True):
        for per_cent in config.per_cents:
            low = per_cent / 100
            schedule = replace(
                on.schedule,
                max_num_seqs=config.max_num_seqs,
                admission="optimistic",
                low_watermark=low,
                high_watermark=min(1.0, round(low + _ABOVE, 4)) if preempts else 1.0,
            )
            result = simulate(trace, replace(on, kv=kv, schedule=schedule))
            finished = [r for r in result.records if r.finished]
            service = percentiles("service", (r.finish_s - r.admitted_s for r in finished))
            yield WatermarkRun(
                per_cent=per_cent, preempts=preempts, numbers=summarise(result) | service
            )


def run_watermarks(config: WatermarkConfig, simulated: SimulatedConfig) -> PartResult:
    """Run the part."""
    runs = list(measure_watermarks(config, simulated))
    table = table_of(
        "watermarks",
        f"Low watermark: {simulated.model} in {config.memory} of KV on a simulated "
        f"{simulated.machine}, requests of the Azure trace at {1 / config.time_scale:g} times "
        "its rate, optimistic admission, preempted requests recompute. Service: from admission "
        "to the end; end to end: with the queue time.",
        runs,
        {
            "watermarks": lambda run: (
                f"{run.per_cent} %" + (f", high {run.per_cent + 2} %" * run.preempts)
            ),
            "largest batch": lambda run: int(run.numbers["running_peak"]),
            "mean batch": lambda run: run.numbers["running_mean"],
            "generated tokens/s": lambda run: run.numbers["generated_tokens_per_s"],
            "preemptions/min": lambda run: run.numbers["preemptions_per_minute"],
            "recomputed %": lambda run: 100 * run.numbers["recomputed_fraction"],
            "p99 time per token ms": lambda run: (  # None if every output had one token
                1e3 * run.numbers["tpot_p99_s"] if "tpot_p99_s" in run.numbers else None
            ),
            "p99 service s": lambda run: run.numbers.get("service_p99_s"),
            "p99 end to end s": lambda run: run.numbers.get("e2e_p99_s"),
        },
    )
    chart = Chart(
        name="watermarks",
        title="Preemptions by low watermark",
        x_label="low watermark, % of the KV memory",
        y_label="preemptions per minute",
        lines={
            words: tuple(
                (run.per_cent, run.numbers["preemptions_per_minute"])
                for run in runs
                if run.preempts == preempts
            )
            for words, preempts in (("low watermark only", False), ("with a high watermark", True))
        },
    )
    raw = {"runs": [asdict(run) for run in runs]}
    return PartResult(claims=watermark_claims(runs), tables=(table,), charts=(chart,), raw=raw)


def watermark_claims(runs: list[WatermarkRun]) -> Numbers:
    """Best watermark by throughput, and its throughput over that at 98 %.

    Among throughputs that differ by at most 0.1 %, the shortest p99 of token times decides.
    """
    plain = {run.per_cent: run.numbers for run in runs if not run.preempts}
    rates = {per_cent: numbers["generated_tokens_per_s"] for per_cent, numbers in plain.items()}
    near = [per_cent for per_cent, rate in rates.items() if rate >= 0.999 * max(rates.values())]
    best = min(near, key=lambda per_cent: (plain[per_cent].get("tpot_p99_s", 0.0), per_cent))
    return {"watermark_best": best, "throughput_best_over_98": rates[best] / rates[COMPARED]}


# ---- shared prefixes -----------------------------------------------------------------------------

UNBOUNDED = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseConfig:
    """Configuration of the comparison.

    Attributes:
        memories: sizes of bounded KV memories; an unbounded memory is always compared too.
        requests: most requests of the trace; None: all.
        page_tokens: slots in a page. The trace has blocks of 512 tokens; smaller pages give the
            same hits and cost the simulator up to 32 times as many blocks.
    """

    requests: int | None = None
    page_tokens: int = 512
    memories: tuple[str, ...] = ("64GiB", "256GiB", "1024GiB")


def run_reuse(config: ReuseConfig, simulated: SimulatedConfig) -> PartResult:
    """Run the part: one run of the trace for each size."""
    trace, on = simulated.prefixes(), simulated.run_config()
    trace = replace(trace, requests=trace.requests[: config.requests])
    kv = replace(on.kv, page_tokens=config.page_tokens)
    found = {
        size: summarise(simulate(trace, replace(on, kv=replace(kv, memory=size))))
        for size in (*config.memories, UNBOUNDED)
    }
    unbounded = found[UNBOUNDED]
    claims: Numbers = {
        "mooncake_hit_fraction_unbounded": unbounded["prefix_hit_fraction"],
        "mooncake_reusable_token_fraction": unbounded["reusable_token_fraction"],
        "mooncake_reusable_block_fraction": unbounded["reusable_block_fraction"],
    }
    for size in config.memories:
        claims[f"mooncake_hit_fraction_{size}"] = found[size]["prefix_hit_fraction"]
    names = {size: "unbounded" if size == UNBOUNDED else size for size in found}
    table = table_of(
        "reuse",
        f"Cached prompt tokens, {trace.name}, {simulated.model} on a simulated "
        f"{simulated.machine}, pages of {config.page_tokens} tokens. The trace repeats "
        f"{unbounded['reusable_token_fraction']:.2%} of its prompt tokens as prefixes, and "
        f"{unbounded['reusable_block_fraction']:.2%} of its blocks of 512 tokens.",
        found,
        {
            "KV memory": lambda size: names[size],
            "hit %": lambda size: 100 * found[size]["prefix_hit_fraction"],
            "tokens hit": lambda size: found[size]["cached_tokens"],
            "first token p50 s": lambda size: found[size].get("ttft_p50_s"),
            "first token p99 s": lambda size: found[size].get("ttft_p99_s"),
            "preemptions": lambda size: found[size]["preemptions"],
            "completed": lambda size: found[size]["finished"],
        },
    )
    chart = Chart(
        name="reuse",
        title="Prompt tokens found in the prefix cache",
        x_label="KV memory",
        y_label="%",
        lines={
            "hits": tuple(
                (names[size], 100 * of["prefix_hit_fraction"]) for size, of in found.items()
            )
        },
    )
    return PartResult(claims=claims, tables=(table,), charts=(chart,), raw=found)


# ---- fairness ------------------------------------------------------------------------------------
#
# `flood` keeps the trace's arrival times: requests arrive faster than they can be served, most of
# them from the large tenant. The small tenant's queue time is compared with the same requests alone
# on the machine. In `drain` all requests arrive at the start, so that both tenants have waiting
# requests: until the small tenant's queue is empty, both should be served equally.

LARGE, SMALL = "large", "small"


@dataclass(frozen=True, slots=True, kw_only=True)
class FairnessConfig:
    """Configuration of the part.

    Attributes:
        times_more: requests of the large tenant per request of the small one.
        time_scale: factor on the times between arrivals.
        requests: most requests of the trace.
    """

    times_more: int = 20
    time_scale: float = 0.5
    requests: int = 8_000


@dataclass(frozen=True, slots=True, kw_only=True)
class FairnessRuns:
    """Results of the three runs.

    Attributes:
        alone, flood, drain: the small tenant alone; both at the trace's times; both at the start.
        step_s: time of the largest possible step; a new request may wait for one.
        prefill_s: prefill time of the small tenant's mean prompt, alone.
    """

    alone: SimResult
    flood: SimResult
    drain: SimResult
    step_s: float
    prefill_s: float


def measure_fairness(config: FairnessConfig, simulated: SimulatedConfig) -> FairnessRuns:
    """Run the three simulations.

    Raises:
        ConfigError: the trace is too short to contain a request of the small tenant.
    """
    shares = f"share:{LARGE}={config.times_more},{SMALL}=1"
    on = simulated.run_config()
    paced, at_once = (
        simulated.conversations(TraceOptions(tenants=shares, time_scale=scale), config.requests)
        for scale in (config.time_scale, 0.0)
    )
    small = tuple(r for r in paced.requests if r.tenant == SMALL)
    if not small:
        raise ConfigError(
            f"expected at least one request of the small tenant, which sends one of "
            f"{config.times_more + 1}, got none in {len(paced.requests)} requests: use a longer "
            "trace, or omit the part fairness"
        )

    def prefill_s(tokens: int) -> float:
        return make_timer(on).seconds(np.array([tokens]), np.array([0]), 1)

    return FairnessRuns(
        alone=simulate(replace(paced, requests=small), on),
        flood=simulate(paced, on),
        drain=simulate(at_once, on),
        step_s=prefill_s(on.schedule.max_num_batched_tokens),
        prefill_s=prefill_s(round(float(np.mean([r.prompt_tokens for r in small])))),
    )


def run_fairness(config: FairnessConfig, simulated: SimulatedConfig) -> PartResult:
    """Run the part."""
    runs = measure_fairness(config, simulated)
    results = {"alone": runs.alone, "flood": runs.flood, "drain": runs.drain}
    rows = [
        (name, tenant, records)
        for name, result in results.items()
        for tenant in (SMALL, LARGE)
        if (records := _records(result, tenant))
    ]
    found = fairness_claims(runs)

    def queue(records: list[RequestRecord], percentile: str) -> Cell:
        return percentiles("queue", (r.queue_s for r in records))[f"queue_{percentile}_s"]

    table = table_of(
        "fairness",
        f"Two tenants of equal weight, one sending {config.times_more} times as much: "
        f"{simulated.model} in {simulated.memory} on a simulated {simulated.machine}. Jain "
        f"index of the tokens served while both wait: {found.get('fairness_jain', 0):.3f}.",
        rows,
        {
            "run": lambda row: row[0],
            "tenant": lambda row: row[1],
            "requests": lambda row: len(row[2]),
            "queue p50 s": lambda row: queue(row[2], "p50"),
            "queue p99 s": lambda row: queue(row[2], "p99"),
            "first token p99 s": lambda row: percentiles("ttft", (r.ttft_s for r in row[2]))[
                "ttft_p99_s"
            ],
        },
    )
    raw = {name: by_tenant(result) for name, result in results.items()}
    return PartResult(claims=found, tables=(table,), raw=raw)


def _records(result: SimResult, tenant: str) -> list[RequestRecord]:
    return [r for r in result.records if r.tenant == tenant and r.finished]


def fairness_claims(runs: FairnessRuns) -> Numbers:
    """Queue time of the small tenant over its limit, and the Jain index of served tokens.

    The small tenant's p99 queue time should not exceed the larger of two limits: twice its queue
    time alone, and one step plus its own prefill.
    """
    alone_s, flood_s = (
        percentiles("queue", (r.queue_s for r in _records(result, SMALL)))["queue_p99_s"]
        for result in (runs.alone, runs.flood)
    )
    limit_s = max(2 * alone_s, runs.step_s + runs.prefill_s)
    index = jain_index({tenant: float(n) for tenant, n in runs.drain.served.tokens.items()})
    found: Numbers = {"small_tenant_p99_queue_over_limit": flood_s / limit_s}
    return found if index is None else found | {"fairness_jain": index}
