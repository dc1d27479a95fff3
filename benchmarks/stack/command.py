"""`python -m benchmarks stack`: KV memory optimizations on top of each other, in equal bytes."""

from dataclasses import asdict, replace
from typing import Annotated

import typer

from benchmarks.common.command import run_command
from benchmarks.common.flags import AsJson, Out, Threads
from quire.cli.common import use_threads


def stack(
    *,
    model: Annotated[
        str | None, typer.Option(help="Shape: 125m, small or tiny; default: 125m.")
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="Number of requests, all present at the start; default: 128."),
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Rounds of all arms; default: 3.")
    ] = None,
    out: Out = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Few short requests, a tiny model, one round. No claims."),
    ] = False,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Serve one load with contiguous KV, then add pages, int8, a prefix cache and int4.

    Every arm has the KV memory that holds four contiguous lanes, and all optimizations of the arms
    before it. Tables show the largest batch, tokens per second and latencies.
    """
    from benchmarks.common.workload import SHAPES
    from benchmarks.stack.part import QUICK_STACK, StackConfig, run_stack
    from quire.errors import UnknownName

    if model is not None and model not in SHAPES:
        raise UnknownName("model", model, SHAPES)
    use_threads(threads)
    config = QUICK_STACK if quick else StackConfig()
    load = replace(
        config.load, model=model or config.load.model, requests=requests or config.load.requests
    )
    config = replace(config, load=load, repeats=repeats or config.repeats)
    made = {"stack": run_stack}
    run_command("stack", made, "", config, asdict(config), out, quick=quick, as_json=as_json)
