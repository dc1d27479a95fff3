"""`quire bench serve`: measures an OpenAI-compatible server."""

import os
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from quire.bench.config import BenchServeConfig
from quire.cli.common import AsJson
from quire.cli.json_output import print_json
from quire.cli.option_parameters import with_config
from quire.cli.options import Section
from quire.cli.report import envelope
from quire.cli.tables import show_table

if TYPE_CHECKING:
    from quire.bench.metrics import Numbers
    from quire.bench.run import BenchResult

BENCH_SERVE = Section("bench", "Server", BenchServeConfig)
"""Options that no file of options has, because their names repeat those of others."""

KEY_VARIABLE = "OPENAI_API_KEY"
_SHOWN_ERRORS = 3
_COUNTS = {
    "completed": ("successful", "requests"),
    "failed": ("failed", "requests"),
    "duration": ("duration", "s"),
    "total_input_tokens": ("input", "tokens"),
    "total_output_tokens": ("output", "tokens"),
    "request_throughput": ("request throughput", "requests/s"),
    "request_goodput": ("request goodput", "requests/s"),
    "output_throughput": ("output throughput", "tokens/s"),
    "total_token_throughput": ("total throughput", "tokens/s"),
    "max_output_tokens_per_s": ("peak output throughput", "tokens/s"),
    "max_concurrent_requests": ("peak concurrency", "requests"),
}
"""Label and unit of each row."""
_LATENCIES = {
    "ttft": "time to first token (TTFT)",
    "tpot": "time per output token (TPOT)",
    "itl": "inter-token latency (ITL)",
    "e2el": "end-to-end latency (E2EL)",
}


@with_config(BENCH_SERVE)
def serve(config: BenchServeConfig, *, as_json: AsJson = False) -> None:
    """Measure latency and throughput of an OpenAI-compatible server.

    The server may be Quire, vLLM, SGLang, llama.cpp or another one. Metrics, options and the keys
    of the result have the names of `vllm bench serve`. Exit code 1 if a request failed.
    """
    from quire.bench.result import save, without_details
    from quire.bench.run import bench_server  # imports numpy
    from quire.cli.progress import CountProgress

    key = config.api_key or os.environ.get(KEY_VARIABLE)
    with CountProgress("requests", config.num_prompts) as progress:
        found = bench_server(config, key, progress.count)
    _show(found.numbers, config)
    _show_errors(found)
    if config.save_result or config.append_result or config.save_detailed:
        typer.echo(f"written: {save(config, found.result)}")
    if as_json:
        claims = dict(found.numbers)
        used = asdict(config) | {"api_key": None, "header": [*config.headers()]}
        print_json(envelope("bench serve", claims, without_details(found.result), used))
    if found.numbers["failed"]:
        raise typer.Exit(1)


def _show(numbers: "Numbers", config: BenchServeConfig) -> None:
    rows = [
        (label, f"{numbers[name]:,.{2 if isinstance(numbers[name], float) else 0}f} {unit}")
        for name, (label, unit) in _COUNTS.items()
        if name in numbers
    ]
    show_table("Requests", ("measure", "value"), rows)
    spreads = ("mean", "median", "std", *(f"p{cut:g}" for cut in config.percentiles()))
    times = [
        (label, *(f"{numbers[f'{spread}_{name}_ms']:,.2f} ms" for spread in spreads))
        for name, label in _LATENCIES.items()
    ]
    show_table("Latencies", ("measure", *spreads), times)


def _show_errors(found: "BenchResult") -> None:
    errors = [one.error for one in found.run.outcomes if one.error]
    for text in list(dict.fromkeys(errors))[:_SHOWN_ERRORS]:
        typer.echo(f"failed: {errors.count(text)} x {text}", err=True)
