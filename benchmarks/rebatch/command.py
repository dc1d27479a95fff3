"""`python -m benchmarks rebatch`: batches that change while they run, compared with static ones."""

from dataclasses import asdict, replace
from typing import Annotated

import typer

from benchmarks.common.command import run_command
from benchmarks.common.flags import AsJson, Out, Threads, parts_option, quick_option
from quire.cli.common import use_threads


def rebatch(  # noqa: PLR0913 - one parameter per option
    *,
    parts: Annotated[str, parts_option("w1", "w2", "trace")] = "",
    model: Annotated[
        str | None, typer.Option(help="Shape: 125m, small, tiny or wide; default: wide.")
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(
            min=0.005,
            max=100,
            help="Factor on the lengths of w1; default: 0.04.",
        ),
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Rounds of all arms; default: 3.")
    ] = None,
    clock: Annotated[
        str, typer.Option(help="Clock: wall, or cpu for a trial on a busy machine.")
    ] = "wall",
    out: Out = None,
    quick: Annotated[bool, quick_option("Few short queries, a tiny model, one round.")] = False,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Run mixed queries in static batches, in dense batches that change, and in paged batches.

    w1 and w2 are BATON's workloads with scaled lengths, compared with ideal list scheduling of the
    same lengths. trace has recorded arrivals, some urgent, and a small KV memory.
    """
    from benchmarks.common.models import SHAPES
    from benchmarks.rebatch.config import QUICK_REBATCH, RebatchConfig
    from benchmarks.rebatch.parts import PARTS
    from quire.errors import UnknownName

    for what, name, known in (("model", model, SHAPES), ("clock", clock, ("wall", "cpu"))):
        if name is not None and name not in known:
            raise UnknownName(what, name, known)
    use_threads(threads)
    config = QUICK_REBATCH if quick else RebatchConfig()
    config = replace(
        config,
        model=model or config.model,
        w1=replace(config.w1, scale=scale or config.w1.scale),
        repeats=repeats or config.repeats,
        clock=clock,
    )
    used = asdict(config)
    run_command("rebatch", PARTS, parts, config, used, out, quick=quick, as_json=as_json)
