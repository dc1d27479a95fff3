"""One tenant sends most of the requests: what the others wait."""

from benchmarks.cluster.config import ClusterBenchConfig
from benchmarks.cluster.runs import about, run
from benchmarks.cluster.workload import at_load
from benchmarks.common.result import Numbers, PartResult, Table
from quire.scale.cluster.config import ClusterConfig
from quire.scale.routing.registry import RouterConfig, RouterName

_VARIANTS: tuple[tuple[str, RouterName, int | None], ...] = (
    ("round_robin", "round_robin", None),
    ("kv_aware", "kv_aware", None),
    ("kv_aware, 4 waiting at most", "kv_aware", 4),
)


def run_tenants(bench: ClusterBenchConfig) -> PartResult:
    """One tenant sends most of the requests: what the others wait."""
    trace = at_load(bench.load("share:flood=0.9,small=0.1"), 2 * bench.loads[-1][1])
    rows: list[tuple[str | float, ...]] = []
    small_s: dict[str, float] = {}
    for label, name, limit in _VARIANTS:
        cluster = ClusterConfig(replicas=bench.replicas, max_queued_requests=limit)
        found = run(trace, bench.engine(), cluster, RouterConfig(name=name)).tenants
        small_s[label] = found["small"]["ttft_p99_s"]
        rows += [
            (label, tenant, each["ttft_p50_s"], each["ttft_p99_s"])
            for tenant, each in found.items()
        ]
    table = Table(
        name="cluster-tenants",
        caption=f"{about(bench)}; {bench.replicas} replicas, twice the load that saturates them; "
        "`flood` sends 90 % of the requests.",
        columns=("router", "tenant", "TTFT p50 s", "TTFT p99 s"),
        rows=tuple(rows),
    )
    claims: Numbers = {
        "small_tenant_p99_s": small_s["kv_aware"],
        "small_tenant_p99_s_held_at_router": small_s["kv_aware, 4 waiting at most"],
        "small_tenant_p99_s_round_robin": small_s["round_robin"],
    }
    return PartResult(claims=claims, tables=(table,))
