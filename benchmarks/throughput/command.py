"""`python -m benchmarks throughput`: Quire beside Transformers, against the ceilings."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.common.command import QUICK_NOTE
from quire.cli.common import AsJson, Attention, Threads, use_threads
from quire.cli.report import envelope
from quire.plan.ceilings import NotUsable, default_path, read_ceilings
from quire.plan.machine import this_machine

if TYPE_CHECKING:
    from benchmarks.common.workload import Workload
    from benchmarks.throughput.bench import Round, ThroughputConfig

PEER_SHAPE = (32, 512, 64)
PEER_NOTE = (
    "For orientation: vLLM's CPU build took 3.98 s for this work (32 x (512 + 64), November 2026), "
    "on another processor, a Sapphire Rapids with AMX; absolute times do not compare with it."
)


def throughput(  # noqa: PLR0913 - one parameter per option
    *,
    prompts: Annotated[int, typer.Option(min=1, help="How many, all at once.")] = 32,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of each prompt.")] = 512,
    new_tokens: Annotated[int, typer.Option(min=3, help="Generated for each.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Measured rounds.")] = 5,
    attention: Attention = "auto",
    peers: Annotated[
        str,
        typer.Option(help="The other arms, with commas: hf_static, hf_cb, hf_cb_default; or none."),
    ] = "hf_static,hf_cb",
    page: Annotated[
        Path | None, typer.Option(help="Write the roofline page, one HTML file, here.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A tiny model and few tokens: tries it out. No claims.")
    ] = False,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Answer a batch of prompts with Quire and with Transformers, taking turns.

    The model is a random-weight Llama of 125M parameters in bfloat16. What the memory reads and the
    cores multiply at most is measured in the same run.
    """
    from benchmarks.common.workload import Workload
    from benchmarks.throughput.bench import QUICK_THROUGHPUT, ThroughputConfig, peers_of

    use_threads(threads)
    if page is not None:
        _refuse_page(page)
    work = Workload(prompts=prompts, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
    config = QUICK_THROUGHPUT if quick else ThroughputConfig(workload=work, repeats=repeats)
    run = _measured(replace(config, attention=attention, peers=peers_of(peers)), quick=quick)
    if page is not None:
        _write_page(page, run)
    if as_json:
        typer.echo(json.dumps(run))


def _measured(config: "ThroughputConfig", *, quick: bool) -> dict[str, object]:
    """Run the bench, and show each round and what came of all; the object for JSON."""
    import torch

    from benchmarks.throughput.bench import ThroughputBench, summarise
    from benchmarks.throughput.step_parts import measure_parts

    bench, rounds = ThroughputBench(config), []
    for found in bench.rounds():
        rounds.append(found)
        _show_round(found)
    claims = summarise(config, bench.spec, rounds, bench.regrets(rounds[-1]))
    parts = measure_parts(config.workload, repeats=config.repeats, attention=config.attention)
    _show_claims(claims, config)
    typer.echo(QUICK_NOTE if quick else peer_note(config.workload))
    _show_stored(torch.get_num_threads())
    return envelope(
        "bench throughput",
        claims,
        {"rounds": [_stored(found) for found in rounds], "parts": [asdict(p) for p in parts]},
        asdict(config) | {"threads": torch.get_num_threads(), "backend": bench.attention},
        quick=quick,
    )


def _show_round(found: "Round") -> None:
    arms = "  ".join(f"{result.arm} {result.total_s:.2f} s" for result in found.arms)
    ways = "  ".join(f"{way} {taken_s * 1e3:.1f} ms" for way, taken_s in found.attention_s.items())
    typer.echo(
        f"{arms};  attention: {ways};  read {found.read_bytes_per_s / 1e9:.1f} GB/s, "
        f"product {found.flops_per_s / 1e9:,.0f} GFLOP/s"
    )


def _show_claims(claims: Mapping[str, int | float], config: "ThroughputConfig") -> None:
    for name, value in claims.items():
        typer.echo(f"{name:32} {value:,.4g}")
    typer.echo(
        f"mean_regret: how far below the best the chosen tokens' logits lie, read in float32 "
        f"(first {config.judged_prompts} prompts)."
    )


def peer_note(work: "Workload") -> str:
    """What another engine took for this work; that it is not known for other shapes."""
    if (work.prompts, work.prompt_tokens, work.new_tokens) == PEER_SHAPE:
        return PEER_NOTE
    return "No other engine was measured with this number of prompts and these lengths."


def _show_stored(threads: int) -> None:
    """Floors take the ceilings of their own run; those of a quiet machine stand beside them."""
    found = read_ceilings(default_path(os.environ), this_machine(threads))
    if isinstance(found, NotUsable):
        typer.echo(f"No stored ceilings to compare with: {found.reason}.")
    else:
        typer.echo(
            f"Stored ceilings, for comparison: read {found.read_bytes_per_s / 1e9:.1f} GB/s, "
            f"bfloat16 products up to {found.peak_product_rate() / 1e9:,.0f} GFLOP/s."
        )


def _stored(found: "Round") -> dict[str, object]:
    """A round for JSON; of the answers only that they were whole is kept."""
    arms = [
        {key: value for key, value in asdict(result).items() if key != "tokens"}
        for result in found.arms
    ]
    return asdict(found) | {"arms": arms}


def _refuse_page(path: Path) -> None:
    """Say before minutes of measuring that a page could not be drawn or written."""
    import importlib.util

    from quire.errors import ConfigError

    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--page draws with matplotlib, which is not installed: pip install "
            '"quire[report]", or leave --page out'
        )
    if not path.parent.is_dir():
        raise ConfigError(f"--page {path}: there is no folder {path.parent}; make it first")


def _write_page(path: Path, run: Mapping[str, object]) -> None:
    from benchmarks.throughput.page import page, roofline_from
    from quire.errors import ConfigError

    try:
        path.write_text(page(roofline_from(json.loads(json.dumps(run)))), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; name another file") from error
    typer.echo(f"written: {path}")
