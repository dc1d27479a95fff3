"""`python -m benchmarks weights`: quality, bytes and decode time of weight codecs."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.common.cells import material_of
from benchmarks.common.command import finish, show_parts
from benchmarks.common.flags import AsJson
from benchmarks.common.graded_prompts import load
from quire.cli.options import MODEL
from quire.cli.report import prepare_folder, print_json
from quire.cli.settings import Settings, with_settings
from quire.layout.extras import require_extra

if TYPE_CHECKING:
    from benchmarks.weights.config import WeightsBenchConfig
    from quire.cli.options import WeightCodec
    from quire.models.loader import LoadedModel


@with_settings(MODEL)
def weights(
    settings: Settings,
    *,
    parts: Annotated[
        str, typer.Option(help="Comma-separated parts: quality, random, decode; default: all.")
    ] = "",
    prompts: Annotated[
        int | None, typer.Option(min=1, help="Prompts of each task; default: 100.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Text file to score; default: the books shipped with Quire.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for tables and the result. Finished cells of tasks are stored there, so "
            "that an interrupted run can continue."
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small shapes, few short prompts and texts. No claims.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare weight codecs: fidelity, tasks, bytes and decode steps."""
    from benchmarks.common.command import names_of, run_named
    from benchmarks.weights.parts import make_parts

    config = _config(settings, prompts, quick=quick)
    if out is not None:
        require_extra("report", "--out")
        prepare_folder(out)
    settings.set_threads()

    def load_codec(codec: "WeightCodec") -> "LoadedModel":
        return load(replace(settings, loading=replace(settings.loading, weight_codec=codec)))

    made = make_parts(material_of(settings, text, out), load_codec)
    results, claims = show_parts(run_named(names_of(parts, made), made, config))
    run = finish("weights", results, claims, _used(config, settings), out, quick=quick)
    if as_json:
        print_json(run)


def _config(settings: Settings, prompts: int | None, *, quick: bool) -> "WeightsBenchConfig":
    """Apply the given options; unset options keep their defaults."""
    from benchmarks.weights.config import QUICK_WEIGHTS, WeightsBenchConfig

    config = replace(QUICK_WEIGHTS if quick else WeightsBenchConfig(), model=settings.model)
    if prompts is not None:
        config = replace(config, tasks=replace(config.tasks, prompts=prompts))
    if settings.loading.dtype != "auto":
        config = replace(config, dtype=settings.loading.dtype)
    return config


def _used(config: "WeightsBenchConfig", settings: Settings) -> dict[str, object]:
    import torch

    return settings.as_dict() | asdict(config) | {"threads": torch.get_num_threads()}
