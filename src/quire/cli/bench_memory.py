"""`quire bench memory`: what KV memory costs and saves, one table after the other."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quire.cli.common import AsJson, Threads, use_threads
from quire.cli.out_folder import prepare_folder, require_matplotlib, write_files
from quire.cli.report import envelope

if TYPE_CHECKING:
    from quire.bench.memory.config import MemoryBenchConfig
    from quire.bench.memory.result import PartResult


def memory(
    *,
    parts: Annotated[
        str,
        typer.Option(
            help="Only these, with commas: waste, pages, watermarks, beam, swap, prefix, cache, "
            "allocator, reuse, fairness."
        ),
    ] = "",
    trace: Annotated[
        Path | None,
        typer.Option(help="Conversations to simulate; without it, Azure's, which Quire brings."),
    ] = None,
    prefix_trace: Annotated[
        Path | None,
        typer.Option(
            help="Shared prefixes to simulate, as Mooncake writes them; without it, the first "
            "2,000 requests of its conversation trace."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for tables (Markdown, CSV), pictures and the result as JSON."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few requests and short prompts: tries it out.")
    ] = False,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Measure the KV memory: waste, sharing, watermarks, preemption, prefixes, fairness.

    Some parts run the engine on random weights; others simulate recorded requests on the engine's
    scheduler and memory.
    """
    import torch

    from quire.bench.memory.parts import parts_of

    names = parts_of(parts)
    if out is not None:
        require_matplotlib("--out")
        prepare_folder(out)
    use_threads(threads)
    config = _config(trace, prefix_trace, quick=quick)
    results = _results(names, config)
    claims = {name: value for r in results.values() for name, value in r.claims.items()}
    arms = {name: result.to_json() for name, result in results.items()}
    run = envelope("bench memory", claims, arms, _used(config, torch.get_num_threads()))
    if out is not None:
        write_files(out, _files(results, run))
        typer.echo(f"written: {out}")
    if as_json:
        typer.echo(json.dumps(run))


def _results(names: Sequence[str], config: "MemoryBenchConfig") -> "dict[str, PartResult]":
    """Run the parts; each is shown as soon as it is done."""
    from quire.bench.memory.parts import run_parts
    from quire.bench.memory.tables import plain

    results = {}
    for name, result in run_parts(names, config):
        results[name] = result
        typer.echo("\n\n".join(plain(table) for table in result.tables))
        typer.echo(f"({name}: {result.seconds:.1f} s)\n")
    return results


def _config(trace: Path | None, prefix_trace: Path | None, *, quick: bool) -> "MemoryBenchConfig":
    from quire.bench.memory.config import QUICK_MEMORY, MemoryBenchConfig

    config = QUICK_MEMORY if quick else MemoryBenchConfig()
    simulated = replace(
        config.simulated, trace=str(trace or ""), prefix_trace=str(prefix_trace or "")
    )
    return replace(config, simulated=simulated)


def _used(config: "MemoryBenchConfig", threads: int) -> dict[str, object]:
    """The configuration; of files their names, which mean something elsewhere too."""
    used: dict[str, object] = asdict(config)
    simulated = asdict(config.simulated)
    for name in ("trace", "prefix_trace"):
        simulated[name] = Path(simulated[name]).name
    return used | {"simulated": simulated, "threads": threads}


def _files(results: Mapping[str, "PartResult"], run: Mapping[str, object]) -> dict[str, bytes]:
    from quire.bench.memory.charts import svg
    from quire.bench.memory.tables import as_csv, markdown

    tables = [table for result in results.values() for table in result.tables]
    charts = [chart for result in results.values() for chart in result.charts]
    page = "# KV memory, measured\n\n" + "\n".join(markdown(table) for table in tables)
    files = {"memory.json": (json.dumps(run, indent=2) + "\n").encode(), "memory.md": page.encode()}
    files |= {f"{table.name}.csv": as_csv(table).encode() for table in tables}
    return files | {f"{chart.name}.svg": svg(chart) for chart in charts}
