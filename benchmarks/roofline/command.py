"""`python -m benchmarks roofline`: steps and their floors, for every instruction set found."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Annotated

import torch
import typer

from benchmarks.common.command import QUICK_NOTE
from benchmarks.common.flags import AsJson, Threads, quick_option
from benchmarks.common.tables import show_claims as show_table_of_claims
from benchmarks.roofline.cell import QUICK_CELL, CellConfig
from benchmarks.roofline.measured import Cell, Claims, claims_of
from quire.cli.common import use_threads
from quire.cli.report import envelope, print_json
from quire.errors import ConfigError, InvariantError, UnknownName
from quire.kernels.native.library import INSTRUCTION_SETS, MAX_CPU_ISA, NotLoaded, load_library

ALL = "all"
# environment of other libraries, so that they use no higher instruction set either
_ONE_DNN = {"plain": "SSE41", "avx2": "AVX2", "avx512": "AVX512_CORE_VNNI"}
_TORCH = {"plain": "default", "avx2": "avx2", "avx512": "avx512"}


def roofline(  # noqa: PLR0913 - one parameter per option
    *,
    model: Annotated[str, typer.Option(help="Shape of the model: 125m, 1100m, tiny.")] = "125m",
    instruction_sets: Annotated[
        str, typer.Option(help="Comma-separated: avx512_bf16, avx512, avx2; all: those found.")
    ] = ALL,
    weight_codecs: Annotated[
        str, typer.Option(help="Comma-separated codecs of linear layers.")
    ] = "auto,int8,int4",
    model_impls: Annotated[
        str,
        typer.Option(help="Comma-separated: auto, native, transformers; codecs: the first only."),
    ] = "auto,transformers",
    kv_codecs: Annotated[
        str, typer.Option(help="Comma-separated KV codecs; all but the first: weights as stored.")
    ] = "none",
    rows: Annotated[
        str, typer.Option(help="Comma-separated numbers of sequences of decode steps.")
    ] = "1,4,8,16,32",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 512,
    repeats: Annotated[int, typer.Option(min=1, help="Measured rounds of each cell.")] = 5,
    quick: Annotated[bool, quick_option("A tiny model and few tokens, for a trial.")] = False,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Measure steps by component, and compare them with the limits of this machine.

    The floor of a step is the larger of two times: its bytes over the measured read rate, and its
    FLOPs over the measured product rates of the arithmetic in use. The model has random weights in
    bfloat16. Each instruction set, weight codec and implementation runs in its own process.
    """
    use_threads(threads)
    base = (
        QUICK_CELL
        if quick
        else CellConfig(
            model=model, rows=_numbers(rows), prompt_tokens=prompt_tokens, rounds=repeats
        )
    )
    variants = list(
        _variants(
            replace(base, threads=threads),
            model_impls=_names(model_impls),
            weight_codecs=_names(weight_codecs),
            kv_codecs=_names(kv_codecs),
        )
    )
    found = []
    for name in sets_of(instruction_sets):
        for config in variants:
            found.append(measure_cell(config, name))
            typer.echo(cell_line(found[-1]))
    claims = claims_of(found)
    show_claims(claims)
    if quick:
        typer.echo(QUICK_NOTE)
    if as_json:
        arms = {
            "cells": [asdict(cell) for cell in found],
            "refused": [asdict(refused) for refused in claims.refused],
        }
        used = asdict(base) | {"threads": torch.get_num_threads()}
        print_json(envelope("bench roofline", claims.values, arms, used, quick=quick))


def sets_of(names: str) -> list[str]:
    """Instruction sets to measure, the highest first; `all` selects those that this CPU has.

    Raises:
        ConfigError: this CPU does not have a set.
        UnknownName: there is no such set.
    """
    library = load_library()
    best = 0 if isinstance(library, NotLoaded) else library.path
    usable = INSTRUCTION_SETS[min(best, 1) : best + 1][::-1]
    if names == ALL:
        return list(usable)
    for name in _names(names):
        if name not in INSTRUCTION_SETS:
            raise UnknownName("instruction set", name, (ALL, *INSTRUCTION_SETS))
        if name not in usable:
            raise ConfigError(f"this CPU has {', '.join(usable)}, not {name}: choose one of these")
    return sorted(_names(names), key=INSTRUCTION_SETS.index, reverse=True)


def measure_cell(config: CellConfig, instruction_set: str) -> Cell:
    """Measure a cell in a new process.

    Raises:
        InvariantError: the process failed.
    """
    command = [sys.executable, "-m", "benchmarks.roofline.cell", json.dumps(asdict(config))]
    done = subprocess.run(
        command,
        env={**os.environ, **environment_of(instruction_set)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise InvariantError(
            f"the process for {instruction_set} ended with {done.returncode}: {done.stderr[-2000:]}"
        )
    return Cell.from_json(json.loads(done.stdout.splitlines()[-1]))


def environment_of(instruction_set: str) -> dict[str, str]:
    """Environment variables that limit Quire, oneDNN and torch to an instruction set."""
    found = {MAX_CPU_ISA: instruction_set}
    for variable, names in (("ONEDNN_MAX_CPU_ISA", _ONE_DNN), ("ATEN_CPU_CAPABILITY", _TORCH)):
        if instruction_set in names:
            found[variable] = names[instruction_set]
    return found


def cell_line(cell: Cell) -> str:
    """Times of a cell's steps, and their ratios to the floor."""
    steps = "  ".join(
        f"{step.kind} {step.rows}: {step.step_s * 1e3:.2f} ms ({step.over_floor:.2f} x floor)"
        for step in cell.steps
    )
    return f"{cell.name}: {steps}"


def show_claims(claims: Claims) -> None:
    """Print the claims, and the reasons of those that are refused."""
    show_table_of_claims("Times of steps and their ratios to the floor", claims.values)
    for refused in claims.refused:
        typer.echo(f"{refused.claim}: refused. {refused.reason}", err=True)


def _variants(
    base: CellConfig,
    *,
    model_impls: tuple[str, ...],
    weight_codecs: tuple[str, ...],
    kv_codecs: tuple[str, ...],
) -> Iterator[CellConfig]:
    first = replace(base, implementation=model_impls[0], kv_codec=kv_codecs[0])
    for codec in weight_codecs:
        yield replace(first, weight_codec=codec)
    for impl in model_impls[1:]:
        yield replace(first, implementation=impl)
    for kv_codec in kv_codecs[1:]:
        yield replace(first, kv_codec=kv_codec)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def _numbers(text: str) -> tuple[int, ...]:
    """Parse comma-separated numbers above 0.

    Raises:
        ConfigError: not such numbers.
    """
    try:
        found = tuple(int(name) for name in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise ConfigError(f"expected numbers of sequences such as 1,4,32; got {text!r}")
    return found
