"""`python -m benchmarks overhead`: fraction of a decode step spent on bookkeeping."""

from dataclasses import asdict, replace
from typing import Annotated

import typer

from benchmarks.common.command import QUICK_NOTE
from benchmarks.common.flags import AsJson, Threads
from quire.cli.common import use_threads
from quire.cli.report import envelope, print_json


def overhead(
    *,
    rows: Annotated[int, typer.Option(min=1, help="Number of decoding sequences.")] = 256,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 512,
    quick: Annotated[
        bool, typer.Option("--quick", help="An eighth of the rows and of the lengths. No claims.")
    ] = False,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Measure the fraction of a decode step spent on bookkeeping outside the model."""
    import torch

    from benchmarks.overhead.bench import OverheadConfig, measure_overhead, summarise

    use_threads(threads)
    config = OverheadConfig(rows=rows, prompt_tokens=prompt_tokens)
    if quick:
        config = replace(config, rows=max(1, rows // 8), prompt_tokens=max(1, prompt_tokens // 8))
    results = []
    for result in measure_overhead(config):
        results.append(result)
        typer.echo(
            f"step {result['step_s'] * 1e3:.1f} ms, schedule {result['schedule_s'] * 1e3:.2f} ms, "
            f"prepare {result['prepare_s'] * 1e3:.2f} ms: {result['share']:.2%} bookkeeping"
        )
    claims = summarise(results)
    typer.echo(f"bookkeeping takes {claims['bookkeeping_share']:.2%} of a step (median)")
    if quick:
        typer.echo(QUICK_NOTE)
    if as_json:
        arms = {"overhead": results}
        used = asdict(config) | {"threads": torch.get_num_threads()}
        print_json(envelope("bench overhead", claims, arms, used, quick=quick))
