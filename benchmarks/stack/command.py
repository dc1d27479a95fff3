"""`python -m benchmarks stack`: KV memory optimizations on top of each other, in equal bytes."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.common.command import finish, show_parts
from benchmarks.common.flags import AsJson, Threads
from quire.cli.common import use_threads
from quire.cli.report import prepare_folder, print_json
from quire.layout.extras import require_extra


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
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for tables (Markdown, CSV), pictures and the result as JSON."),
    ] = None,
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
    import torch

    from benchmarks.common.command import run_named
    from benchmarks.common.workload import SHAPES
    from benchmarks.stack.part import QUICK_STACK, StackConfig, run_stack
    from quire.errors import UnknownName

    if model is not None and model not in SHAPES:
        raise UnknownName("model", model, SHAPES)
    if out is not None:
        require_extra("report", "--out")
        prepare_folder(out)
    use_threads(threads)
    config = QUICK_STACK if quick else StackConfig()
    load = replace(
        config.load, model=model or config.load.model, requests=requests or config.load.requests
    )
    config = replace(config, load=load, repeats=repeats or config.repeats)
    results, claims = show_parts(run_named(("stack",), {"stack": run_stack}, config))
    used = asdict(config) | {"threads": torch.get_num_threads()}
    run = finish("stack", results, claims, used, out, quick=quick)
    if as_json:
        print_json(run)
