"""Part `fairness`: two tenants of equal weight; the large one sends 20 times as many requests.

`flood` keeps the trace's arrival times: requests arrive faster than they can be served, most of
them from the large tenant. The small tenant's queue time is compared with the same requests alone
on the machine. In `drain` all requests arrive at the start, so that both tenants have waiting
requests: until the small tenant's queue is empty, both should be served equally.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.common.result import Numbers, PartResult, Table
from benchmarks.memory.simulated import SimulatedConfig
from quire.errors import ConfigError
from quire.sim.engine import SimResult, jain_index
from quire.sim.metrics import by_tenant, percentiles
from quire.sim.records import RequestRecord
from quire.sim.run import SimConfig, make_timer, simulate
from quire.sim.traces.base import Trace, TraceOptions

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
    paced = _first(simulated, TraceOptions(tenants=shares, time_scale=config.time_scale), config)
    at_once = _first(simulated, TraceOptions(tenants=shares, time_scale=0.0), config)
    small = tuple(r for r in paced.requests if r.tenant == SMALL)
    if not small:
        raise ConfigError(
            f"expected at least one request of the small tenant, which sends one of "
            f"{config.times_more + 1}, got none in {len(paced.requests)} requests: use a longer "
            "trace, or omit the part fairness"
        )
    prompt = round(float(np.mean([r.prompt_tokens for r in small])))
    return FairnessRuns(
        alone=simulate(replace(paced, requests=small), on),
        flood=simulate(paced, on),
        drain=simulate(at_once, on),
        step_s=_prefill_s(on, on.schedule.max_num_batched_tokens),
        prefill_s=_prefill_s(on, prompt),
    )


def _first(simulated: SimulatedConfig, options: TraceOptions, config: FairnessConfig) -> Trace:
    trace = simulated.conversations(options)
    return replace(trace, requests=trace.requests[: config.requests])


def _prefill_s(on: SimConfig, tokens: int) -> float:
    return make_timer(on).seconds(np.array([tokens]), np.array([0]), 1)


def run_fairness(config: FairnessConfig, simulated: SimulatedConfig) -> PartResult:
    """Run the part."""
    runs = measure_fairness(config, simulated)
    results = {"alone": runs.alone, "flood": runs.flood, "drain": runs.drain}
    rows = tuple(
        (name, tenant, *_cells(_records(result, tenant)))
        for name, result in results.items()
        for tenant in (SMALL, LARGE)
        if _records(result, tenant)
    )
    found = claims(runs)
    table = Table(
        name="fairness",
        caption=(
            f"Two tenants of equal weight, one sending {config.times_more} times as much: "
            f"{simulated.model} in {simulated.memory} on a simulated {simulated.machine}. Jain "
            f"index of the tokens served while both wait: {found.get('fairness_jain', 0):.3f}."
        ),
        columns=("run", "tenant", "requests", "queue p50 s", "queue p99 s", "first token p99 s"),
        rows=rows,
    )
    raw = {name: by_tenant(result) for name, result in results.items()}
    return PartResult(claims=found, tables=(table,), raw=raw)


def _records(result: SimResult, tenant: str) -> list[RequestRecord]:
    return [r for r in result.records if r.tenant == tenant and r.finished]


def _cells(records: Sequence[RequestRecord]) -> tuple[int | float | None, ...]:
    queue = percentiles("queue", (r.queue_s for r in records))
    first = percentiles("ttft", (r.ttft_s for r in records))
    return len(records), queue["queue_p50_s"], queue["queue_p99_s"], first["ttft_p99_s"]


def claims(runs: FairnessRuns) -> Numbers:
    """Three measures of fairness, and the values that they are computed from.

    The small tenant's p99 queue time should not exceed the larger of two limits: twice its queue
    time alone, and one step plus its own prefill.
    """
    alone_s, flood_s = (
        percentiles("queue", (r.queue_s for r in _records(result, SMALL)))["queue_p99_s"]
        for result in (runs.alone, runs.flood)
    )
    limit_s = max(2 * alone_s, runs.step_s + runs.prefill_s)
    served = {tenant: float(tokens) for tenant, tokens in runs.drain.served.tokens.items()}
    index = jain_index(served)
    found: Numbers = {
        "small_tenant_p99_queue_s": flood_s,
        "small_tenant_p99_queue_alone_s": alone_s,
        "small_tenant_p99_queue_limit_s": limit_s,
        "small_tenant_p99_queue_over_limit": flood_s / limit_s,
    }
    if alone_s:
        found["small_tenant_p99_queue_ratio"] = flood_s / alone_s
    return found if index is None else found | {"fairness_jain": index}
