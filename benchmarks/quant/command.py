"""`python -m benchmarks quant`: bytes, time and quality of KV codecs."""

from typing import Annotated

import typer

from benchmarks.common.flags import AsJson, parts_option
from benchmarks.quality.command import Out, Prompts, Quick, Text, run_parts
from quire.cli.options import MODEL
from quire.cli.settings import Settings, with_settings


@with_settings(MODEL)
def quant(  # noqa: PLR0913 - one parameter per option
    settings: Settings,
    *,
    parts: Annotated[
        str, parts_option("capacity", "attention", "throughput", "quality", "orderings", "eviction")
    ] = "",
    codecs: Annotated[
        str,
        typer.Option(
            help="Codecs of the parts attention, throughput and quality, separated by "
            "semicolons: 'int8; int8/int4:group=32'."
        ),
    ] = "",
    batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences of the part attention; default: 32.")
    ] = None,
    prompts: Prompts = None,
    text: Text = None,
    out: Out = None,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Compare KV codecs: bytes, attention, throughput, fidelity and tasks."""
    from benchmarks.quant.config import configured
    from benchmarks.quant.quality import make_parts

    run_parts(
        "quant",
        settings,
        make_parts,
        parts,
        configured(settings, codecs, batch, prompts, quick=quick),
        text,
        out,
        quick=quick,
        as_json=as_json,
    )
