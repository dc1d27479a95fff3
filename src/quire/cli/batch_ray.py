"""`quire batch --ray`: writes the records that actors of Ray Data return."""

import json
import time

import typer

from quire.batch.lines import BatchTask
from quire.batch.records import BatchTally
from quire.cli.batch_groups import RecordGroups
from quire.cli.batch_output import BatchOutput
from quire.cli.batch_server_lines import finish_reason, tokens
from quire.cli.on_ray import engine_recipe
from quire.cli.progress import CountProgress
from quire.cli.settings import Settings
from quire.layout.extras import require_extra


def run_on_ray(
    settings: Settings, task: BatchTask, output: BatchOutput, left: int
) -> tuple[BatchTally, float]:
    """Run the remaining lines on Ray; return the tally and the seconds.

    Args:
        settings: options of engine and Ray.
        task: the batch.
        output: output file, with the numbers of completed lines.
        left: number of the other lines.

    Raises:
        ConfigError: a missing package, or the output can no longer be written.
    """
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
        )
        try:
            for text in records:
                record = json.loads(text)
                tally.count(record, finish_reason(record))
                tally.count_tokens(*tokens(record))
                groups.put(record)
                progress.count(tally.completed)
        except KeyboardInterrupt:
            typer.echo("interrupted: run the same command to resume", err=True)
            raise
        finally:
            output.flush()
    return tally, time.monotonic() - start_s
