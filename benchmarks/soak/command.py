"""`python -m benchmarks soak`: growth of resident memory over generated tokens."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.common.flags import AsJson, Threads
from quire.cli.common import use_threads
from quire.cli.report import envelope, print_json

if TYPE_CHECKING:
    from benchmarks.soak.bench import SoakResult

SLOPE_TOKENS = 10_000  # per arm; for fewer, single allocations of the C library decide the slope


def soak(
    *,
    tokens: Annotated[
        int,
        typer.Option(
            min=2_000, help="Tokens to generate at least; the second half runs with eviction."
        ),
    ] = 100_000,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Measure whether resident memory grows over generated tokens.

    quire-tiny serves requests with random arrivals in a small KV memory, with preemptions and
    cancellations, first without eviction and then with eviction.
    """
    import torch

    from benchmarks.soak.bench import ARMS, SoakConfig, run_arm, summarise
    from quire.models.loader import load_model

    use_threads(threads)
    config = SoakConfig(tokens=tokens)
    model = load_model("quire-tiny", dtype="float32", device="cpu", verify=False)
    results = []
    for arm in ARMS:
        result = run_arm(arm, model, config)
        results.append(result)
        typer.echo(
            f"{arm}: {result.generated_tokens:,} tokens, {result.requests:,} requests, "
            f"{result.preemptions:,} preemptions; resident {result.samples[0][1]:,} B after the "
            f"warm-up, {result.growth_bytes:+,} B since "
            f"({_slope_text(result)})"
        )
    if as_json:
        arms = {result.arm: asdict(result) for result in results}
        used = asdict(config) | {"threads": torch.get_num_threads()}
        print_json(envelope("bench soak", summarise(results), arms, used))


def _slope_text(result: "SoakResult") -> str:
    if result.generated_tokens < SLOPE_TOKENS:
        return f"too few tokens for a slope: run {2 * SLOPE_TOKENS:,} or more"
    return f"{result.slope_bytes_per_token:+.2f} B per token"
