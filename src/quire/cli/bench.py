"""`quire bench`: measures throughput and latency of a model on this machine."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import typer

from quire.cli.command import register
from quire.cli.common import json_option
from quire.cli.options import KV, MODEL, SAMPLING, SCHEDULE
from quire.cli.report import envelope, print_json
from quire.cli.settings import Settings, with_settings
from quire.cli.tables import seconds, show_table
from quire.layout.options import option
from quire.layout.sizes import format_size

if TYPE_CHECKING:
    from quire.profile.bench import BenchRun


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchThroughputFlags:
    """Options of `quire bench throughput`."""

    num_prompts: int = option(32, help="Number of requests.", min_value=1, common=True)
    input_len: int = option(
        512, help="Length of each random prompt, in tokens.", min_value=1, common=True
    )
    output_len: int = option(64, help="Output tokens per prompt.", min_value=1, common=True)
    num_iters: int = option(5, help="Measured iterations.", min_value=1, common=True)
    num_iters_warmup: int = option(1, help="Warmup iterations.", min_value=0)
    prompt_seed: int = option(0, help="Seed of the random prompts.", min_value=0)
    as_json: bool = json_option()


@with_settings(MODEL, KV, SCHEDULE, replace(SAMPLING, shown=False))
def throughput(settings: Settings, *, flags: BenchThroughputFlags) -> None:
    """Measure requests/s and tokens/s of requests that are submitted at once."""
    run = _run(settings, flags.num_prompts, flags)
    claims = run.throughput()
    rows = [
        ("requests", f"{claims['requests_per_s']:,.2f} requests/s"),
        ("prompt and output", f"{claims['total_tokens_per_s']:,.1f} tokens/s"),
        ("output", f"{claims['output_tokens_per_s']:,.1f} tokens/s"),
    ]
    _show(f"Throughput, median of {flags.num_iters} iterations", rows, claims)
    _finish("throughput", settings, run, claims, as_json=flags.as_json)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchLatencyFlags:
    """Options of `quire bench latency`."""

    batch_size: int = option(8, help="Requests per batch.", min_value=1, common=True)
    input_len: int = option(
        32, help="Length of each random prompt, in tokens.", min_value=1, common=True
    )
    output_len: int = option(128, help="Output tokens per prompt.", min_value=1, common=True)
    num_iters: int = option(10, help="Measured iterations.", min_value=1, common=True)
    num_iters_warmup: int = option(2, help="Warmup iterations.", min_value=0)
    prompt_seed: int = option(0, help="Seed of the random prompts.", min_value=0)
    as_json: bool = json_option()


@with_settings(MODEL, KV, SCHEDULE, replace(SAMPLING, shown=False))
def latency(settings: Settings, *, flags: BenchLatencyFlags) -> None:
    """Measure the latency of one batch of requests, from submission to its last token."""
    run = _run(settings, flags.batch_size, flags)
    claims = run.latency()
    rows = [
        ("batch latency, mean", seconds(claims["latency_mean_s"])),
        ("batch latency, p50", seconds(claims["latency_p50_s"])),
        ("batch latency, p99", seconds(claims["latency_p99_s"])),
        ("time to first token (TTFT), p50", seconds(claims["first_token_p50_s"])),
        ("time per output token (TPOT), p50", seconds(claims["token_p50_s"])),
    ]
    _show(f"Latency of {flags.batch_size} requests, {flags.num_iters} iterations", rows, claims)
    _finish("latency", settings, run, claims, as_json=flags.as_json)


def _run(
    settings: Settings, requests: int, flags: BenchThroughputFlags | BenchLatencyFlags
) -> "BenchRun":
    settings.refuse_other_tenants()
    llm = settings.open_llm()
    from quire.profile.bench import BenchShape, run_bench  # imports torch

    shape = BenchShape(
        requests=requests,
        input_tokens=flags.input_len,
        output_tokens=flags.output_len,
        rounds=flags.num_iters,
        warmup_rounds=flags.num_iters_warmup,
        seed=flags.prompt_seed,
    )
    return run_bench(llm, shape, settings.sampling)


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
