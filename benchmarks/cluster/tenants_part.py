"""One tenant sends most of the requests: what the others wait."""

from benchmarks.cluster.config import ClusterBenchConfig
from benchmarks.cluster.runs import Job, about, run_all
from benchmarks.common.result import Numbers, PartResult, Table
from quire.scale.routing.registry import RouterName

OVERLOAD = 1.5  # over the load near saturation
_VARIANTS: tuple[tuple[str, RouterName, int | None], ...] = (
    ("round_robin", "round_robin", None),
    ("kv_aware", "kv_aware", None),
    ("kv_aware, 4 waiting at most", "kv_aware", 4),
)
_CLAIMS = {
    "round_robin": "round_robin",
    "kv_aware": "kv_aware",
    "kv_aware, 4 waiting at most": "held_at_router",
}


def run_tenants(bench: ClusterBenchConfig) -> PartResult:
    """One tenant sends most of the requests: what the others wait."""
    jobs = [
        Job(
            bench=bench,
            load=OVERLOAD * bench.loads[-1][1],
            router=name,
            options={"max_queued_requests": limit},
            tenants="share:flood=0.9,small=0.1",
        )
        for _, name, limit in _VARIANTS
    ]
    done = zip(_VARIANTS, run_all(jobs, bench.processes), strict=True)
    found = {label: run.tenants for (label, *_), run in done}
    rows = [
        (label, tenant, waits["ttft_p50_s"], waits["ttft_p99_s"])
        for label, tenants in found.items()
        for tenant, waits in tenants.items()
    ]
    table = Table(
        name="cluster-tenants",
        caption=f"{about(bench)}; {bench.replicas} replicas, {OVERLOAD:g} times the load near "
        "saturation; `flood` sends 90 % of the requests.",
        columns=("router", "tenant", "TTFT p50 s", "TTFT p99 s"),
        rows=tuple(rows),
    )
    small_s = {label: tenants.get("small", {}) for label, tenants in found.items()}
    claims: Numbers = {
        f"small_tenant_p99_s_{name}": small_s[label]["ttft_p99_s"]
        for label, name in _CLAIMS.items()
        if small_s[label]  # a trial of few requests may have none
    }
    return PartResult(claims=claims, tables=(table,))
