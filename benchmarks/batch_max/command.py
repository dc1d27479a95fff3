"""`python -m benchmarks batch-max`: eviction during prefill, and its baselines."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.common.command import finish, show_parts
from benchmarks.common.flags import AsJson
from benchmarks.common.graded_prompts import load, prompt_maker_for
from quire.cli.options import KV, MODEL
from quire.cli.report import prepare_folder, print_json
from quire.cli.settings import Settings, with_settings
from quire.errors import ConfigError
from quire.layout.config import dtype_bytes
from quire.layout.extras import require_extra

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.batch_max.config import BatchMaxConfig, SpeedConfig
    from benchmarks.common.result import PartResult


@with_settings(MODEL, KV)
def batch_max(  # noqa: PLR0913 - one parameter per option
    settings: Settings,
    *,
    parts: Annotated[
        str,
        typer.Option(help="Comma-separated parts: speed, equal_quality, quality; default: all."),
    ] = "",
    repeats: Annotated[
        int,
        typer.Option(
            min=1, help="Rounds of the claimed arms, in turn; other arms run in the first round."
        ),
    ] = 5,
    pools: Annotated[
        str,
        typer.Option(
            help="Comma-separated KV memories, in rows of full KV; claims use 2 rows, or the "
            "first value if 2 is not among them; default: 1,2,4."
        ),
    ] = "",
    continuous: Annotated[
        bool,
        typer.Option(
            "--continuous/--static-only", help="Also run continuous batching in the engine."
        ),
    ] = True,
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

    Batch-Max evicts during prefill, so that more prompts fit in memory at once. Its throughput is
    compared with decode-only eviction at a cap of 2, an upper bound for decode-only eviction.
    """
    if settings.kv.evict != "full":
        raise ConfigError("expected no --evict: each arm has its own eviction; omit it")
    if out is not None:
        require_extra("report", "--out")
        prepare_folder(out)
    settings.set_threads()
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
        print_json(run)


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
