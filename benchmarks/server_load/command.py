"""`python -m benchmarks server-load`: thousands of streaming clients of `quire serve`."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.common.command import finish, show_parts
from benchmarks.common.flags import AsJson
from quire.cli.report import prepare_folder, print_json
from quire.layout.extras import require_extra


def server_load(
    *,
    clients: Annotated[
        int | None, typer.Option(min=10, help="Streaming clients at once; default: 1,000.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=2, help="Rounds of all clients; default: 3.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for tables (Markdown, CSV), pictures and the result as JSON."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="40 clients. No claims.")] = False,
    as_json: AsJson = False,
) -> None:
    """Serve quire-tiny to many streaming clients at once, a tenth of which disconnect.

    Counts finished, disconnected, refused and lost clients, and reports times to first token, the
    KV bytes that are left after each round, and the growth of the server's resident memory. The
    last round is sent to a server with a limited queue, which refuses clients.
    """
    from benchmarks.common.command import run_named
    from benchmarks.server_load.part import QUICK_LOAD, LoadConfig, run_load

    if out is not None:
        require_extra("report", "--out")
        prepare_folder(out)
    config = QUICK_LOAD if quick else LoadConfig()
    config = replace(config, clients=clients or config.clients, rounds=rounds or config.rounds)
    results, claims = show_parts(run_named(("load",), {"load": run_load}, config))
    run = finish("server-load", results, claims, asdict(config), out, quick=quick)
    if as_json:
        print_json(run)
