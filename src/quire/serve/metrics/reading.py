"""Reads the values of all metrics of an engine, between two steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quire.engine.async_steps import AsyncStats
from quire.engine.core import Engine
from quire.engine.decode_graphs import GraphStats
from quire.engine.inspection.totals import overview, tenant_rows
from quire.serve.metrics.distribution import Distribution
from quire.serve.metrics.observer import EngineObserver

Labelled = dict[tuple[str, ...], float | int]
Buckets = tuple[list[tuple[str, float]], float]
"""Bounds with cumulative counts, and the sum of the values."""

MOST_TENANTS = 100
OTHER_TENANTS = "(more tenants)"


@dataclass(slots=True)
class Reading:
    """Values by the name of the metric.

    Attributes:
        numbers: values without labels.
        labelled: values by their labels.
        histograms: histograms.
    """

    numbers: dict[str, float | int] = field(default_factory=dict)
    labelled: dict[str, Labelled] = field(default_factory=dict)
    histograms: dict[str, Buckets] = field(default_factory=dict)


def read_engine(engine: Engine, observer: EngineObserver) -> Reading:
    """Read an engine between two steps, in its thread."""
    found = Reading()
    _read_totals(engine, observer, found)
    _read_launches(engine, found)
    _read_tenants(engine, found)
    found.labelled["requests_finished"] = _by_one_label(observer.finished)
    found.labelled["kv_transfer_bytes"] = _by_one_label(observer.transferred_bytes)
    for name, distribution in observer.distributions.items():
        found.histograms[name] = buckets_of(distribution)
    return found


def buckets_of(distribution: Distribution) -> Buckets:
    """A copy of a histogram's counts."""
    return distribution.cumulative(), distribution.total


def _read_totals(engine: Engine, observer: EngineObserver, found: Reading) -> None:
    totals, stats = overview(engine, None), engine.stats()
    memory, counters = totals["memory"], totals["counters"]
    states = ("requests", "cached", "border", "free")
    found.labelled["kv_bytes"] = {(state,): memory[f"{state}_bytes"] for state in states}
    levels = () if stats.tier is None else stats.tier.levels
    found.labelled["prefix_tier_damaged"] = {(one.name,): one.num_damaged for one in levels}
    found.labelled["prefix_tier_outages"] = {(one.name,): one.num_outages for one in levels}
    found.numbers |= {
        "engine_up": 1,
        "requests_running": totals["num_running"],
        "requests_waiting": totals["num_waiting"],
        "kv_usage_ratio": memory["requests_bytes"] / memory["total_bytes"],
        "kv_memory_bytes": memory["total_bytes"],
        "kv_peak_bytes": memory["peak_bytes"],
        "swap_bytes": stats.host_bytes,
        "kv_offloaded_bytes": stats.offloaded_bytes,
        "activation_bytes": stats.activation_bytes,
        "weight_bytes": stats.weight_bytes,
        "host_weight_bytes": stats.host_weight_bytes,
        "prompt_tokens": observer.prompt_tokens,
        "generation_tokens": counters["generated_tokens"],
        "processed_tokens": counters["processed_tokens"],
        "steps": counters["steps"],
        "preemptions": counters["preemptions"],
        "swaps": counters["swaps"],
        "evictions": counters["evictions"],
        "evicted_tokens": counters["evicted_tokens"],
        "prefix_cache_queries": counters["queried_tokens"],
        "prefix_cache_hits": counters["cached_tokens"],
        "prefix_tier_loaded_tokens": 0 if stats.tier is None else stats.tier.loaded_tokens,
        "offload_recomputed_tokens": stats.recomputed_tokens,
        "offload_cpu_attended_tokens": stats.cpu_attended_tokens,
        "weight_transfer_bytes": stats.offloaded_weight_bytes,
    }


def _read_launches(engine: Engine, found: Reading) -> None:
    """Counters of asynchronous scheduling and CUDA graphs; 0 in an engine without them."""
    stats = engine.stats()
    steps, graphs = stats.async_scheduling or AsyncStats(), stats.graphs or GraphStats()
    found.labelled["async_waits"] = _by_one_label(steps.waited)
    found.numbers |= {
        "async_steps": steps.ahead,
        "async_discarded_rows": steps.discarded,
        "graph_replays": graphs.replayed,
        "graph_captures": graphs.captures,
    }


_OF_TENANT = {
    "tenant_kv_bytes": "used_bytes",
    "tenant_requests_running": "num_running",
    "tenant_requests_waiting": "num_waiting",
    "tenant_prompt_tokens": "prompt_tokens",
    "tenant_generation_tokens": "output_tokens",
    "tenant_preemptions": "num_preemptions",
}


def _read_tenants(engine: Engine, found: Reading) -> None:
    """Values of the first tenants; the others are summed, to bound the number of time series."""
    rows = tenant_rows(engine, None)
    for metric, column in _OF_TENANT.items():
        values: Labelled = {
            (row["tenant"],): float(row[column] or 0) for row in rows[:MOST_TENANTS]
        }
        if len(rows) > MOST_TENANTS:
            rest: Sequence[Mapping[str, float]] = rows[MOST_TENANTS:]
            values[(OTHER_TENANTS,)] = float(sum(row[column] or 0 for row in rest))
        found.labelled[metric] = values


def _by_one_label(counts: Mapping[str, int]) -> Labelled:
    return {(label,): float(count) for label, count in counts.items()}
