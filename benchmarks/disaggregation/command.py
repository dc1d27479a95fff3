"""`python -m benchmarks disaggregation`: decoding beside prefill, or with a prefill process."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.common.command import finish, show_parts
from quire.cli.common import AsJson
from quire.cli.report import prepare_folder, print_json
from quire.layout.extras import require_extra


def disaggregation(
    *,
    model: Annotated[
        str | None, typer.Option(help="A shape such as 125m, or quire-tiny; default: 125m.")
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(help="redis (an own server is started) or file; default: redis."),
    ] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Repeats; default: 3.")] = None,
    files: Annotated[Path, typer.Option(help="Folder of the written models.")] = Path(
        "build/serve"
    ),
    out: Annotated[
        Path | None, typer.Option(help="Folder for tables (Markdown, CSV) and the result as JSON.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="quire-tiny and few short prompts. No claims.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure the time per output token of streams while long prompts arrive.

    The prompts are computed in the same engine, or in a prefill process that shares a store of
    prefixes with it. Outputs must be equal.
    """
    from benchmarks.common.command import run_named
    from benchmarks.disaggregation.config import QUICK, DisaggregationConfig
    from benchmarks.disaggregation.run import run_disaggregation

    if out is not None:
        require_extra("report", "--out")
        prepare_folder(out)
    config = QUICK if quick else DisaggregationConfig()
    config = replace(
        config,
        model=model or config.model,
        store=store or config.store,
        repeats=repeats or config.repeats,
        files=str(files),
    )
    parts = {"disaggregation": run_disaggregation}
    results, claims = show_parts(run_named(("disaggregation",), parts, config))
    run = finish("disaggregation", results, claims, asdict(config), out, quick=quick)
    if as_json:
        print_json(run)
