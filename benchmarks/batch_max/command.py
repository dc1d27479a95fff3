"""`python -m benchmarks batch-max`: eviction during prefill, and its baselines."""

from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.common.command import run_command
from benchmarks.common.flags import AsJson, Out, parts_option, quick_option
from benchmarks.common.graded_prompts import load, prompt_maker_for
from quire.cli.options import KV, MODEL
from quire.cli.settings import Settings, with_settings
from quire.errors import ConfigError
from quire.layout.config import dtype_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from benchmarks.batch_max.config import BatchMaxConfig
    from benchmarks.common.result import PartResult

    Part = Callable[[BatchMaxConfig], PartResult]


@with_settings(MODEL, KV)
def batch_max(
    settings: Settings,
    *,
    parts: Annotated[str, parts_option("speed", "equal_quality", "quality")] = "",
    repeats: Annotated[
        int,
        typer.Option(
            min=1, help="Rounds of the claimed arms, in turn; other arms run in the first round."
        ),
    ] = 5,
    out: Out = None,
    quick: Annotated[bool, quick_option("A quarter of all lengths, one round.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare full KV, decode-only eviction and Batch-Max in equal KV memory.

    Batch-Max evicts during prefill, so that more prompts fit in memory at once. Its throughput is
    compared with decode-only eviction at a cap of 2, an upper bound for decode-only eviction.
    """
    if settings.kv.evict != "full":
        raise ConfigError("expected no --evict: each arm has its own eviction; omit it")
    from benchmarks.batch_max.speed import run_equal, run_speed

    settings.set_threads()
    config = _config(settings, repeats, quick=quick)
    made: Mapping[str, Part] = {
        "speed": lambda config: run_speed(config.speed),
        "equal_quality": lambda config: run_equal(config.speed),
        "quality": partial(_quality, settings),
    }
    used = asdict(config) | settings.as_dict()
    run_command("batch-max", made, parts, config, used, out, quick=quick, as_json=as_json)


def _config(settings: Settings, repeats: int, *, quick: bool) -> "BatchMaxConfig":
    from benchmarks.batch_max.config import QUICK_BATCH_MAX, BatchMaxConfig

    config = QUICK_BATCH_MAX if quick else BatchMaxConfig()
    speed = config.speed if quick else replace(config.speed, repeats=repeats)
    requested = settings.loading.dtype
    if requested != "auto":  # random weights have no stored type
        dtype_bytes(requested)
        speed = replace(speed, dtype=requested)
    return replace(config, speed=speed, quality=replace(config.quality, model=settings.model))


def _quality(settings: Settings, config: "BatchMaxConfig") -> "PartResult":
    from benchmarks.batch_max.quality import run_quality

    model = load(settings)
    return run_quality(model, config.quality, prompt_maker_for(model))
