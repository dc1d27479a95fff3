"""`quire bench`: how fast a model answers on this machine, as throughput and as latency."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from quire.cli.command import register
from quire.cli.common import AsJson
from quire.cli.options import KV, MODEL, SAMPLING, SCHEDULE
from quire.cli.report import envelope
from quire.cli.settings import Settings, with_settings

if TYPE_CHECKING:
    from quire.profile.bench import BenchRun

InputLen = Annotated[int, typer.Option(min=1, help="Random tokens of each prompt.")]
OutputLen = Annotated[int, typer.Option(min=1, help="Tokens generated for each prompt.")]
Repeats = Annotated[int, typer.Option(min=1, help="Measured rounds.")]
Warmup = Annotated[int, typer.Option(min=0, help="Rounds before the measured ones.", hidden=True)]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the random prompts.", hidden=True)]


class _Shape(NamedTuple):
    """As `BenchShape`, which comes with torch."""

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
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests submitted at once.")] = 32,
    input_len: InputLen = 512,
    output_len: OutputLen = 64,
    num_iters: Repeats = 5,
    num_iters_warmup: Warmup = 1,
    prompt_seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Measure requests and tokens per second for a set of requests that are submitted at once."""
    shape = _Shape(num_prompts, input_len, output_len, num_iters, num_iters_warmup, prompt_seed)
    run = _run(settings, shape)
    claims = run.throughput()
    typer.echo(
        f"Throughput: {claims['requests_per_s']:.2f} requests/s, "
        f"{claims['total_tokens_per_s']:,.1f} total tokens/s, "
        f"{claims['output_tokens_per_s']:,.1f} output tokens/s (medians of {num_iters} rounds)"
    )
    _finish("throughput", settings, run, claims, as_json=as_json)


@with_settings(MODEL, KV, SCHEDULE, replace(SAMPLING, shown=False))
def latency(  # noqa: PLR0913 - one parameter per option
    settings: Settings,
    *,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests that run together.")] = 8,
    input_len: InputLen = 32,
    output_len: OutputLen = 128,
    num_iters: Repeats = 10,
    num_iters_warmup: Warmup = 2,
    prompt_seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Measure how long one batch of requests takes from submission to its last token."""
    shape = _Shape(batch_size, input_len, output_len, num_iters, num_iters_warmup, prompt_seed)
    run = _run(settings, shape)
    claims = run.latency()
    typer.echo(
        f"Latency of a batch: mean {claims['latency_mean_s']:.3f} s, "
        f"p50 {claims['latency_p50_s']:.3f} s, p99 {claims['latency_p99_s']:.3f} s; "
        f"time to first token p50 {claims['first_token_p50_s']:.3f} s, "
        f"time per output token p50 {claims['token_p50_s'] * 1e3:.1f} ms"
    )
    _finish("latency", settings, run, claims, as_json=as_json)


def _run(settings: Settings, shape: _Shape) -> "BenchRun":
    settings.refuse_other_tenants()
    llm = settings.open_llm()
    from quire.profile.bench import BenchShape, run_bench  # with torch, which is loaded by now

    return run_bench(llm, BenchShape(**shape._asdict()), settings.sampling)


def _finish(
    name: str,
    settings: Settings,
    run: "BenchRun",
    claims: Mapping[str, int | float],
    *,
    as_json: bool,
) -> None:
    typer.echo(
        f"Peak KV memory: {claims['kv_peak_bytes']:,} of {claims['kv_total_bytes']:,} B; "
        f"{claims['preemptions']} preemptions, {claims['evicted_tokens']} tokens evicted"
    )
    if as_json:
        used = settings.as_dict() | {"shape": asdict(run.shape)}
        rounds = [asdict(found) for found in run.rounds]
        typer.echo(json.dumps(envelope(f"bench {name}", claims, {"rounds": rounds}, used)))


def add_to(app: typer.Typer) -> None:
    """Add the commands to `quire bench`."""
    for command in (throughput, latency):
        register(app, command)
