"""`python -m benchmarks serve`: tokens per second of the server over the offline engine."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.common.command import finish, names_of, run_named, show_parts
from benchmarks.common.flags import AsJson, Threads
from quire.cli.common import use_threads
from quire.cli.report import prepare_folder, print_json
from quire.layout.extras import require_extra


def serve(  # noqa: PLR0913 - one parameter per option
    *,
    models: Annotated[
        str, typer.Option(help="Models: 125m, quire-tiny, or other shapes; default: both.")
    ] = "125m,quire-tiny",
    streams: Annotated[int | None, typer.Option(min=1, help="Streams; default: 64.")] = None,
    input_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of each prompt; default: 128.")
    ] = None,
    output_len: Annotated[
        int | None, typer.Option(min=2, help="Generated tokens per prompt; default: 128.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds; default: 5.")] = None,
    serve_option: Annotated[
        list[str] | None, typer.Option(help="Further argument of quire serve. Can be repeated.")
    ] = None,
    files: Annotated[Path, typer.Option(help="Folder of the written models.")] = Path(
        "build/serve"
    ),
    out: Annotated[
        Path | None, typer.Option(help="Folder for tables (Markdown, CSV) and the result as JSON.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="quire-tiny and few short streams. No claims.")
    ] = False,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Run the same requests through `quire serve` and through the offline engine, in turn.

    The claim serve_over_offline is the ratio of output tokens per second. The client of the server
    runs on the same cores.
    """
    from benchmarks.common.workload import SHAPES
    from benchmarks.serve.model_files import PACKAGED
    from benchmarks.serve.part import QUICK_SERVE, ServeConfig, run_serve, with_options

    if out is not None:
        require_extra("report", "--out")
        prepare_folder(out)
    use_threads(threads)
    names = names_of(models, {**SHAPES, PACKAGED: None}, "model")
    config = with_options(
        QUICK_SERVE if quick else ServeConfig(models=names),
        streams=streams,
        input_tokens=input_len,
        output_tokens=output_len,
        rounds=rounds,
        files=files,
        serve_options=tuple(serve_option or ()),
    )
    results, claims = show_parts(run_named(("serve",), {"serve": run_serve}, config))
    used = asdict(config) | {"files": str(config.files), "threads": threads}
    run = finish("serve", results, claims, used, out, quick=quick)
    if as_json:
        print_json(run)
