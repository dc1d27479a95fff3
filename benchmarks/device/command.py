"""`python -m benchmarks device`: measured and expected cost of KV in host memory."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.common.command import finish, show_parts
from quire.cli.common import AsJson, Threads, use_threads
from quire.cli.report import prepare_folder, print_json
from quire.layout.extras import require_extra

if TYPE_CHECKING:
    from benchmarks.device.config import DeviceBenchConfig
    from benchmarks.device.shapes import DecodeCase


def device(  # noqa: PLR0913 - one parameter per option
    *,
    parts: Annotated[
        str,
        typer.Option(
            help="Comma-separated parts: link, products, together, step, sweep, codes, swap, "
            "host, refit, accuracy; default: all."
        ),
    ] = "",
    on: Annotated[
        str,
        typer.Option("--device", help="Device: auto (a GPU if there is one), cpu, cuda or cuda:N."),
    ] = "auto",
    models: Annotated[
        str,
        typer.Option(
            help="Comma-separated models of the parts step, sweep and codes; default: all."
        ),
    ] = "",
    rows: Annotated[
        int, typer.Option(min=0, help="Rows of a batch; default: 0, each model's own.")
    ] = 0,
    context: Annotated[
        int, typer.Option(min=0, help="Tokens of each row; default: 0, each model's own.")
    ] = 0,
    pinned: Annotated[
        str, typer.Option(help="Size of the host memory pool, such as 24GiB; pinned for a GPU.")
    ] = "",
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Repeats of each measurement; default: 5.")
    ] = None,
    folder: Annotated[
        str,
        typer.Option(help="Existing folder on the measured disk; default: a temporary folder."),
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="Folder for tables, pictures and the result as JSON.")
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Toy models and small copies, for a trial on a CPU. No claims."
        ),
    ] = False,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Measure copies, products and decode steps with KV in host memory, and compare predictions.

    The benchmark targets GPUs: real pinned copies and streams, random weights in real shapes. Rows
    of a batch that does not fit are halved. With --quick it also runs on a CPU, without measuring a
    link.
    """
    import torch

    from benchmarks.common.command import names_of, run_named
    from benchmarks.device.bench import DeviceBench
    from benchmarks.device.config import QUICK_DEVICE, DeviceBenchConfig
    from benchmarks.device.parts import PARTS
    from quire.layout.sizes import parse_size

    config = replace(QUICK_DEVICE if quick else DeviceBenchConfig(), device=on, folder=folder)
    names = names_of(parts, PARTS)
    if pinned:
        config = replace(config, pinned_bytes=parse_size(pinned))
    config = _batches(config, models, rows, context)
    config = replace(config, repeats=repeats or config.repeats)
    bench = DeviceBench.of(config)
    if out is not None:
        require_extra("report", "--out")
        prepare_folder(out)
    use_threads(threads)
    results, claims = show_parts(run_named(names, PARTS, bench))
    used = asdict(replace(config, folder=Path(folder).name)) | {"threads": torch.get_num_threads()}
    run = finish(
        "device", results, claims, used | {"machine_facts": bench.facts()}, out, quick=quick
    )
    if as_json:
        print_json(run)


def _batches(
    config: "DeviceBenchConfig", models: str, rows: int, context: int
) -> "DeviceBenchConfig":
    """Select the given models, and replace rows and contexts if given."""
    from benchmarks.common.command import names_of

    def sized(case: "DecodeCase") -> "DecodeCase":
        return replace(case, rows=rows or case.rows, context=context or case.context)

    by_model = {case.model: case for case in config.cases}
    return replace(
        config,
        cases=tuple(sized(by_model[name]) for name in names_of(models, by_model, "model")),
        grouped=sized(config.grouped),
        refit_case=sized(config.refit_case),
        accuracy_case=sized(config.accuracy_case),
    )
