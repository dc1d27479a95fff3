"""Simulations of the benchmark, some at the same time, and their numbers."""

import multiprocessing
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from benchmarks.cluster.config import PACKAGED, ClusterBenchConfig
from benchmarks.cluster.workload import at_load, for_replicas, one_machine
from quire.layout.sizes import format_size
from quire.scale.cluster.cluster import make_cluster
from quire.scale.cluster.config import ClusterConfig
from quire.scale.cluster.metrics import records_of, summarise_cluster
from quire.scale.routing.registry import RouterConfig, RouterName
from quire.sim.metrics import Numbers, cost_of_tokens, latencies, summarise
from quire.sim.run import simulate

ROUTERS: tuple[RouterName, ...] = ("kv_aware", "least_loaded", "round_robin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One simulation.

    Attributes:
        bench: configuration of the benchmark.
        load: factor on the arrival rate.
        router: name of the router; None: one machine with everything of all replicas.
        replicas: number of replicas, with as many users each; None: those of the recorded trace.
        options: further options of `ClusterConfig`.
        tenants: see `TraceOptions.tenants`.
    """

    bench: ClusterBenchConfig
    load: float
    router: RouterName | None
    replicas: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    tenants: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The result of a job.

    Attributes:
        numbers: metrics, with the cost of tokens.
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


def run_all(jobs: Sequence[Job], processes: int) -> list[Run]:
    """Run simulations and print the main numbers of each when it ends.

    Args:
        jobs: the simulations.
        processes: number of simulations that run at the same time.
    """
    if processes == 1:
        return [_shown(job, run(job)) for job in jobs]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
        return [_shown(job, done) for job, done in zip(jobs, pool.map(run, jobs), strict=True)]


def run(job: Job) -> Run:
    """Run one simulation."""
    bench = job.bench
    replicas = job.replicas or bench.replicas
    load = for_replicas(bench.load(job.tenants), replicas, bench.replicas)
    trace = at_load(load, job.load)
    started_s = time.perf_counter()
    if job.router is None:
        pool = summarise(simulate(trace, one_machine(bench)))
        return Run(numbers=pool, routing_us=0.0, wall_s=time.perf_counter() - started_s, tenants={})
    cluster = ClusterConfig(replicas=replicas, **job.options)
    made = make_cluster(trace, bench.engine(), cluster, RouterConfig(name=job.router))
    result = made.run()
    wall_s = time.perf_counter() - started_s
    numbers = summarise_cluster(result)
    tenants = {
        tenant: latencies([r for r in records_of(result) if r.finished and r.tenant == tenant])
        for tenant in trace.tenants
    }
    return Run(
        numbers=numbers | cost_of_tokens(numbers, bench.price_per_hour, replicas),
        routing_us=1e6 * result.routing_s,
        wall_s=wall_s,
        tenants=tenants,
    )


def _shown(job: Job, done: Run) -> Run:
    numbers = done.numbers
    typer.echo(
        f"{job.replicas or job.bench.replicas} x {job.router or 'one machine'}: "
        f"{numbers['requests']:,} requests, hit rate {numbers['prefix_hit_fraction']:.3f}, "
        f"TTFT p50 {numbers['ttft_p50_s']:.2f} s, p99 {numbers['ttft_p99_s']:.2f} s "
        f"({done.wall_s:.1f} s)"
    )
    return done


def about(bench: ClusterBenchConfig) -> str:
    """Conditions of a simulation, for captions."""
    first = "" if bench.requests is None else f", first {bench.requests:,} requests"
    return (
        f"Trace {Path(bench.trace or PACKAGED).name}{first}, lengths x {bench.length_scale:g}; "
        f"{bench.model}, {bench.machine}, {format_size(bench.memory_bytes)} of KV memory for each "
        "replica"
    )
