"""`python -m benchmarks cluster`: replicas behind a router, simulated with recorded requests."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.common.command import run_command
from benchmarks.common.flags import AsJson, Out, parts_option, quick_option
from quire.cli.common import use_threads


def cluster(  # noqa: PLR0913 - one parameter per option
    *,
    parts: Annotated[str, parts_option("pool", "large_pool", "scale", "reports", "tenants")] = "",
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Trace in Mooncake's format; default: the first 2,000 requests of Mooncake's "
            "conversation trace."
        ),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Number of first requests; default: all.")
    ] = None,
    length_scale: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=1,
            help="Factor on lengths, KV memory and times between arrivals; default: 0.125, which "
            "simulates the same prefixes in an eighth of the steps.",
        ),
    ] = None,
    loads: Annotated[
        str,
        typer.Option(
            help="Two factors on the arrival rate, moderate and near saturation; default: 1.2,2.2."
        ),
    ] = "",
    replicas: Annotated[
        str,
        typer.Option(
            help="Numbers of replicas of the part scale, powers of two; default: 1,4,16,64,256."
        ),
    ] = "",
    processes: Annotated[
        int, typer.Option(min=1, max=64, help="Simulations that run at the same time.")
    ] = 1,
    out: Out = None,
    quick: Annotated[bool, quick_option("Few requests and replicas, for a trial.")] = False,
    as_json: AsJson = False,
) -> None:
    """Simulate replicas behind a router: hit rate, latency, throughput and cost of each router.

    The engines are those of `quire simulate`. pool: compared with one machine of the same total
    size. large_pool: with four times the KV memory. scale: 1 to 256 replicas with as many users
    each. reports: late load reports. tenants: one tenant sends most of the requests.
    """
    from benchmarks.cluster.parts import PARTS
    from benchmarks.cluster.runs import QUICK_CLUSTER, ClusterBenchConfig, loads_of, sizes_of

    use_threads(1)
    config = QUICK_CLUSTER if quick else ClusterBenchConfig()
    config = replace(
        config,
        trace="" if trace is None else str(trace),
        requests=requests or config.requests,
        length_scale=length_scale or config.length_scale,
        loads=loads_of(loads) if loads else config.loads,
        sizes=sizes_of(replicas) if replicas else config.sizes,
        processes=processes,
    )
    used = asdict(config)
    run_command("cluster", PARTS, parts, config, used, out, quick=quick, as_json=as_json)
