"""Parts of the cluster benchmark: loads, more replicas, late reports, a tenant that floods."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from benchmarks.cluster.runs import ROUTERS, ClusterBenchConfig, Job, Run, about, run_all
from benchmarks.common.result import Chart, Numbers, PartResult, Table
from quire.layout.sizes import parse_size
from quire.scale.routing.policies import RouterName

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


# ---- more replicas -------------------------------------------------------------------------------


def run_scale(bench: ClusterBenchConfig) -> PartResult:
    """Simulate more replicas with as many users each."""
    bench = replace(bench, requests=bench.scale_requests or bench.requests)
    jobs = [
        Job(bench=bench, load=bench.loads[0][1], router=name, replicas=replicas)
        for replicas in sorted(bench.sizes, reverse=True)  # the longest simulations first
        for name in ROUTERS
    ]
    done = run_all(jobs, bench.processes)
    found = {name: done[i :: len(ROUTERS)][::-1] for i, name in enumerate(ROUTERS)}
    return PartResult(
        claims=_scale_claims(found),
        tables=(_scale_table(bench, found),),
        charts=tuple(_scale_charts(bench, found)),
        raw={name: [each.to_json() for each in runs] for name, runs in found.items()},
    )


def _scale_table(bench: ClusterBenchConfig, found: Mapping[RouterName, list[Run]]) -> Table:
    rows = [
        (
            int(each.numbers["replicas"]),
            name,
            each.numbers["requests_per_s"],
            each.numbers["prompt_tokens_per_s"],
            each.numbers["generated_tokens_per_s"],
            each.numbers["prefix_hit_fraction"],
            each.numbers["ttft_p50_s"],
            each.numbers["ttft_p99_s"],
            each.numbers["token_imbalance"],
            each.numbers["cost_per_million_tokens"],
            each.routing_us,
        )
        for runs in zip(*found.values(), strict=True)
        for name, each in zip(found, runs, strict=True)
    ]
    return Table(
        name="cluster-scale",
        caption=f"{about(bench)}, as many users for each replica, {bench.loads[0][0]} load. Cost: "
        f"of a million prompt and output tokens at {bench.price_per_hour:g} per machine and hour. "
        "Router: measured time of one core for each request.",
        columns=(
            *("replicas", "router", "requests/s", "prompt tokens/s", "output tokens/s"),
            *("hit rate", "TTFT p50 s", "TTFT p99 s", "imbalance", "cost", "router us"),
        ),
        rows=tuple(rows),
    )


def _scale_claims(found: Mapping[RouterName, list[Run]]) -> Numbers:
    own, last = found["kv_aware"], {name: runs[-1].numbers for name, runs in found.items()}
    first, largest = own[0].numbers, own[-1].numbers
    per_replica = largest["generated_tokens_per_s"] / largest["replicas"]
    has_one = first["replicas"] == 1
    rate = largest["requests_per_s"] / largest["replicas"]
    return {
        "largest_replicas": largest["replicas"],
        "largest_hit_fraction_kv_aware": largest["prefix_hit_fraction"],
        "largest_hit_fraction_least_loaded": last["least_loaded"]["prefix_hit_fraction"],
        "largest_hit_fraction_round_robin": last["round_robin"]["prefix_hit_fraction"],
        "largest_p99_s_kv_aware": largest["ttft_p99_s"],
        "largest_p99_s_least_loaded": last["least_loaded"]["ttft_p99_s"],
        "largest_p99_s_round_robin": last["round_robin"]["ttft_p99_s"],
        **(
            {"throughput_per_replica_over_one": per_replica / first["generated_tokens_per_s"]}
            if has_one
            else {}
        ),
        "cost_per_million_tokens_kv_aware": largest["cost_per_million_tokens"],
        "cost_per_million_tokens_round_robin": last["round_robin"]["cost_per_million_tokens"],
        "router_us_largest": own[-1].routing_us,
        "router_requests_per_s_largest": 1e6 / own[-1].routing_us,
        "router_core_fraction_largest": own[-1].routing_us * 1e-6 * rate * largest["replicas"],
        "simulated_s_largest": own[-1].wall_s,
    }


def _scale_charts(
    bench: ClusterBenchConfig, found: Mapping[RouterName, list[Run]]
) -> Iterator[Chart]:
    for name, title, label in (
        ("prefix_hit_fraction", "Prefix hit rate", "fraction of prompt tokens"),
        ("ttft_p99_s", "Time to first token, p99", "s"),
    ):
        yield Chart(
            name=f"cluster-{name.replace('_', '-')}",
            title=f"{title}, as many users for each replica",
            x_label="replicas",
            y_label=label,
            lines={
                router: tuple((r.numbers["replicas"], r.numbers[name]) for r in runs)
                for router, runs in found.items()
            },
            log_x=True,
        )


# ---- late reports --------------------------------------------------------------------------------


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


# ---- tenants -------------------------------------------------------------------------------------

OVERLOAD = 1.5  # over the load near saturation
_VARIANTS: tuple[RouterName, ...] = ("round_robin", "kv_aware")


def run_tenants(bench: ClusterBenchConfig) -> PartResult:
    """One tenant sends most of the requests: what the others wait."""
    jobs = [
        Job(
            bench=bench,
            load=OVERLOAD * bench.loads[-1][1],
            router=name,
            tenants="share:flood=0.9,small=0.1",
        )
        for name in _VARIANTS
    ]
    done = zip(_VARIANTS, run_all(jobs, bench.processes), strict=True)
    found = {name: run.tenants for name, run in done}
    rows = [
        (name, tenant, waits["ttft_p50_s"], waits["ttft_p99_s"])
        for name, tenants in found.items()
        for tenant, waits in tenants.items()
    ]
    table = Table(
        name="cluster-tenants",
        caption=f"{about(bench)}; {bench.replicas} replicas, {OVERLOAD:g} times the load near "
        "saturation; `flood` sends 90 % of the requests.",
        columns=("router", "tenant", "TTFT p50 s", "TTFT p99 s"),
        rows=tuple(rows),
    )
    small_s = {name: tenants.get("small", {}) for name, tenants in found.items()}
    claims: Numbers = {
        f"small_tenant_p99_s_{name}": small["ttft_p99_s"]
        for name, small in small_s.items()
        if small  # a trial of few requests may have none
    }
    return PartResult(claims=claims, tables=(table,))


# ---- all parts -----------------------------------------------------------------------------------

PARTS: Mapping[str, Callable[[ClusterBenchConfig], PartResult]] = {
    "pool": run_pool,
    "large_pool": run_large_pool,
    "scale": run_scale,
    "reports": run_reports,
    "tenants": run_tenants,
}
