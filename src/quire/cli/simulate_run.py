"""Runs a simulation for `quire simulate`: one engine, or several behind a router."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import typer

from quire.layout.sizes import format_size
from quire.scale.cluster.cluster import ClusterResult, make_cluster
from quire.scale.cluster.metrics import by_replica, records_of, summarise_cluster
from quire.scale.config import ClusterConfig
from quire.scale.routing.policies import RouterConfig
from quire.sim.engine import SimResult
from quire.sim.metrics import PERCENTILES, Numbers, by_tenant, summarise
from quire.sim.plots import pictures, ttft_picture
from quire.sim.run import SimConfig, make_simulator
from quire.sim.traces.base import Trace

_PROGRESS_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Output of a simulation."""

    text: str
    claims: Numbers  # metrics by name
    arms: Mapping[str, object]
    took_s: float
    draw: Callable[[], Mapping[str, bytes]]  # SVG files by name


def run_engine(trace: Trace, config: SimConfig) -> Simulated:
    """Simulate one engine."""
    simulator = make_simulator(trace, config)
    started_s = time.perf_counter()
    result = simulator.run(_Progress())
    took_s = time.perf_counter() - started_s
    claims = summarise(result)
    return Simulated(
        text=render(result, claims, took_s, automatic=config.kv.memory is None),
        claims=claims,
        arms={"tenants": by_tenant(result)},
        took_s=took_s,
        draw=lambda: pictures(result),
    )


def run_cluster(
    trace: Trace, config: SimConfig, cluster: ClusterConfig, router: RouterConfig
) -> Simulated:
    """Simulate replicas behind a router."""
    made = make_cluster(trace, config, cluster, router)
    started_s = time.perf_counter()
    result = made.run(_Progress())
    took_s = time.perf_counter() - started_s
    claims = summarise_cluster(result)
    return Simulated(
        text=render_cluster(result, claims, router.name, took_s),
        claims=claims,
        arms={"replicas": by_replica(result), "routing_s": result.routing_s},
        took_s=took_s,
        draw=lambda: ttft_picture(records_of(result)),
    )


class _Progress:
    """Prints a progress line on standard error every `_PROGRESS_S` seconds."""

    def __init__(self) -> None:
        self._next_s = time.perf_counter() + _PROGRESS_S

    def __call__(self, clock_s: float, num_arrived: int) -> None:
        now_s = time.perf_counter()
        if now_s >= self._next_s:
            self._next_s = now_s + _PROGRESS_S
            typer.echo(f"simulated {clock_s:,.0f} s, {num_arrived:,} requests", err=True)


_LATENCIES = {"queue": "queueing time", "ttft": "time to first token"}
_LATENCIES |= {"tpot": "time per output token", "e2e": "end-to-end latency"}


def render(result: SimResult, claims: Numbers, took_s: float, *, automatic: bool) -> str:
    """Render the result as text; with the origin of an automatic size of the KV memory."""
    return "\n".join(
        (
            *_requests(result.trace, claims, took_s),
            *_table(claims),
            *_memory(claims, ", which holds all requests at once" if automatic else ""),
            *_fairness(claims),
        )
    )


def render_cluster(result: ClusterResult, claims: Numbers, router: str, took_s: float) -> str:
    """Render the result of a cluster as text."""
    return "\n".join(
        (
            f"{claims['replicas']} replicas, router {router} "
            f"({1e6 * result.routing_s:.0f} us per request)",
            *_requests(result.trace, claims, took_s),
            *_table(claims),
            f"\nprefix cache hit rate: {claims['prefix_hit_fraction']:.2%} of prompt tokens; "
            f"repeated in the trace: {claims['reusable_token_fraction']:.2%}",
            f"busiest replica over the mean: {claims['busy_imbalance']:.2f} in time, "
            f"{claims['token_imbalance']:.2f} in tokens, {claims['request_imbalance']:.2f} in "
            "requests",
            f"preemptions: {claims['preemptions']:,}; most requests of a replica: "
            f"{claims['running_peak']:,} running, {claims['waiting_peak']:,} waiting",
        )
    )


def render_cost(cost: Numbers, price_per_hour: float) -> str:
    """Render the cost of tokens as text."""
    if not cost:
        return "no tokens were generated: no cost of tokens"
    return (
        f"at {price_per_hour:g} per machine and hour, a million tokens cost "
        f"{cost['cost_per_million_tokens']:.3f}, a million output tokens "
        f"{cost['cost_per_million_output_tokens']:.2f}"
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"


def _requests(trace: Trace, claims: Numbers, took_s: float) -> Iterator[str]:
    yield (
        f"{trace.name} ({trace.format}): {claims['requests']:,} requests, "
        f"{_seconds(claims['virtual_s'])} s of simulated time in {took_s:.1f} s"
    )
    refused = claims["refused_too_long"], claims["refused_never_fits"]
    if any(refused):
        yield (
            f"refused requests: {refused[0]:,} longer than the context, "
            f"{refused[1]:,} larger than the KV memory"
        )
    if claims["left_out"] or claims["cut_answers"]:
        yield (
            f"skipped requests (too long): {claims['left_out']:,}; outputs truncated at the "
            f"context: {claims['cut_answers']:,}"
        )
    yield (
        f"throughput: {claims['requests_per_s']:.2f} requests/s, "
        f"{claims['prompt_tokens_per_s']:,.0f} prompt tokens/s, "
        f"{claims['generated_tokens_per_s']:,.0f} output tokens/s; "
        f"engine busy {claims['busy_share']:.0%} of the time"
    )


def _table(claims: Numbers) -> Iterator[str]:
    if not claims["finished"]:
        return
    yield f"\n{'latency in s':22}" + "".join(f"{f'p{q}':>10}" for q in PERCENTILES)
    for name, words in _LATENCIES.items():
        cells = [claims.get(f"{name}_p{q}_s") for q in PERCENTILES]
        yield f"{words:22}" + "".join(
            f"{'':>10}" if cell is None else f"{cell:>10.3f}" for cell in cells
        )


def _memory(claims: Numbers, origin: str) -> Iterator[str]:
    yield (
        f"\nKV memory {format_size(int(claims['kv_total_bytes']))}{origin}: mean usage "
        f"{claims['kv_mean_share']:.1%}, peak {claims['kv_peak_share']:.1%}; "
        f"{claims['waste_fraction']:.2%} of the slots of running requests unused"
    )
    yield (
        f"requests: {claims['running_mean']:.1f} running (peak {claims['running_peak']:,}), "
        f"{claims['waiting_mean']:.1f} waiting (peak {claims['waiting_peak']:,})"
    )
    yield (
        f"preemptions: {claims['preemptions']:,} ({claims['preemptions_per_minute']:.2f}/min); "
        f"{claims['recomputed_tokens']:,} tokens recomputed "
        f"({claims['recomputed_fraction']:.2%} of all computed tokens)"
    )
    yield (
        f"prefix cache hit rate: {claims['prefix_hit_fraction']:.2%} of prompt tokens; repeated in "
        f"the trace: {claims['reusable_token_fraction']:.2%} of tokens, "
        f"{claims['reusable_block_fraction']:.2%} of blocks"
    )


def _fairness(claims: Numbers) -> Iterator[str]:
    if "served_while_all_wait_tokens" not in claims:
        return
    index = "too short for a Jain index"
    if "jain_index" in claims:
        index = f"Jain fairness index {claims['jain_index']:.3f}"
    yield (
        "fairness while all tenants have waiting requests: "
        f"{claims['served_while_all_wait_tokens']:,} tokens served, {index}"
    )
