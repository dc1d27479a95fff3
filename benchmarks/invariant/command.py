"""`python -m benchmarks invariant` and `differences`: the cost of `--batch-invariant`, and why."""

from dataclasses import asdict, replace
from typing import Annotated

import typer

from benchmarks.common.command import QUICK_NOTE
from benchmarks.common.flags import AsJson, Threads
from quire.cli.common import use_threads
from quire.cli.report import envelope, print_json
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


def differences(
    *,
    model: Annotated[str, typer.Option(help="Name or folder of the model.")] = "quire-tiny",
    quick: Annotated[
        bool, typer.Option("--quick", help="Two codecs, few requests, one seed. No claims.")
    ] = False,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Show how far answers move with other batches, preemption and prefix hits, in float32.

    Requests with random prompts (greedy, sampled with n=3, beams, penalties) run in ample memory
    and then with each cause. Columns: the largest difference of log-probabilities while tokens
    agree, outputs with other tokens, and preemptions or requests with cached tokens.
    """
    import torch

    from benchmarks.invariant.differences import (
        CAUSES,
        QUICK_DIFFERENCES,
        DifferencesConfig,
        measure_differences,
    )
    from quire.models.loader import load_model

    use_threads(threads)
    config = replace(QUICK_DIFFERENCES if quick else DifferencesConfig(), model=model)
    loaded = load_model(model, dtype="float32", device="cpu")
    rows, claims, arms = [], {}, {}
    for codec, rule, found in measure_differences(config, loaded):
        cells = [
            f"{one.logprob:.1e}, {one.outputs}/{one.of}, {one.events}" for one in found.values()
        ]
        rows.append((codec, rule, *cells))
        typer.echo("  ".join(rows[-1]))
        arms[f"{codec} {rule}"] = {cause: asdict(one) for cause, one in found.items()}
        for cause, one in found.items():
            name = f"{codec}_{rule.partition(':')[0]}_{cause.replace(' ', '_')}"
            claims[f"{name}_logprob"] = one.logprob
    show_table(
        "Differences from ample memory: log-probability, outputs with other tokens, events",
        ("codec", "rule", *CAUSES),
        rows,
    )
    if quick:
        typer.echo(QUICK_NOTE)
    if as_json:
        used = asdict(config) | {"threads": torch.get_num_threads()}
        print_json(envelope("bench differences", claims, arms, used, quick=quick))
