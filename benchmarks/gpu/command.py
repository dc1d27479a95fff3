"""`python -m benchmarks gpu`: kernels and steps on a GPU, against its measured limits."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Annotated

import typer

from benchmarks.common.command import names_of, run_command
from benchmarks.common.flags import AsJson, Out, Threads, parts_option, quick_option
from benchmarks.common.result import PartResult
from benchmarks.gpu.bench import GpuBench
from benchmarks.gpu.compute import run_equality, run_kernels, run_prefill, run_step
from benchmarks.gpu.config import QUICK_GPU, GpuConfig
from benchmarks.gpu.kvpr import run_kvpr
from benchmarks.gpu.link import run_link
from benchmarks.gpu.memory import run_batch_max, run_offload, run_rebatch
from benchmarks.gpu.others import OTHERS
from quire.cli.common import use_threads

PARTS: Mapping[str, Callable[[GpuBench], PartResult]] = {
    "equality": run_equality,
    "kernels": run_kernels,
    "step": run_step,
    "prefill": run_prefill,
    "batch_max": run_batch_max,
    "link": run_link,
    "offload": run_offload,
    "kvpr": run_kvpr,
    "rebatch": run_rebatch,
}


def gpu(  # noqa: PLR0913 - one parameter per option
    *,
    parts: Annotated[str, parts_option(*PARTS)] = "",
    on: Annotated[
        str,
        typer.Option("--device", help="Device: auto (a GPU if there is one), cpu, cuda or cuda:N."),
    ] = "auto",
    attention: Annotated[
        str, typer.Option(help="Attention backend; default: auto, as an engine selects it.")
    ] = "auto",
    rows: Annotated[
        int | None, typer.Option(min=1, help="Rows of the parts kernels and step; default: 64.")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Repeats of each measurement; default: 5.")
    ] = None,
    others: Annotated[
        str, typer.Option(help="Comma-separated other engines: static, continuous, vllm, or none.")
    ] = "static,continuous,vllm",
    out: Out = None,
    quick: Annotated[bool, quick_option("Toy shapes, for a trial on any machine.")] = False,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Measure attention, decode steps, prefill, eviction, offload and batching on a GPU.

    Weights are random, in real shapes. Limits of the device are measured in the same run: the
    bandwidth of a copy and the rate of a matrix product. --quick runs on a CPU too.
    """
    config = replace(QUICK_GPU if quick else GpuConfig(), device=on, attention=attention)
    config = replace(
        config,
        rows=rows or config.rows,
        repeats=repeats or config.repeats,
        others=() if others == "none" else names_of(others, OTHERS, "engine"),
    )
    bench = GpuBench.of(config)
    use_threads(threads)
    used = asdict(config) | {"machine_facts": bench.facts()}
    run_command("gpu", PARTS, parts, bench, used, out, quick=quick, as_json=as_json)
