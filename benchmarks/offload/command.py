"""`python -m benchmarks offload`: variants of a decode step with KV in host memory."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.common.command import finish, show_parts
from benchmarks.common.flags import AsJson
from quire.cli.common import use_threads
from quire.cli.report import prepare_folder, print_json
from quire.layout.extras import require_extra


def offload(
    *,
    parts: Annotated[
        str,
        typer.Option(
            help="Comma-separated parts: restore, latency, weights, codec, position, engine, "
            "engine_gain; default: all."
        ),
    ] = "",
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Rounds of the part restore; default: 5.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for tables, pictures and the result as JSON."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer tokens, layers, rounds and cells. No claims.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare prefetch and partial recompute for decoding with KV in host memory.

    The parts engine and engine_gain run engines, restore loads prefixes from a slowed Redis server.
    Other parts run at full size on a virtual clock. torch uses one thread; the link uses another
    core.
    """
    from benchmarks.common.command import names_of, run_named
    from benchmarks.offload.config import QUICK_OFFLOAD, OffloadBenchConfig
    from benchmarks.offload.parts import PARTS

    config = QUICK_OFFLOAD if quick else OffloadBenchConfig()
    config = replace(config, repeats=repeats or config.repeats)
    names = names_of(parts, PARTS)
    if out is not None:
        require_extra("report", "--out")
        prepare_folder(out)
    use_threads(1)
    results, claims = show_parts(run_named(names, PARTS, config))
    run = finish("offload", results, claims, asdict(config) | {"threads": 1}, out, quick=quick)
    if as_json:
        print_json(run)
