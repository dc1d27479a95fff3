"""`python -m benchmarks invariant`: cost of `--batch-invariant`."""

from dataclasses import asdict, replace
from typing import Annotated

import typer

from benchmarks.common.command import QUICK_NOTE
from quire.cli.common import AsJson, Threads, use_threads
from quire.cli.json_output import print_json
from quire.cli.report import envelope
from quire.cli.tables import show_table

PHASES = ("prefill", "decode")


def invariant(
    *,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 512,
    new_tokens: Annotated[int, typer.Option(min=2, help="Generated tokens per prompt.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Measured rounds.")] = 5,
    quick: Annotated[
        bool, typer.Option("--quick", help="A tiny model and short prompts. No claims.")
    ] = False,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Compare the speed of 1, 8 and 32 sequences with and without --batch-invariant."""
    import torch

    from benchmarks.invariant.bench import (
        QUICK_INVARIANT,
        InvariantConfig,
        measure_invariant,
        summarise,
    )

    use_threads(threads)
    config = replace(
        InvariantConfig(), prompt_tokens=prompt_tokens, new_tokens=new_tokens, repeats=repeats
    )
    if quick:
        config = QUICK_INVARIANT
    found = []
    for speeds in measure_invariant(config):
        found.append(speeds)
        typer.echo(
            f"{speeds.rows:3d} rows, {speeds.arm:9s}: prefill {speeds.prefill:9.1f} tokens/s, "
            f"decode {speeds.decode:8.1f} tokens/s"
        )
    claims = summarise(found)
    table = [
        (f"{rows}", *(f"{claims[f'invariant_over_plain_{phase}_{rows}']:.2f}" for phase in PHASES))
        for rows in config.rows
    ]
    show_table("Speed with --batch-invariant over speed without", ("rows", *PHASES), table)
    if quick:
        typer.echo(QUICK_NOTE)
    if as_json:
        used = asdict(config) | {"threads": torch.get_num_threads()}
        arms = {"rounds": [asdict(speeds) for speeds in found]}
        print_json(envelope("bench invariant", claims, arms, used, quick=quick))
