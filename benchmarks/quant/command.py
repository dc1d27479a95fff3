"""`python -m benchmarks quant`: bytes and time of KV codecs."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Annotated

import typer

from benchmarks.common.command import run_command
from benchmarks.common.flags import AsJson, Out, Threads, parts_option, quick_option
from benchmarks.common.result import PartResult
from benchmarks.quant.attention import run_attention
from benchmarks.quant.capacity import run_capacity
from benchmarks.quant.config import QuantBenchConfig, configured
from benchmarks.quant.throughput import run_throughput
from quire.cli.common import use_threads

PARTS: Mapping[str, Callable[[QuantBenchConfig], PartResult]] = {
    "capacity": lambda config: run_capacity(config.capacity),
    "attention": lambda config: run_attention(config.attention),
    "throughput": lambda config: run_throughput(config.throughput),
}


def quant(  # noqa: PLR0913 - one parameter per option
    *,
    parts: Annotated[str, parts_option(*PARTS)] = "",
    codecs: Annotated[
        str,
        typer.Option(
            help="Codecs of the parts attention and throughput, separated by semicolons: "
            "'int8; int8/int4:group=32'."
        ),
    ] = "",
    batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences of the part attention; default: 32.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Type of weights and plain KV, part throughput; default: bfloat16."),
    ] = None,
    out: Out = None,
    quick: Annotated[bool, quick_option("Small shapes, few rounds.")] = False,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Compare KV codecs: bytes, attention and throughput."""
    config = configured(codecs, batch, dtype, quick=quick)
    use_threads(threads)
    run_command("quant", PARTS, parts, config, asdict(config), out, quick=quick, as_json=as_json)
