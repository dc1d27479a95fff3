"""The routers compared with one machine that has the memory and the rates of all replicas."""

from collections.abc import Mapping
from dataclasses import replace

from benchmarks.cluster.config import ClusterBenchConfig
from benchmarks.cluster.runs import ROUTERS, Job, about, run_all
from benchmarks.common.result import Numbers, PartResult, Table
from quire.layout.sizes import parse_size

POOL = "one machine"
LARGER = 4


def run_pool(bench: ClusterBenchConfig) -> PartResult:
    """Compare the routers with one machine of the same memory and rates, at every load."""
    names = (None, *ROUTERS)
    jobs = [
        Job(bench=bench, load=factor, router=name) for _, factor in bench.loads for name in names
    ]
    done = iter(run_all(jobs, bench.processes))
    claims: Numbers = {}
    rows: list[tuple[str | float, ...]] = []
    for load, _ in bench.loads:
        found = {name or POOL: next(done).numbers for name in names}
        rows += [_pool_row(load, name, numbers) for name, numbers in found.items()]
        claims |= _pool_claims(load, found)
    table = Table(
        name="cluster-pool",
        caption=f"{about(bench)}; {bench.replicas} replicas. `{POOL}`: one engine with the memory "
        f"and the rates of {bench.replicas} machines. Imbalance: tokens computed by the busiest "
        "replica over the mean.",
        columns=(
            *("load", "router", "requests/s", "hit rate", "TTFT p50 s", "TTFT p99 s"),
            *("TPOT p50 ms", "imbalance"),
        ),
        rows=tuple(rows),
    )
    return PartResult(claims=claims, tables=(table,))


def run_large_pool(bench: ClusterBenchConfig) -> PartResult:
    """`run_pool` with `LARGER` times the KV memory, as with a tier in CPU memory."""
    found = run_pool(replace(bench, memory=str(parse_size(bench.memory) * LARGER)))
    return replace(
        found,
        claims={f"large_{name}": value for name, value in found.claims.items()},
        tables=tuple(replace(table, name=f"{table.name}-large") for table in found.tables),
    )


def _pool_row(load: str, name: str, numbers: Numbers) -> tuple[str | float, ...]:
    return (
        load,
        name,
        numbers["requests_per_s"],
        numbers["prefix_hit_fraction"],
        numbers["ttft_p50_s"],
        numbers["ttft_p99_s"],
        numbers["tpot_p50_s"] * 1000,
        numbers.get("token_imbalance", 1.0),
    )


def _pool_claims(load: str, found: Mapping[str, Numbers]) -> Numbers:
    own, pool = found["kv_aware"], found[POOL]
    gap = pool["prefix_hit_fraction"] - own["prefix_hit_fraction"]
    return {
        f"{load}_hit_points_below_pool": 100 * gap,
        f"{load}_kv_aware_hit_fraction": own["prefix_hit_fraction"],
        f"{load}_pool_hit_fraction": pool["prefix_hit_fraction"],
        f"{load}_kv_aware_p99_s": own["ttft_p99_s"],
        f"{load}_p99_over_round_robin": own["ttft_p99_s"] / found["round_robin"]["ttft_p99_s"],
        f"{load}_p99_over_least_loaded": own["ttft_p99_s"] / found["least_loaded"]["ttft_p99_s"],
        f"{load}_p99_over_pool": own["ttft_p99_s"] / pool["ttft_p99_s"],
    }
