"""`quire profile`: measure what this machine reads, copies and multiplies at most, and keep it."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from quire.cli.common import AsJson, Threads, use_threads
from quire.cli.report import envelope, this_machine


def profile(
    *,
    output: Annotated[
        Path | None,
        typer.Option(help="File to write. Default: quire/ceilings.json in the user's cache."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small buffers and shapes: tries it out, no ceilings.")
    ] = False,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Measure the ceilings of this machine once and store them.

    Read and copy bandwidth, matrix products by shape, and attention. A file holds for one
    processor, number of threads and torch version.
    """
    import torch

    from quire.bench.ceilings import QUICK_PROFILE, ProfileConfig, measure_ceilings
    from quire.plan.ceilings import default_path, write_ceilings

    # what a quick run finds are no ceilings: it never takes the place of those
    path = default_path(os.environ) if output is None and not quick else output
    use_threads(threads)
    config = QUICK_PROFILE if quick else ProfileConfig()
    machine = this_machine(torch.get_num_threads())
    ceilings = measure_ceilings(config, machine, progress=typer.echo)
    if path is not None:
        write_ceilings(ceilings, path)
        typer.echo(f"written: {path}")
    if as_json:
        claims = {
            "read_bytes_per_s": ceilings.read_bytes_per_s,
            "copy_bytes_per_s": ceilings.copy_bytes_per_s,
            "one_thread_read_bytes_per_s": ceilings.one_thread_read_bytes_per_s,
            "one_thread_copy_bytes_per_s": ceilings.one_thread_copy_bytes_per_s,
        }
        for dtype in config.dtypes:
            claims[f"{dtype}_flops_per_s"] = ceilings.peak_product_rate(dtype)
        for way, rate in ceilings.attention_bytes_per_s.items():
            claims[f"attention_{way.replace(' ', '_')}_bytes_per_s"] = rate
        used = asdict(config) | {
            "threads": machine.threads,
            "output": None if path is None else str(path),
        }
        arms = {"ceilings": asdict(ceilings)}
        typer.echo(json.dumps(envelope("profile", claims, arms, used)))
