"""More replicas with as many users each."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from benchmarks.cluster.config import ClusterBenchConfig
from benchmarks.cluster.runs import ROUTERS, Job, Run, about, run_all
from benchmarks.common.result import Chart, Numbers, PartResult, Table
from quire.scale.routing.registry import RouterName


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
