"""`quire bench`: measures of speed, each with a JSON object as its last line."""

import json
from dataclasses import asdict, replace
from typing import Annotated

import typer

from quire.cli.bench_batch_max import batch_max
from quire.cli.bench_batch_plan import batch_plan
from quire.cli.bench_device import device
from quire.cli.bench_eviction import eviction
from quire.cli.bench_invariant import invariant
from quire.cli.bench_kvcrush import kvcrush
from quire.cli.bench_memory import memory
from quire.cli.bench_offload import offload
from quire.cli.bench_parts import QUICK_NOTE
from quire.cli.bench_prefill import prefill
from quire.cli.bench_quant import quant
from quire.cli.bench_rebatch import rebatch
from quire.cli.bench_soak import soak
from quire.cli.bench_stack import stack
from quire.cli.bench_throughput import throughput
from quire.cli.common import AsJson, Threads, use_threads
from quire.cli.report import envelope

bench_app = typer.Typer(no_args_is_help=True, help="Measure speed.")
bench_app.command()(throughput)
bench_app.command()(prefill)
bench_app.command()(invariant)
bench_app.command()(soak)
bench_app.command()(memory)
bench_app.command("batch-max")(batch_max)
bench_app.command()(eviction)
bench_app.command()(kvcrush)
bench_app.command()(quant)
bench_app.command()(rebatch)
bench_app.command()(stack)
bench_app.command()(offload)
bench_app.command()(device)
bench_app.command("batch-plan")(batch_plan)


@bench_app.command()
def overhead(
    *,
    rows: Annotated[int, typer.Option(min=1, help="Sequences that decode together.")] = 256,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of each prompt.")] = 512,
    quick: Annotated[
        bool, typer.Option("--quick", help="An eighth of rows and lengths. No claims.")
    ] = False,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Measure how much of a decode step is bookkeeping and not the model."""
    import torch

    from quire.bench.overhead import OverheadConfig, measure_overhead, summarise

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
        typer.echo(json.dumps(envelope("bench overhead", claims, arms, used, quick=quick)))
