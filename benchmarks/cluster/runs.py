"""Simulations of the cluster benchmark: configuration, load, runs and their numbers."""

import math
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import typer

from quire.config.kv_config import KVConfig
from quire.errors import ConfigError
from quire.layout.sizes import format_size, parse_size
from quire.scale.cluster.cluster import make_cluster
from quire.scale.cluster.metrics import records_of, summarise_cluster
from quire.scale.config import ClusterConfig
from quire.scale.routing.policies import RouterConfig, RouterName
from quire.sim.machine import MachineConfig, MachineName, Rates
from quire.sim.metrics import Numbers, cost_of_tokens, latencies, summarise
from quire.sim.models import model_shape
from quire.sim.run import SimConfig, simulate
from quire.sim.traces.base import Trace, TraceOptions, TraceRequest
from quire.sim.traces.loading import load_trace, with_copies

PACKAGED = "mooncake_conversation.jsonl.gz"
BLOCK_TOKENS = 512  # of Mooncake's traces
MODERATE, SATURATED = "moderate", "saturated"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterBenchConfig:
    """Configuration of the benchmark.

    Attributes:
        trace: file in Mooncake's format; "": the first 2,000 requests of Mooncake's conversation
            trace, shipped with Quire.
        requests: number of first requests; None: all.
        model: a model shape of `quire simulate`.
        machine: machine of each replica.
        length_scale: factor on the lengths of prompts and outputs. The KV memory, the blocks and
            the times between arrivals are scaled too, so a cache holds as many conversations.
        memory: KV memory of each replica for unscaled lengths.
        replicas: replicas that serve the trace as it was recorded.
        loads: factors on the arrival rate by name.
        sizes: numbers of replicas; the load grows with them.
        scale_requests: number of first requests in the runs with these sizes; None: all.
        intervals_s: times between load reports.
        price_per_hour: price of a replica's machine.
        processes: simulations that run at the same time.
    """

    trace: str = ""
    requests: int | None = None
    model: str = "llama-3.1-8b"
    machine: MachineName = "a100"
    length_scale: float = 0.125
    memory: str = "40GiB"
    replicas: int = 8
    loads: tuple[tuple[str, float], ...] = ((MODERATE, 1.2), (SATURATED, 2.2))
    sizes: tuple[int, ...] = (1, 4, 16, 64, 256)
    scale_requests: int | None = 300
    intervals_s: tuple[float, ...] = (0.0, 0.1, 1.0, 5.0)
    price_per_hour: float = 2.0
    processes: int = 1

    def load(self, tenants: str = "") -> Trace:
        """The scaled trace.

        Args:
            tenants: see `TraceOptions.tenants`.

        Raises:
            TraceError: the file cannot be read.
        """
        packaged = Path(str(resources.files("quire") / "assets" / PACKAGED))
        options = TraceOptions(
            requests=self.requests,
            length_scale=self.length_scale,
            time_scale=self.length_scale,
            tenants=tenants,
        )
        return load_trace(Path(self.trace) if self.trace else packaged, options)

    def engine(self) -> SimConfig:
        """Configuration of one replica, with the engine's defaults."""
        return SimConfig(
            model=model_shape(self.model),
            rates=MachineConfig(name=self.machine).rates(),
            kv=KVConfig(memory=self.memory_bytes, page_tokens=self.block_tokens),
        )

    @property
    def memory_bytes(self) -> int:
        """KV memory of a replica for scaled lengths."""
        return int(parse_size(self.memory) * self.length_scale)

    @property
    def block_tokens(self) -> int:
        """Tokens of a scaled block."""
        return max(1, round(BLOCK_TOKENS * self.length_scale))


def loads_of(text: str) -> tuple[tuple[str, float], ...]:
    """Parse the moderate and the high load.

    Raises:
        ConfigError: not two numbers above 0.
    """
    try:
        factors = [float(part) for part in text.split(",")]
    except ValueError:
        factors = []
    if len(factors) != 2 or not all(0 < factor < math.inf for factor in factors):
        raise ConfigError(f"expected two loads above 0, such as 1.2,2.2; got {text!r} (--loads)")
    return tuple(zip((MODERATE, SATURATED), factors, strict=True))


def sizes_of(text: str) -> tuple[int, ...]:
    """Parse numbers of replicas.

    Raises:
        ConfigError: one of them is not a power of two.
    """
    sizes = tuple(int(part) if part.strip().isdigit() else 0 for part in text.split(","))
    if not all(size and not size & (size - 1) for size in sizes):
        raise ConfigError(f"expected powers of two, such as 1,8,64; got {text!r} (--replicas)")
    return sizes


QUICK_CLUSTER = ClusterBenchConfig(
    requests=60, replicas=2, sizes=(1, 2, 4), scale_requests=None, intervals_s=(0.0, 1.0)
)


# ---- load ----------------------------------------------------------------------------------------


def at_load(trace: Trace, factor: float) -> Trace:
    """The trace with a multiple of its arrival rate."""
    requests = tuple(replace(r, arrival_s=r.arrival_s / factor) for r in trace.requests)
    return replace(trace, requests=requests)


def for_replicas(trace: Trace, replicas: int, recorded_for: int) -> Trace:
    """The load of as many users for each replica as in the recorded trace.

    More replicas get copies of the trace with other contents; fewer get a part of the
    conversations.

    Args:
        trace: the recorded trace.
        replicas: number of replicas.
        recorded_for: number of replicas that serve the recorded trace; the other number is a
            multiple or a divisor of it.
    """
    if replicas >= recorded_for:
        requests = with_copies(list(trace.requests), replicas // recorded_for)
    else:
        conversations = {_conversation(request) for request in trace.requests}
        every = recorded_for // replicas
        chosen = {each for i, each in enumerate(sorted(conversations)) if i % every == 0}
        requests = [r for r in trace.requests if _conversation(r) in chosen]
    return replace(trace, requests=_from_zero(requests))


def _conversation(request: TraceRequest) -> int:
    """Identity of a conversation: its first content after the one that all prompts share."""
    return request.prompt[min(1, len(request.prompt) - 1)].content


def _from_zero(requests: Sequence[TraceRequest]) -> tuple[TraceRequest, ...]:
    first_s = requests[0].arrival_s
    return tuple(replace(request, arrival_s=request.arrival_s - first_s) for request in requests)


def one_machine(bench: ClusterBenchConfig) -> SimConfig:
    """One engine with the KV memory and the rates of all replicas together."""
    one, times = bench.engine(), bench.replicas
    rates = Rates(
        read_bytes_per_s=one.rates.read_bytes_per_s * times,
        flops_per_s=one.rates.flops_per_s * times,
        copy_bytes_per_s=one.rates.copy_bytes_per_s * times,
        overhead_s=one.rates.overhead_s,
    )
    schedule = replace(
        one.schedule,
        max_num_seqs=one.schedule.max_num_seqs * times,
        max_num_batched_tokens=one.schedule.max_num_batched_tokens * times,
        chunk_tokens=one.schedule.chunk_tokens * times,
    )
    kv = replace(one.kv, memory=bench.memory_bytes * times)
    return replace(one, rates=rates, schedule=schedule, kv=kv)


# ---- runs ----------------------------------------------------------------------------------------

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
