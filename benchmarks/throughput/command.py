"""`python -m benchmarks throughput`: Quire and Transformers, compared with the machine limits."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.common.command import QUICK_NOTE, names_of
from benchmarks.common.flags import AsJson, Attention, Threads, quick_option
from benchmarks.common.tables import show_claims
from quire.cli.common import use_threads
from quire.cli.report import envelope, print_json

if TYPE_CHECKING:
    from benchmarks.throughput.bench import Round, ThroughputConfig


_SHAPES = (
    "Shape: 125m (Llama), 125m-latent (MLA), 125m-hybrid (gated delta rule in 3 of 4 layers) or "
    "125m-mamba2 (Mamba 2 in 3 of 4 layers)."
)


def throughput(  # noqa: PLR0913 - one parameter per option
    *,
    prompts: Annotated[int, typer.Option(min=1, help="Number of prompts, all at once.")] = 32,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 512,
    new_tokens: Annotated[int, typer.Option(min=3, help="Generated tokens per prompt.")] = 64,
    model: Annotated[str, typer.Option(help=_SHAPES)] = "125m",
    dtype: Annotated[str, typer.Option(help="Type of weights and KV.")] = "bfloat16",
    repeats: Annotated[int, typer.Option(min=1, help="Measured rounds.")] = 5,
    attention: Attention = "auto",
    peers: Annotated[
        str,
        typer.Option(
            help="Comma-separated peers: hf_static (generate), hf_one (generate, prompt by prompt),"
            " hf_cb or none."
        ),
    ] = "hf_static,hf_cb",
    quick: Annotated[bool, quick_option("A tiny model and few tokens, for a trial.")] = False,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Run a batch of prompts with Quire and with Transformers, in turn.

    The model has 125M parameters with random weights. The memory bandwidth and the
    product rates of the machine are measured in the same run.
    """
    from benchmarks.common.workload import Workload
    from benchmarks.throughput.bench import PEERS, QUICK_THROUGHPUT, ThroughputConfig

    use_threads(threads)
    work = Workload(
        model=model,
        prompts=prompts,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        dtype=dtype,
    )
    config = QUICK_THROUGHPUT if quick else ThroughputConfig(workload=work, repeats=repeats)
    names = () if peers == "none" else names_of(peers, dict.fromkeys(PEERS), "arm")
    run = _measured(replace(config, attention=attention, peers=names), quick=quick)
    if as_json:
        print_json(run)


def _measured(config: "ThroughputConfig", *, quick: bool) -> dict[str, object]:
    """Run the benchmark, print each round and the claims, and return the JSON object."""
    import torch

    from benchmarks.roofline.measured import MIN_RATIO
    from benchmarks.throughput.bench import ThroughputBench, decode_over_floor, summarise

    bench, rounds = ThroughputBench(config), []
    for found in bench.rounds():
        rounds.append(found)
        _show_round(found)
    regrets = bench.regrets(rounds[-1])
    claims = summarise(config, bench.spec, bench.storage, rounds, regrets)
    ratio = decode_over_floor(config, bench.spec, bench.storage, rounds)
    if ratio is not None and ratio < MIN_RATIO:
        typer.echo(_wrong_floor(ratio), err=True)
    _show_claims(claims, config)
    if quick:
        typer.echo(QUICK_NOTE)
    return envelope(
        "bench throughput",
        claims,
        {"rounds": [_stored(found) for found in rounds]},
        asdict(config) | {"threads": torch.get_num_threads(), "backend": bench.attention},
        quick=quick,
    )


def _wrong_floor(ratio: float) -> str:
    return (
        f"decode_step_over_floor: refused. The decode step takes {ratio:.2f} of its floor: a "
        "measured rate is too low; python -m benchmarks roofline shows the figures"
    )


def _show_round(found: "Round") -> None:
    products = ", ".join(
        f"{name} {rate / 1e9:,.0f}" for name, rate in found.rates.flops_per_s.items()
    )
    arms = "  ".join(f"{result.arm} {result.total_s:.2f} s" for result in found.arms)
    attention = "  ".join(
        f"{name} {time_s * 1e3:.1f} ms" for name, time_s in found.attention_s.items()
    )
    typer.echo(
        f"{arms};  attention: {attention};  read {found.read_bytes_per_s / 1e9:.1f} GB/s, "
        f"products {products} GFLOP/s"
    )


def _show_claims(claims: Mapping[str, int | float], config: "ThroughputConfig") -> None:
    show_claims("Throughput", claims)
    typer.echo(
        f"mean_regret: best logit minus the generated token's logit, in float32 "
        f"(first {config.judged_prompts} prompts)."
    )


def _stored(found: "Round") -> dict[str, object]:
    """A round for JSON, without the output tokens."""
    arms = [
        {key: value for key, value in asdict(result).items() if key != "tokens"}
        for result in found.arms
    ]
    return asdict(found) | {"arms": arms}
