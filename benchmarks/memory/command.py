"""`python -m benchmarks memory`: costs and savings of KV memory management, part by part."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.common.command import run_command
from benchmarks.common.flags import AsJson, Out, Threads
from quire.cli.common import use_threads

if TYPE_CHECKING:
    from benchmarks.memory.config import MemoryBenchConfig


def memory(
    *,
    parts: Annotated[
        str,
        typer.Option(
            help="Comma-separated parts: waste, pages, watermarks, beam, swap, prefix, cache, "
            "allocator, reuse, fairness; default: all."
        ),
    ] = "",
    trace: Annotated[
        Path | None,
        typer.Option(help="Trace of conversations to simulate; default: the shipped Azure trace."),
    ] = None,
    prefix_trace: Annotated[
        Path | None,
        typer.Option(
            help="Trace of shared prefixes in Mooncake's format; default: the first 2,000 "
            "requests of Mooncake's conversation trace."
        ),
    ] = None,
    out: Out = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Few requests and short prompts, for a trial. No claims."),
    ] = False,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Measure KV memory: waste, sharing, watermarks, preemption, prefixes and fairness.

    Some parts run the engine on random weights; others simulate recorded requests with the engine's
    scheduler and memory.
    """
    from benchmarks.memory.parts import PARTS

    use_threads(threads)
    config = _config(trace, prefix_trace, quick=quick)
    run_command("memory", PARTS, parts, config, _used(config), out, quick=quick, as_json=as_json)


def _config(trace: Path | None, prefix_trace: Path | None, *, quick: bool) -> "MemoryBenchConfig":
    from benchmarks.memory.config import QUICK_MEMORY, MemoryBenchConfig

    config = QUICK_MEMORY if quick else MemoryBenchConfig()
    simulated = replace(
        config.simulated, trace=str(trace or ""), prefix_trace=str(prefix_trace or "")
    )
    return replace(config, simulated=simulated)


def _used(config: "MemoryBenchConfig") -> dict[str, object]:
    """The configuration, with the base names of files."""
    used: dict[str, object] = asdict(config)
    simulated = asdict(config.simulated)
    for name in ("trace", "prefix_trace"):
        simulated[name] = Path(simulated[name]).name
    return used | {"simulated": simulated}
