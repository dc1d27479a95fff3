"""Runs a simulation for `quire simulate`: one engine, or several behind a router."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import typer

from quire.cli.simulate_view import render, render_cluster
from quire.scale.cluster.cluster import make_cluster
from quire.scale.cluster.config import ClusterConfig
from quire.scale.cluster.metrics import by_replica, records_of, summarise_cluster
from quire.scale.routing.registry import RouterConfig
from quire.sim.metrics import Numbers, by_tenant, summarise
from quire.sim.plots import pictures, ttft_picture
from quire.sim.run import SimConfig, make_simulator
from quire.sim.traces.base import Trace

_PROGRESS_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Output of a simulation.

    Attributes:
        text: report for the terminal.
        claims: metrics by name.
        arms: raw results.
        took_s: wall-clock time.
        draw: draws SVG files by name.
    """

    text: str
    claims: Numbers
    arms: Mapping[str, object]
    took_s: float
    draw: Callable[[], Mapping[str, bytes]]


def run_engine(trace: Trace, config: SimConfig) -> Simulated:
    """Simulate one engine.

    Raises:
        ConfigError: an option is invalid.
    """
    simulator = make_simulator(trace, config)
    started_s = time.perf_counter()
    result = simulator.run(_Progress())
    took_s = time.perf_counter() - started_s
    claims = summarise(result)
    return Simulated(
        text=render(result, claims, took_s),
        claims=claims,
        arms={"tenants": by_tenant(result)},
        took_s=took_s,
        draw=lambda: pictures(result),
    )


def run_cluster(
    trace: Trace, config: SimConfig, cluster: ClusterConfig, router: RouterConfig
) -> Simulated:
    """Simulate replicas behind a router.

    Raises:
        ConfigError: an option is invalid.
    """
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
