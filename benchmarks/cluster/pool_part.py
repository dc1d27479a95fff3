"""The routers compared with one machine that has the memory and the rates of all replicas."""

from collections.abc import Mapping

from benchmarks.cluster.config import ClusterBenchConfig
from benchmarks.cluster.runs import ROUTERS, about, simulate_cluster
from benchmarks.cluster.workload import at_load, one_machine
from benchmarks.common.result import Numbers, PartResult, Table
from quire.sim.metrics import summarise
from quire.sim.run import simulate

POOL = "one machine"


def run_pool(bench: ClusterBenchConfig) -> PartResult:
    """Compare the routers with one machine of the same memory and rates, at every load."""
    claims: Numbers = {}
    rows: list[tuple[str | float, ...]] = []
    recorded = bench.load()
    for load, factor in bench.loads:
        trace = at_load(recorded, factor)
        pool = summarise(simulate(trace, one_machine(bench)))
        rows.append(_pool_row(load, POOL, pool))
        found = {name: simulate_cluster(bench, bench.replicas, name, trace) for name in ROUTERS}
        rows += [_pool_row(load, name, each.numbers) for name, each in found.items()]
        claims |= _pool_claims(load, pool, {name: r.numbers for name, r in found.items()})
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


def _pool_claims(load: str, pool: Numbers, found: Mapping[str, Numbers]) -> Numbers:
    own = found["kv_aware"]
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
