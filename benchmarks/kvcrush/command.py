"""`python -m benchmarks kvcrush`: rules with and without KVCrush: quality and time."""

from dataclasses import replace
from typing import Annotated

import typer

from benchmarks.common.flags import AsJson, parts_option
from benchmarks.quality.command import Out, Prompts, Quick, Text, run_parts
from quire.cli.options import MODEL
from quire.cli.settings import Settings, with_settings


@with_settings(MODEL)
def kvcrush(  # noqa: PLR0913 - one parameter per option
    settings: Settings,
    *,
    parts: Annotated[str, parts_option("quality", "heads", "fidelity", "long", "overhead")] = "",
    bases: Annotated[
        str,
        typer.Option(
            help="Base rules: comma-separated names, or rules with options and semicolons: "
            "'h2o; snapkv:window=16'. The overhead uses the first rule."
        ),
    ] = "",
    tasks: Annotated[
        str, typer.Option(help="Comma-separated tasks of the parts quality and heads.")
    ] = "",
    budget: Annotated[
        str, typer.Option(help="Cap of quality in percent of the longest prompt; default: 25.")
    ] = "",
    prompts: Prompts = None,
    text: Text = None,
    out: Out = None,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Compare rules with and without KVCrush: outputs, fidelity and time."""
    from benchmarks.kvcrush import config as sizes
    from benchmarks.kvcrush.quality import make_parts

    size = sizes.QUICK_KVCRUSH if quick else sizes.KVCrushBenchConfig()
    size = replace(size, model=settings.model)
    run_parts(
        "kvcrush",
        settings,
        make_parts,
        parts,
        sizes.configured(
            size,
            bases=bases,
            tasks=tasks,
            budget=budget,
            prompts=prompts,
            dtype=settings.loading.dtype,
        ),
        text,
        out,
        quick=quick,
        as_json=as_json,
    )
