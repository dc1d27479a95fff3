"""Commands on Ray: from options to a recipe, which processes of Ray can execute."""

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from quire.batch.lines import BatchTask
from quire.batch.records import BatchTally
from quire.cli.batch_files import BatchOutput, RecordGroups
from quire.cli.options import RAY, ROUTER
from quire.cli.progress import CountProgress
from quire.cli.settings import Settings
from quire.errors import ConfigError
from quire.layout.extras import require_extra

if TYPE_CHECKING:
    from quire.scale.recipe import EngineRecipe


def refuse_ray_options(settings: Settings) -> None:
    """Refuse options of Ray without --ray."""
    if settings.ray.enabled:
        return
    for section in (RAY, ROUTER):
        for found in section.options():
            if found.parameter in settings.given and found.flag != "ray":
                raise ConfigError(f"--{found.flag} has no effect without --ray: add --ray")


def refuse_on_ray(flag: str, value: object) -> None:
    """Refuse an option of one engine in this process."""
    if value is not None:
        raise ConfigError(
            f"{flag} is an option of one engine in this process and has no effect with --ray: "
            "leave it out"
        )


def engine_recipe(settings: Settings) -> "EngineRecipe":
    """The engine of the options."""
    from quire.scale.recipe import EngineRecipe

    return EngineRecipe(
        model=settings.model, options=settings.llm_options(), threads=settings.loading.threads
    )


def serve_on_ray(settings: Settings) -> None:
    """Serve a model with replicas on Ray until SIGTERM or SIGINT."""
    require_extra("ray", "quire serve --ray")
    config = settings.server
    config.check_files()
    from quire.scale.serve.builder import recipe_with_keys
    from quire.scale.serve.launch import serve_until_signal
    from quire.serve.connection import bind

    with bind(config.host, config.port) as bound:  # reports a port in use; 0 selects a free one
        config = replace(config, port=bound.getsockname()[1])
    serve_until_signal(
        recipe_with_keys(engine_recipe(settings), config, settings.ray, settings.router)
    )


def run_on_ray(
    settings: Settings, task: BatchTask, output: BatchOutput, left: int
) -> tuple[BatchTally, float]:
    """Run the remaining lines on Ray; return the tally and the seconds."""
    require_extra("ray", "quire batch --ray")
    tally = BatchTally()
    if not left:
        return tally, 0.0
    from quire.scale.batch import batch_records
    from quire.scale.ray_session import ray_session

    start_s = time.monotonic()
    groups = RecordGroups(output)
    with ray_session(settings.ray), CountProgress("batch", left) as progress:
        records = batch_records(
            engine_recipe(settings),
            task,
            settings.ray,
            completed=output.completed,
            num_left=left,
            seed=output.seed,
            repeats=output.repeats,
        )
        try:
            for text in records:
                record = json.loads(text)
                tally.add(record)
                groups.put(record)
                progress.count(tally.completed)
        except KeyboardInterrupt:
            typer.echo("interrupted: run the same command to resume", err=True)
            raise
        finally:
            output.flush()
    return tally, time.monotonic() - start_s
