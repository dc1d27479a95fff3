"""`python -m benchmarks peers`: Quire and other engines on equal work, each in its own process."""

import shlex
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.common.command import finish, show_parts
from benchmarks.common.flags import AsJson, Threads, quick_option
from benchmarks.common.result import PartResult
from benchmarks.common.tables import show_claims
from quire.cli.common import use_threads
from quire.cli.report import commit, prepare_folder, print_json
from quire.layout.extras import require_extra

if TYPE_CHECKING:
    from benchmarks.peers.config import PeersConfig, Shape
    from benchmarks.peers.engines import Engine
    from benchmarks.peers.measures import Cell

SHAPES = "1x512+128,8x128+64,32x512+64,32x2048+64,trace,fixed:32x512+256"
QUICK_SHAPES, QUICK_MODELS = "2x64+8", "15m"


def peers(  # noqa: PLR0913 - one parameter per option
    *,
    models: Annotated[
        str, typer.Option(help="Comma-separated models: 15m, 125m, 1100m, tiny.")
    ] = "125m",
    shapes: Annotated[
        str,
        typer.Option(
            help="Comma-separated shapes: PROMPTSxPROMPT_TOKENS+NEW_TOKENS, with fixed: before it "
            "in a quarter of the KV memory, or trace."
        ),
    ] = SHAPES,
    engines: Annotated[
        str,
        typer.Option(
            help="Comma-separated engines beside Quire: hf_static, hf_cb, vllm, openvino, "
            "openvino_evict, openvino_kvcrush, llamacpp; default: all."
        ),
    ] = "",
    quire: Annotated[
        list[str] | None,
        typer.Option(
            help="Quire with options, as NAME=FLAGS: 'quire_int8=--weight-codec int8'. Can be "
            "repeated; claims use the first without and the first with --evict.",
        ),
    ] = None,
    environments: Annotated[
        Path, typer.Option(help="Folder with an environment per engine, made by make peers.")
    ] = Path("build/peers"),
    repeats: Annotated[int, typer.Option(min=1, help="Rounds.")] = 5,
    run_under: Annotated[
        str, typer.Option(help="Command that every process runs under, such as 'taskset -c 0-3'.")
    ] = "",
    judged: Annotated[
        int, typer.Option(min=0, help="Outputs of each engine whose regret is computed.")
    ] = 2,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for tables, pictures and finished cells (resumable)."),
    ] = None,
    quick: Annotated[bool, quick_option("A small model and few tokens, for a trial.")] = False,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Run equal work on Quire and on other CPU engines, interleaved, each in a new process.

    An engine that fails has a row with its error. `make peers` builds the environments.
    """
    import torch

    from benchmarks.peers.config import Eviction, PeersConfig, parse_shape
    from benchmarks.peers.engines import chosen_engines, default_quire, quire_engine

    use_threads(threads)
    if out is not None:
        require_extra("report", "--out")
        prepare_folder(out)
    eviction = Eviction()
    variants = tuple(map(quire_engine, quire)) if quire else default_quire()
    names = [name.strip() for name in engines.split(",") if name.strip()]
    chosen = chosen_engines(names, variants, eviction)
    default_shapes = quick and shapes == SHAPES
    wanted = QUICK_SHAPES if default_shapes else shapes
    config = PeersConfig(
        models=tuple((QUICK_MODELS if quick else models).split(",")),
        shapes=tuple(parse_shape(name.strip()) for name in wanted.split(",")),
        engines=tuple(engine.name for engine in chosen),
        environments=environments.resolve(),
        files=Path("build/peers-models").resolve(),
        repeats=1 if quick else repeats,
        threads=torch.get_num_threads(),
        dtype=usual_dtype(),
        run_under=tuple(shlex.split(run_under)),
        judged_prompts=judged,
        eviction=eviction,
    )
    if quick:
        chosen = installed(chosen, config)
    run = _measured(config, chosen, out, quick=quick)
    if as_json:
        print_json(run)


def _measured(
    config: "PeersConfig", engines: "tuple[Engine, ...]", out: Path | None, *, quick: bool
) -> dict[str, object]:
    """Run all parts, print their tables, and return the JSON object."""
    from benchmarks.peers.measures import worst_totals

    by_part: dict[tuple[str, Shape], dict[str, int | float]] = {}

    def parts() -> "Iterator[tuple[str, PartResult]]":
        for model, shape, name, result in _run_parts(config, engines, out):
            by_part[model, shape] = result.claims
            yield name, result

    results, claims = show_parts(parts())
    claims |= worst_totals(by_part)
    show_claims("Claims", claims)
    return finish("peers", results, claims, described(config, engines), out, quick=quick)


def _run_parts(
    config: "PeersConfig", engines: "tuple[Engine, ...]", out: Path | None
) -> "Iterator[tuple[str, Shape, str, PartResult]]":
    from time import perf_counter

    from benchmarks.peers.measures import Cells
    from benchmarks.peers.part import PeersPart

    cells = Cells(None if out is None else out / "cells.jsonl")
    for model in config.models:
        for shape in config.shapes:
            part = PeersPart(
                config=config,
                model=model,
                shape=shape,
                engines=engines,
                cells=cells,
                commit=commit(),
                show=show_cell,
            )
            started_s = perf_counter()
            result = part.run()
            yield model, shape, part.name, replace(result, seconds=perf_counter() - started_s)


def show_cell(cell: "Cell") -> None:
    """Print a finished cell."""
    key, run = cell.key, cell.measures
    where = f"{key.model} {key.shape}, round {key.round}, {key.engine}"
    if run is None:
        typer.echo(f"{where}: {cell.error}")
        return
    typer.echo(f"{where}: {run.total_s:.2f} s, {run.tokens_per_s:,.1f} tokens/s")


def described(config: "PeersConfig", engines: "tuple[Engine, ...]") -> dict[str, object]:
    """Every option as resolved, as JSON values."""
    return asdict(config) | {
        "environments": str(config.environments),
        "files": str(config.files),
        "shapes": [asdict(shape) | {"lengths": list(shape.lengths)} for shape in config.shapes],
        "engines": {engine.name: dict(engine.options) for engine in engines},
        "instructions": instructions(),
    }


def instructions() -> list[str]:
    """Instruction sets of this processor that matter for products."""
    from quire.cli.doctor import cpu_features

    cpuinfo = Path("/proc/cpuinfo")
    return cpu_features(cpuinfo.read_text(errors="replace")) if cpuinfo.is_file() else []


def usual_dtype() -> str:
    """The dtype float32 if this processor has no bfloat16 arithmetic."""
    return "bfloat16" if {"avx512_bf16", "amx_bf16"} & set(instructions()) else "float32"


def installed(engines: "tuple[Engine, ...]", config: "PeersConfig") -> "tuple[Engine, ...]":
    """Engines whose environment is built."""
    from benchmarks.peers.engines import python_of

    return tuple(e for e in engines if python_of(e, config.environments) is not None)
