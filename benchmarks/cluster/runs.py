"""One simulated run, as numbers."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from benchmarks.cluster.config import PACKAGED, ClusterBenchConfig
from quire.layout.sizes import format_size
from quire.scale.cluster.cluster import make_cluster
from quire.scale.cluster.config import ClusterConfig
from quire.scale.cluster.metrics import records_of, summarise_cluster
from quire.scale.routing.registry import RouterConfig, RouterName
from quire.sim.metrics import Numbers, cost_of_tokens, latencies
from quire.sim.run import SimConfig
from quire.sim.traces.base import Trace

ROUTERS: tuple[RouterName, ...] = ("kv_aware", "least_loaded", "round_robin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One simulated cluster.

    Attributes:
        numbers: metrics of the cluster, with the cost of tokens.
        routing_us: time of the router for each request, with its notes and KV events, measured.
        wall_s: time of the simulation, measured.
        tenants: latencies of each tenant.
    """

    numbers: Numbers
    routing_us: float
    wall_s: float
    tenants: Mapping[str, Numbers]

    def to_json(self) -> Mapping[str, object]:
        """Convert to JSON values."""
        return {"routing_us": self.routing_us, "wall_s": self.wall_s} | self.numbers


def run(
    trace: Trace,
    engine: SimConfig,
    cluster: ClusterConfig,
    router: RouterConfig,
    *,
    price_per_hour: float = 0.0,
) -> Run:
    """Simulate a cluster, and print its main numbers."""
    started_s = time.perf_counter()
    result = make_cluster(trace, engine, cluster, router).run()
    wall_s = time.perf_counter() - started_s
    numbers = summarise_cluster(result)
    numbers |= cost_of_tokens(numbers, price_per_hour, cluster.replicas)
    typer.echo(
        f"{cluster.replicas} x {router.name}: {numbers['requests']:,} requests, hit rate "
        f"{numbers['prefix_hit_fraction']:.3f}, TTFT p50 {numbers['ttft_p50_s']:.2f} s, p99 "
        f"{numbers['ttft_p99_s']:.2f} s ({wall_s:.1f} s)"
    )
    routing_us = 1e6 * result.routing_s
    tenants = {
        tenant: latencies([r for r in records_of(result) if r.finished and r.tenant == tenant])
        for tenant in trace.tenants
    }
    return Run(numbers=numbers, routing_us=routing_us, wall_s=wall_s, tenants=tenants)


def simulate_cluster(
    bench: ClusterBenchConfig, replicas: int, router: RouterName, trace: Trace, **options: Any
) -> Run:
    """Simulate a cluster of the benchmark's machines with a router's default options.

    Args:
        bench: configuration of the benchmark.
        replicas: number of replicas.
        router: name of the router.
        trace: the load.
        options: further options of `ClusterConfig`.
    """
    cluster = ClusterConfig(replicas=replicas, **options)
    config = RouterConfig(name=router)
    return run(trace, bench.engine(), cluster, config, price_per_hour=bench.price_per_hour)


def about(bench: ClusterBenchConfig) -> str:
    """Conditions of a simulation, for captions."""
    first = "" if bench.requests is None else f", first {bench.requests:,} requests"
    return (
        f"Trace {Path(bench.trace or PACKAGED).name}{first}, lengths x {bench.length_scale:g}; "
        f"{bench.model}, {bench.machine}, {format_size(bench.memory_bytes)} of KV memory for each "
        "replica"
    )
