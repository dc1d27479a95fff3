"""`python -m benchmarks batch-max`: eviction during prefill, and its baselines."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Annotated

import typer

from benchmarks.batch_max.config import QUICK_BATCH_MAX, BatchMaxConfig
from benchmarks.batch_max.speed import run_speed
from benchmarks.common.command import run_command
from benchmarks.common.flags import AsJson, Out, Threads, quick_option
from benchmarks.common.result import PartResult
from quire.cli.common import use_threads
from quire.layout.config import dtype_bytes

PARTS: Mapping[str, Callable[[BatchMaxConfig], PartResult]] = {"speed": run_speed}


def batch_max(
    *,
    repeats: Annotated[
        int,
        typer.Option(
            min=1, help="Rounds of the claimed arms, in turn; other arms run in the first round."
        ),
    ] = 5,
    dtype: Annotated[str, typer.Option(help="Type of weights and KV.")] = "bfloat16",
    out: Out = None,
    quick: Annotated[bool, quick_option("A quarter of all lengths, one round.")] = False,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Compare full KV, decode-only eviction and Batch-Max in equal KV memory.

    Batch-Max evicts during prefill, so that more prompts fit in memory at once. Its throughput is
    compared with decode-only eviction at a cap of 2, an upper bound for decode-only eviction.
    """
    dtype_bytes(dtype)  # refuses unknown types
    config = QUICK_BATCH_MAX if quick else BatchMaxConfig(repeats=repeats)
    config = replace(config, dtype=dtype)
    use_threads(threads)
    run_command("batch-max", PARTS, "", config, asdict(config), out, quick=quick, as_json=as_json)
