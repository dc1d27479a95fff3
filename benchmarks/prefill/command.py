"""`python -m benchmarks prefill`: prefill time by token budget of a step."""

from dataclasses import asdict, replace
from typing import Annotated

import typer

from benchmarks.common.command import QUICK_NOTE
from quire.cli.common import AsJson, Attention, Threads, use_threads
from quire.cli.report import envelope, print_json
from quire.cli.tables import seconds, show_table


def prefill(
    *,
    prompts: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 32,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 512,
    repeats: Annotated[int, typer.Option(min=1, help="Measured rounds.")] = 5,
    attention: Attention = "auto",
    quick: Annotated[
        bool, typer.Option("--quick", help="A tiny model, two budgets. No claims.")
    ] = False,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Prefill the same prompts with step budgets from 256 to 16,384 tokens."""
    import torch

    from benchmarks.common.workload import Workload
    from benchmarks.prefill.bench import QUICK_PREFILL, PrefillConfig, measure_prefill, summarise

    use_threads(threads)
    config = replace(QUICK_PREFILL, attention=attention)
    if not quick:
        work = Workload(prompts=prompts, prompt_tokens=prompt_tokens, new_tokens=1)
        config = PrefillConfig(workload=work, repeats=repeats, attention=attention)
    rounds = []
    for elapsed_s in measure_prefill(config):
        rounds.append(elapsed_s)
        typer.echo("  ".join(f"{budget}: {time_s:.2f} s" for budget, time_s in elapsed_s.items()))
    claims = summarise(rounds)
    rows = [
        (
            f"{budget:,}",
            seconds(claims[f"prefill_s_{budget}"]),
            f"{claims[f'over_best_{budget}']:.2f}",
        )
        for budget in config.budgets
    ]
    show_table("Prefill", ("tokens of a step", "median time", "over the best"), rows)
    if quick:
        typer.echo(QUICK_NOTE)
    if as_json:
        used = asdict(config) | {"threads": torch.get_num_threads()}
        print_json(envelope("bench prefill", claims, {"rounds": rounds}, used, quick=quick))
