"""`python -m benchmarks eviction`: eviction rules compared by quality, bytes and time."""

from dataclasses import replace
from typing import Annotated

import typer

from benchmarks.common.flags import AsJson, parts_option
from benchmarks.quality.command import Out, Prompts, Quick, Text, run_parts
from quire.cli.options import MODEL
from quire.cli.settings import Settings, with_settings


@with_settings(MODEL)
def eviction(  # noqa: PLR0913 - one parameter per option
    settings: Settings,
    *,
    parts: Annotated[str, parts_option("quality", "perplexity", "kept", "cost", "ready")] = "",
    rules: Annotated[
        str,
        typer.Option(
            help="Comma-separated names, or rules with options separated by semicolons: "
            "'h2o; snapkv:window=16'. Default: the common rules; full always runs too."
        ),
    ] = "",
    tasks: Annotated[
        str, typer.Option(help="Comma-separated tasks of the part quality; default: six.")
    ] = "",
    budgets: Annotated[
        str,
        typer.Option(
            help="Comma-separated caps, in percent of the longest prompt; default: 50,25."
        ),
    ] = "",
    when: Annotated[
        str,
        typer.Option(
            help="Comma-separated schedules of the part quality; default: "
            "prefill_end,prefill_and_decode."
        ),
    ] = "",
    prompts: Prompts = None,
    text: Text = None,
    out: Out = None,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Compare eviction rules: correct answers, perplexity, retained positions and cost."""
    from benchmarks.eviction import config as sizes
    from benchmarks.eviction.quality import make_parts

    size = sizes.QUICK_EVICTION if quick else sizes.EvictionBenchConfig()
    size = replace(size, model=settings.model)
    run_parts(
        "eviction",
        settings,
        make_parts,
        parts,
        sizes.configured(
            size, rules=rules, tasks=tasks, budgets=budgets, when=when, prompts=prompts
        ),
        text,
        out,
        quick=quick,
        as_json=as_json,
    )
