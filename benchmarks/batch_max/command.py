"""`python -m benchmarks batch-max`: eviction during prefill, and its baselines."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.batch_max.paper_command import paper_config, run_paper
from benchmarks.common.command import finish, show_parts
from benchmarks.common.graded_prompts import load, prompt_maker_for
from quire.cli.common import AsJson
from quire.cli.options import KV, MODEL
from quire.cli.out_folder import prepare_folder, require_matplotlib
from quire.cli.settings import Settings, with_settings
from quire.errors import ConfigError, UnknownName
from quire.layout.config import dtype_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.batch_max.config import BatchMaxConfig, SpeedConfig
    from benchmarks.common.result import PartResult

STANDARD, PAPER = "standard", "paper"


@with_settings(MODEL, KV)
def batch_max(  # noqa: PLR0913 - one parameter per option
    settings: Settings,
    *,
    parts: Annotated[str, typer.Option(help="Only these, with commas: speed, quality.")] = "",
    repeats: Annotated[
        int,
        typer.Option(
            min=1, help="Rounds of what is claimed, in turns; all else runs in the first."
        ),
    ] = 5,
    pools: Annotated[
        str,
        typer.Option(
            help="KV memories in rows of full KV, with commas; claims are those of 2 rows, or of "
            "the first where 2 is not named. 1,2,4 if not said."
        ),
    ] = "",
    continuous: Annotated[
        bool,
        typer.Option(
            "--continuous/--static-only", help="Also run requests in the engine as it is."
        ),
    ] = True,
    protocol: Annotated[
        str,
        typer.Option(
            help="standard (random weights for speed, MODEL for quality), or paper (what the "
            "paper did, with MODEL, --task and --data)."
        ),
    ] = STANDARD,
    task: Annotated[
        str, typer.Option(help="Of the paper's protocol: cnndm, narrativeqa, gsm8k or xsum.")
    ] = "",
    data: Annotated[
        Path | None, typer.Option(help="Examples of the task, JSON or JSON lines.")
    ] = None,
    shots: Annotated[
        Path | None, typer.Option(help="Examples to show; without it, those that are not asked.")
    ] = None,
    samples: Annotated[
        int, typer.Option(min=1, help="Examples to ask; batches divide them: 960, 240, 96.")
    ] = 960,
    input_tokens: Annotated[int, typer.Option(min=1, help="Prompts are cut to this.")] = 3_584,
    new_tokens: Annotated[int, typer.Option(min=1, help="Generated behind each prompt.")] = 512,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for tables (Markdown, CSV), pictures and the result as JSON."),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="A quarter of all lengths, one KV memory, one round. No claims."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare full KV, decode-only eviction and Batch-Max in equal KV memory.

    Batch-Max evicts while it reads prompts, so that more of them fit at a time. Its throughput is
    held against decode-only eviction that keeps next to nothing, which nobody can beat with that.
    """
    if protocol not in (STANDARD, PAPER):
        raise UnknownName("protocol", protocol, (STANDARD, PAPER))
    if settings.kv.evict != "full":
        raise ConfigError("the arms choose what stays themselves: leave --evict out")
    if out is not None:
        require_matplotlib("--out")
        prepare_folder(out)
    settings.set_threads()
    if protocol == PAPER:
        paper = paper_config(
            settings,
            task=task,
            samples=samples,
            input_tokens=input_tokens,
            new_tokens=new_tokens,
            quick=quick,
        )
        found = run_paper(settings, paper, data, shots)
        used = asdict(paper)
    else:
        config = _config(settings.model, quick=quick)
        speed = _speed(config.speed, pools, None if quick else repeats)
        config = replace(config, speed=replace(speed, dtype=_dtype(settings, speed)))
        if not continuous:
            config = replace(config, speed=replace(config.speed, continuous_prompts=0))
        found, used = _standard(settings, parts, config), asdict(config)
    results, claims = show_parts(found)
    run = finish(
        "batch-max", results, claims, used | settings.as_dict() | _threads(), out, quick=quick
    )
    if as_json:
        typer.echo(json.dumps(run))


def _config(model: str, *, quick: bool) -> "BatchMaxConfig":
    from benchmarks.batch_max.config import QUICK_BATCH_MAX, BatchMaxConfig

    config = QUICK_BATCH_MAX if quick else BatchMaxConfig()
    return replace(config, quality=replace(config.quality, model=model))


def _speed(config: "SpeedConfig", pools: str, repeats: int | None) -> "SpeedConfig":
    """Apply the given rounds and KV memories; unset options keep their defaults.

    Raises:
        ConfigError: a KV memory of fewer than 1 row.
    """
    config = replace(config, repeats=repeats or config.repeats)
    if not pools.strip():
        return config
    try:
        rows = tuple(dict.fromkeys(int(part) for part in pools.split(",")))
    except ValueError:
        rows = (0,)
    if min(rows) < 1:
        raise ConfigError(f"expected KV memories in rows of full KV such as 1,2,4, got {pools!r}")
    claimed = config.claimed_pool if config.claimed_pool in rows else rows[0]
    return replace(config, pools=rows, claimed_pool=claimed)


def _dtype(settings: Settings, speed: "SpeedConfig") -> str:
    """The requested data type; random weights have no stored type."""
    requested = settings.loading.dtype
    if requested == "auto":
        return speed.dtype
    dtype_bytes(requested)
    return requested


def _standard(
    settings: Settings, parts: str, config: "BatchMaxConfig"
) -> "Iterator[tuple[str, PartResult]]":
    from benchmarks.batch_max.parts import make_parts
    from benchmarks.common.command import names_of, run_named

    made = make_parts(lambda: load(settings), prompt_maker_for)
    return run_named(names_of(parts, made), made, config)


def _threads() -> dict[str, object]:
    import torch

    return {"threads": torch.get_num_threads()}
