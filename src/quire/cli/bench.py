"""`quire bench`: measures throughput and latency of a model on this machine."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from quire.cli.command import register
from quire.cli.common import AsJson
from quire.cli.options import KV, MODEL, SAMPLING, SCHEDULE
from quire.cli.report import envelope, print_json
from quire.cli.settings import Settings, with_settings
from quire.cli.tables import seconds, show_table
from quire.layout.sizes import format_size

if TYPE_CHECKING:
    from quire.profile.bench import BenchRun

InputLen = Annotated[int, typer.Option(min=1, help="Length of each random prompt, in tokens.")]
OutputLen = Annotated[int, typer.Option(min=1, help="Output tokens per prompt.")]
Repeats = Annotated[int, typer.Option(min=1, help="Measured iterations.")]
Warmup = Annotated[int, typer.Option(min=0, help="Warmup iterations.", hidden=True)]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the random prompts.", hidden=True)]


class _Shape(NamedTuple):
    """Same fields as `BenchShape`, without importing torch."""

    requests: int
    input_tokens: int
    output_tokens: int
    rounds: int
    warmup_rounds: int
    seed: int


@with_settings(MODEL, KV, SCHEDULE, replace(SAMPLING, shown=False))
def throughput(  # noqa: PLR0913 - one parameter per option
    settings: Settings,
    *,
    num_prompts: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 32,
    input_len: InputLen = 512,
    output_len: OutputLen = 64,
    num_iters: Repeats = 5,
    num_iters_warmup: Warmup = 1,
    prompt_seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Measure requests/s and tokens/s of requests that are submitted at once."""
    shape = _Shape(num_prompts, input_len, output_len, num_iters, num_iters_warmup, prompt_seed)
    run = _run(settings, shape)
    claims = run.throughput()
    rows = [
        ("requests", f"{claims['requests_per_s']:,.2f} requests/s"),
        ("prompt and output", f"{claims['total_tokens_per_s']:,.1f} tokens/s"),
        ("output", f"{claims['output_tokens_per_s']:,.1f} tokens/s"),
    ]
    _show(f"Throughput, median of {num_iters} iterations", rows, claims)
    _finish("throughput", settings, run, claims, as_json=as_json)


@with_settings(MODEL, KV, SCHEDULE, replace(SAMPLING, shown=False))
def latency(  # noqa: PLR0913 - one parameter per option
    settings: Settings,
    *,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests per batch.")] = 8,
    input_len: InputLen = 32,
    output_len: OutputLen = 128,
    num_iters: Repeats = 10,
    num_iters_warmup: Warmup = 2,
    prompt_seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Measure the latency of one batch of requests, from submission to its last token."""
    shape = _Shape(batch_size, input_len, output_len, num_iters, num_iters_warmup, prompt_seed)
    run = _run(settings, shape)
    claims = run.latency()
    rows = [
        ("batch latency, mean", seconds(claims["latency_mean_s"])),
        ("batch latency, p50", seconds(claims["latency_p50_s"])),
        ("batch latency, p99", seconds(claims["latency_p99_s"])),
        ("time to first token (TTFT), p50", seconds(claims["first_token_p50_s"])),
        ("time per output token (TPOT), p50", seconds(claims["token_p50_s"])),
    ]
    _show(f"Latency of {batch_size} requests, {num_iters} iterations", rows, claims)
    _finish("latency", settings, run, claims, as_json=as_json)


def _run(settings: Settings, shape: _Shape) -> "BenchRun":
    settings.refuse_other_tenants()
    llm = settings.open_llm()
    from quire.profile.bench import BenchShape, run_bench  # imports torch

    return run_bench(llm, BenchShape(**shape._asdict()), settings.sampling)


def _show(title: str, rows: list[tuple[str, str]], claims: Mapping[str, int | float]) -> None:
    """Print the measured rows, then KV memory, preemptions and evictions."""
    peak, total = (format_size(int(claims[f"kv_{name}_bytes"])) for name in ("peak", "total"))
    memory = [
        ("peak KV memory", f"{peak} of {total}"),
        ("preemptions", f"{claims['preemptions']}"),
        ("evicted", f"{claims['evicted_tokens']:,} tokens"),
    ]
    show_table(title, ("measure", "value"), [*rows, *memory])


def _finish(
    name: str,
    settings: Settings,
    run: "BenchRun",
    claims: Mapping[str, int | float],
    *,
    as_json: bool,
) -> None:
    if as_json:
        used = settings.as_dict() | {"shape": asdict(run.shape)}
        rounds = [asdict(found) for found in run.rounds]
        print_json(envelope(f"bench {name}", claims, {"rounds": rounds}, used))


def add_to(app: typer.Typer) -> None:
    """Add the commands to `quire bench`."""
    for command in (throughput, latency):
        register(app, command)
