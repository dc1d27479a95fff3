"""Loads that the router learns late, and caches that it does not learn."""

from benchmarks.cluster.config import ClusterBenchConfig
from benchmarks.cluster.runs import Job, about, run_all
from benchmarks.common.result import Numbers, PartResult, Table
from quire.scale.routing.registry import RouterName


def run_reports(bench: ClusterBenchConfig) -> PartResult:
    """Loads that the router learns late, and caches that it does not learn."""
    names: tuple[RouterName, ...] = ("kv_aware", "least_loaded")
    late = [(name, interval_s, True) for name in names for interval_s in bench.intervals_s]
    variants = [*late, (names[0], 0.0, False)]
    jobs = [
        Job(
            bench=bench,
            load=bench.loads[0][1],
            router=name,
            options={"report_interval_s": interval_s, "kv_events": events},
        )
        for name, interval_s, events in variants
    ]
    found = dict(zip(variants, run_all(jobs, bench.processes), strict=True))
    rows = [
        _report_row(name, interval_s, "events" if events else "sent blocks", done.numbers)
        for (name, interval_s, events), done in found.items()
    ]
    shortest, longest = bench.intervals_s[0], bench.intervals_s[-1]
    table = Table(
        name="cluster-reports",
        caption=f"{about(bench)}; {bench.replicas} replicas, {bench.loads[0][0]} load. The router "
        "adds the requests that it sent after a report. Cache view: KV events of the replicas, or "
        "the blocks of the requests that the router sent.",
        columns=("router", "report every s", "cache view", "hit rate", "TTFT p50 s", "TTFT p99 s"),
        rows=tuple(rows),
    )
    known = found["kv_aware", shortest, True].numbers
    unseen = found["kv_aware", 0.0, False].numbers
    late_s = found["kv_aware", longest, True].numbers["ttft_p99_s"]
    lost = known["prefix_hit_fraction"] - unseen["prefix_hit_fraction"]
    claims: Numbers = {
        "late_reports_p99_ratio_kv_aware": late_s / known["ttft_p99_s"],
        "without_events_hit_points_lost": 100 * lost,
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
