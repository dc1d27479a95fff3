"""`python -m benchmarks offload`: variants of a decode step with KV in host memory."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.common.command import finish, show_parts
from quire.cli.common import AsJson, use_threads
from quire.cli.report import prepare_folder, print_json, write_files
from quire.layout.extras import require_extra

if TYPE_CHECKING:
    from benchmarks.common.result import PartResult


def offload(
    *,
    parts: Annotated[
        str,
        typer.Option(
            help="Comma-separated parts: arms, sweep, host, refit, restore, latency, weights, "
            "codec, position, engine, engine_gain; default: all."
        ),
    ] = "",
    rho: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=100,
            help="rho: time to recompute over time to transfer KV, on threads; default: 0.58.",
        ),
    ] = None,
    xi: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            max=8,
            help="xi: bytes of an activation over bytes of its KV; default: 0.5.",
        ),
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Rounds of all arms; default: 5.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for tables, pictures, a Chrome trace and the result as JSON."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer tokens, layers, rounds and cells. No claims.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare prefetch, partial recompute and CPU attention for decoding with KV in host memory.

    Parts on threads run real copies and products on a throttled link, at the ratios of larger
    machines. Other parts run at full size on a virtual clock. torch uses one thread; the link uses
    another core.
    """
    from benchmarks.common.command import names_of, run_named
    from benchmarks.offload.config import QUICK_OFFLOAD, OffloadBenchConfig
    from benchmarks.offload.parts import PARTS

    config = QUICK_OFFLOAD if quick else OffloadBenchConfig()
    shape = replace(config.shape, x_ratio=xi or config.shape.x_ratio)
    ratios = replace(config.ratios, recompute=rho or config.ratios.recompute)
    config = replace(config, shape=shape, ratios=ratios, repeats=repeats or config.repeats)
    names = names_of(parts, PARTS)
    if out is not None:
        require_extra("report", "--out")
        prepare_folder(out)
    use_threads(1)
    results, claims = show_parts(run_named(names, PARTS, config))
    trace = _take_trace(results)
    run = finish("offload", results, claims, asdict(config) | {"threads": 1}, out, quick=quick)
    if out is not None and trace is not None:
        write_files(out, {"offload-trace.json": json.dumps(trace).encode()})
    if as_json:
        print_json(run)


def _take_trace(results: "dict[str, PartResult]") -> object:
    """Remove and return the Chrome trace, which is written to its own file."""
    if "arms" not in results:
        return None
    raw = dict(results["arms"].raw)
    trace = raw.pop("trace", None)
    results["arms"] = replace(results["arms"], raw=raw)
    return trace
