"""`python -m benchmarks offload`: variants of a decode step with KV in host memory."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Annotated

import typer

from benchmarks.common.command import run_command
from benchmarks.common.flags import AsJson, Out, parts_option, quick_option
from benchmarks.common.result import PartResult
from benchmarks.offload.config import QUICK_OFFLOAD, OffloadBenchConfig
from benchmarks.offload.engine import run_engine, run_engine_gain, run_sparse, run_sparse_memory
from benchmarks.offload.restore import run_restore
from quire.cli.common import use_threads

PARTS: Mapping[str, Callable[[OffloadBenchConfig], PartResult]] = {
    "restore": run_restore,
    "engine": run_engine,
    "engine_gain": run_engine_gain,
    "sparse": run_sparse,
    "sparse_memory": run_sparse_memory,
}


def offload(
    *,
    parts: Annotated[str, parts_option(*PARTS)] = "",
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Rounds of the part restore; default: 5.")
    ] = None,
    out: Out = None,
    quick: Annotated[bool, quick_option("Fewer tokens and rounds.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare prefetch and partial recompute for decoding with KV in host memory.

    The part restore loads prefixes from a slowed Redis server. The other parts run engines. torch
    uses one thread. The link uses another core.
    """
    config = QUICK_OFFLOAD if quick else OffloadBenchConfig()
    config = replace(config, repeats=repeats or config.repeats)
    use_threads(1)
    used = asdict(config)
    run_command("offload", PARTS, parts, config, used, out, quick=quick, as_json=as_json)
