"""`python -m benchmarks quant`: bytes, time and quality of KV codecs."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.common.cells import material_of
from benchmarks.common.command import finish, show_parts
from benchmarks.common.flags import AsJson
from quire.cli.options import MODEL
from quire.cli.report import prepare_folder, print_json
from quire.cli.settings import Settings, with_settings
from quire.layout.extras import require_extra

if TYPE_CHECKING:
    from benchmarks.quant.config import QuantBenchConfig


@with_settings(MODEL)
def quant(  # noqa: PLR0913 - one parameter per option
    settings: Settings,
    *,
    parts: Annotated[
        str,
        typer.Option(
            help="Comma-separated parts: capacity, attention, throughput, bandwidth, quality, "
            "orderings, eviction; default: all."
        ),
    ] = "",
    codecs: Annotated[
        str,
        typer.Option(
            help="Codecs of the parts attention, throughput, bandwidth and quality, separated by "
            "semicolons: 'int8; int8/int4:group=32'."
        ),
    ] = "",
    batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences of the part attention; default: 32.")
    ] = None,
    prompts: Annotated[
        int | None, typer.Option(min=1, help="Prompts of each task; default: 100.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Text file to score; default: the books shipped with Quire.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for tables, pictures and the result. Finished cells of tasks are stored "
            "there, so that an interrupted run can continue."
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small shapes, few short prompts and texts. No claims.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare KV codecs: bytes, attention, throughput, fidelity and tasks."""
    from benchmarks.common.command import names_of, run_named
    from benchmarks.quant.parts import make_parts

    config = _config(settings, codecs, batch, prompts, quick=quick)
    if out is not None:
        require_extra("report", "--out")
        prepare_folder(out)
    settings.set_threads()
    made = make_parts(material_of(settings, text, out))
    results, claims = show_parts(run_named(names_of(parts, made), made, config))
    run = finish("quant", results, claims, _used(config, settings), out, quick=quick)
    if as_json:
        print_json(run)


def _config(
    settings: Settings, codecs: str, batch: int | None, prompts: int | None, *, quick: bool
) -> "QuantBenchConfig":
    """Apply the given options; unset options keep their defaults.

    Raises:
        UnknownName: no such codec.
        ConfigError: invalid option of a codec.
    """
    from benchmarks.quant.config import QUICK_QUANT, QuantBenchConfig
    from quire.layout.kv_format import fill_plain, read_format

    config = replace(QUICK_QUANT if quick else QuantBenchConfig(), model=settings.model)
    if batch is not None:
        shape = replace(config.attention.shape, batch=batch)
        config = replace(config, attention=replace(config.attention, shape=shape))
    if prompts is not None:
        config = replace(config, tasks=replace(config.tasks, prompts=prompts))
    if settings.loading.dtype != "auto" and not quick:
        throughput = replace(config.throughput, dtype=settings.loading.dtype)
        config = replace(config, throughput=throughput)
    if not codecs.strip():
        return config
    selected = tuple(codec.strip() for codec in codecs.split(";"))
    for codec in selected:
        read_format(fill_plain(codec, "float32"))
    return replace(
        config,
        attention=replace(config.attention, codecs=selected),
        bandwidth=replace(config.bandwidth, codecs=selected),
        throughput=replace(config.throughput, codecs=selected),
        texts=replace(config.texts, codecs=selected),
        task_codecs=selected,
    )


def _used(config: "QuantBenchConfig", settings: Settings) -> dict[str, object]:
    import torch

    return settings.as_dict() | asdict(config) | {"threads": torch.get_num_threads()}
