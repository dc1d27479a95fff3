"""Shared code of commands that run a benchmark in named parts.

A command runs the selected parts, times each part, prints its tables and ends with one JSON object.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TypeVar

import typer

from benchmarks.common.result import PartResult
from quire.cli.report import envelope, prepare_folder, print_json, write_files
from quire.cli.tables import show_table
from quire.errors import ConfigError, UnknownName
from quire.layout.extras import require_extra

QUICK_NOTE = (
    "--quick ran small shapes: the command works, and its figures support no claim about full ones."
)


def show_parts(
    found: Iterable[tuple[str, PartResult]],
) -> tuple[dict[str, PartResult], dict[str, int | float]]:
    """Print the tables of each part when the part ends.

    Returns:
        The results of the parts by name, and the claims of all parts.
    """
    from benchmarks.common.rendering import shown

    results: dict[str, PartResult] = {}
    claims: dict[str, int | float] = {}
    for name, result in found:
        results[name] = result
        claims |= result.claims
        for table in result.tables:
            show_table(table.caption, table.columns, [[*map(shown, row)] for row in table.rows])
        typer.echo(f"({name}: {result.seconds:.1f} s)\n")
    return results, claims


def finish(
    bench: str,
    results: Mapping[str, PartResult],
    claims: Mapping[str, int | float],
    config: Mapping[str, object],
    out: Path | None,
    *,
    quick: bool = False,
) -> dict[str, object]:
    """Wrap the results, and write them if an output folder is given.

    Args:
        bench: name of the command of `python -m benchmarks`.
        results: results of the parts by name.
        claims: claims of all parts.
        config: every option as resolved.
        out: output folder; None: do not write files.
        quick: whether small shapes were run; their results support no claims.

    Returns:
        The run as a JSON object, for the last line of the output.
    """
    if quick:
        results = {name: replace(result, claims={}) for name, result in results.items()}
        typer.echo(QUICK_NOTE)
    arms = {name: result.to_json() for name, result in results.items()}
    run = envelope(f"bench {bench}", claims, arms, config, quick=quick)
    if out is not None:
        write_files(out, part_files(bench, results, run))
        typer.echo(f"written: {out}")
    return run


def part_files(
    bench: str, results: Mapping[str, PartResult], run: Mapping[str, object]
) -> dict[str, bytes]:
    """Tables, pictures and the run as file contents by file name."""
    from benchmarks.common.rendering import as_csv, report, svg

    tables = [table for result in results.values() for table in result.tables]
    pictures = [picture for result in results.values() for picture in result.charts]
    files = {
        f"{bench}.json": (json.dumps(run, indent=2) + "\n").encode(),
        f"{bench}.md": report(bench, tables).encode(),
    }
    files |= {f"{table.name}.csv": as_csv(table).encode() for table in tables}
    return files | {f"{picture.name}.svg": svg(picture) for picture in pictures}


Config = TypeVar("Config")


def run_command(  # noqa: PLR0913 - all that a command resolved
    bench: str,
    parts: Mapping[str, Callable[[Config], PartResult]],
    names: str,
    config: Config,
    used: Mapping[str, object],
    out: Path | None,
    *,
    quick: bool,
    as_json: bool,
) -> None:
    """Run the selected parts and print their tables and, with `as_json`, the result.

    Args:
        bench: name of the command of `python -m benchmarks`.
        parts: functions that run a part, by name.
        names: comma-separated names of the selected parts; "": all.
        config: configuration of all parts.
        used: every option as resolved.
        out: output folder; None: do not write files.
        quick: whether small shapes are run.
        as_json: whether the last line is the result as JSON.
    """
    import torch

    selected = names_of(names, parts)
    if out is not None:
        require_extra("report", "--out")
        prepare_folder(out)
    results, claims = show_parts(run_named(selected, parts, config))
    used = {**used, "threads": torch.get_num_threads()}
    run = finish(bench, results, claims, used, out, quick=quick)
    if as_json:
        print_json(run)


def names_of(text: str, known: Mapping[str, object], what: str = "part") -> tuple[str, ...]:
    """Parse comma-separated names and return them in the order of `known`; "" selects all.

    Args:
        text: the comma-separated names.
        known: all objects by name, in the order in which they run.
        what: the kind of object, for error messages.

    Raises:
        UnknownName: a name is not in `known`.
        ConfigError: a name is given twice.
    """
    if not text.strip():
        return tuple(known)
    requested = [name.strip() for name in text.split(",")]
    for name in requested:
        if name not in known:
            raise UnknownName(what, name, known)
    if len(set(requested)) != len(requested):
        raise ConfigError(f"expected each {what} once, got {text!r}")
    return tuple(name for name in known if name in requested)


def run_named(
    names: Sequence[str], parts: Mapping[str, Callable[[Config], PartResult]], config: Config
) -> Iterator[tuple[str, PartResult]]:
    """Run parts one after the other, and yield the timed result of each.

    Args:
        names: names of the selected parts.
        parts: functions that run a part, by name.
        config: configuration of all parts.
    """
    for name in names:
        started_s = perf_counter()
        result = parts[name](config)
        yield name, replace(result, seconds=perf_counter() - started_s)
