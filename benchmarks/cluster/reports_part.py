"""Loads that the router learns late, and caches that it does not learn."""

from benchmarks.cluster.config import ClusterBenchConfig
from benchmarks.cluster.runs import about, simulate_cluster
from benchmarks.cluster.workload import at_load
from benchmarks.common.result import Numbers, PartResult, Table


def run_reports(bench: ClusterBenchConfig) -> PartResult:
    """Loads that the router learns late, and caches that it does not learn."""
    trace = at_load(bench.load(), bench.loads[0][1])
    rows: list[tuple[str | float, ...]] = []
    p99_s: dict[tuple[str, float], float] = {}
    for name in ("kv_aware", "least_loaded"):
        for interval_s in bench.intervals_s:
            numbers = simulate_cluster(
                bench, bench.replicas, name, trace, report_interval_s=interval_s
            ).numbers
            p99_s[name, interval_s] = numbers["ttft_p99_s"]
            rows.append(_report_row(name, interval_s, "events", numbers))
    unseen = simulate_cluster(bench, bench.replicas, "kv_aware", trace, kv_events=False).numbers
    rows.append(_report_row("kv_aware", 0.0, "sent blocks", unseen))
    shortest, longest = bench.intervals_s[0], bench.intervals_s[-1]
    table = Table(
        name="cluster-reports",
        caption=f"{about(bench)}; {bench.replicas} replicas, {bench.loads[0][0]} load. The router "
        "adds the requests that it sent after a report. Cache view: KV events of the replicas, or "
        "the blocks of the requests that the router sent.",
        columns=("router", "report every s", "cache view", "hit rate", "TTFT p50 s", "TTFT p99 s"),
        rows=tuple(rows),
    )
    known = next(r for r in rows if r[:3] == ("kv_aware", shortest, "events"))
    claims: Numbers = {
        "late_reports_p99_ratio_kv_aware": p99_s["kv_aware", longest] / p99_s["kv_aware", shortest],
        "without_events_hit_points_lost": 100 * (float(known[3]) - unseen["prefix_hit_fraction"]),
    }
    return PartResult(claims=claims, tables=(table,))


def _report_row(
    name: str, interval_s: float, view: str, numbers: Numbers
) -> tuple[str | float, ...]:
    return (
        name,
        interval_s,
        view,
        numbers["prefix_hit_fraction"],
        numbers["ttft_p50_s"],
        numbers["ttft_p99_s"],
    )
