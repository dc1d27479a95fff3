"""`quire batch` on Ray Data: reads the remaining lines of a file and yields their records.

    input file --> tasks that read, on the machine of the file --> actors with engines --> records

Ray Data bounds the lines and records that wait between the stages. Records come in the order of
the lines. Ray is imported when it is needed.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from quire.batch.lines import BatchTask
from quire.scale.batch import LINE, NUMBER, RECORD, BatchActor
from quire.scale.config import RayConfig
from quire.scale.recipe import EngineRecipe

_CALLS_PER_ACTOR = 4
"""Blocks that an actor runs at the same time, so that its engine always has requests."""
_QUEUED_CALLS_PER_ACTOR = 6
_MOST_LINES = 32
_BLOCKS_PER_ACTOR = 8
"""Blocks of a small file for each actor; a block has at most `_MOST_LINES` lines."""


@dataclass(frozen=True, slots=True)
class LineBlock:
    """Neighbouring lines of a file.

    Attributes:
        start: offset of the first line in bytes.
        size: bytes from the first line to the last one that runs.
        first: number of the first line.
        skipped: numbers of lines between them that have a record, separated by commas.
    """

    start: int
    size: int
    first: int
    skipped: str


_FIELDS = tuple(field.name for field in fields(LineBlock))


def line_blocks(source: Path, completed: Collection[int], most_lines: int) -> Iterator[LineBlock]:
    """Divide the lines of a file that have no record and are not blank into blocks.

    Args:
        source: the file.
        completed: numbers of lines with a record.
        most_lines: most lines of a block that run.
    """
    start, first, size, offset, num_lines = 0, 1, 0, 0, 0
    skipped: list[str] = []
    with source.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            if number in completed:
                skipped.append(str(number))
            elif raw.strip():
                if not num_lines:
                    start, first = offset, number
                    skipped.clear()
                num_lines += 1
                size = offset + len(raw) - start
                if num_lines == most_lines:
                    yield LineBlock(start, size, first, ",".join(skipped))
                    num_lines = 0
            offset += len(raw)
    if num_lines:
        yield LineBlock(start, size, first, ",".join(skipped))


def read_lines(source: Path, block: LineBlock) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a block that run, with their numbers."""
    with source.open("rb") as file:
        file.seek(block.start)
        lines = file.read(block.size).split(b"\n")  # as the lines of a binary file
    skipped = {int(number) for number in block.skipped.split(",") if number}
    for number, line in enumerate(lines, start=block.first):
        if line.strip() and number not in skipped:
            yield number, line


def _read(batch: Mapping[str, Any], source: Path) -> dict[str, list[Any]]:
    """The lines of the blocks of a batch; a function of Ray Data."""
    columns = [batch[name].tolist() for name in _FIELDS]
    blocks = [LineBlock(*row) for row in zip(*columns, strict=True)]
    found = [numbered for block in blocks for numbered in read_lines(source, block)]
    return {NUMBER: [number for number, _ in found], LINE: [line for _, line in found]}


def batch_records(
    engine: EngineRecipe,
    task: BatchTask,
    config: RayConfig,
    *,
    completed: Collection[int],
    num_left: int,
    seed: int,
) -> Iterator[str]:
    """Run the remaining lines of a batch on a Ray that is connected; yield their records as JSON.

    Args:
        engine: model and options of each actor.
        task: the batch.
        config: number and size of the actors.
        completed: numbers of lines with a record.
        num_left: number of the other lines.
        seed: seed of the batch.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    even = math.ceil(num_left / (config.max_replicas * _BLOCKS_PER_ACTOR))
    found = line_blocks(task.source, completed, min(_MOST_LINES, max(1, even)))
    blocks = [asdict(block) for block in found]
    if not blocks:
        return
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    lines = ray.data.from_items(blocks, override_num_blocks=len(blocks)).map_batches(
        partial(_read, source=task.source.resolve()),
        batch_size=None,
        num_cpus=0,
        scheduling_strategy=here,
    )
    records = lines.map_batches(
        BatchActor,
        batch_size=None,
        fn_constructor_kwargs=_actor_arguments(engine, task, config, seed),
        num_cpus=config.cpus,
        num_gpus=config.gpus,
        compute=ray.data.ActorPoolStrategy(
            min_size=config.min_replicas,
            max_size=config.max_replicas,
            max_tasks_in_flight_per_actor=_QUEUED_CALLS_PER_ACTOR,
            max_concurrent_calls_per_actor=_CALLS_PER_ACTOR,
        ),
    )
    for batch in records.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
        yield from batch.column(RECORD).to_pylist()


def _actor_arguments(
    engine: EngineRecipe, task: BatchTask, config: RayConfig, seed: int
) -> dict[str, Any]:
    return {
        "model": engine.model,
        "options": engine.options,
        "threads": engine.threads or max(1, int(config.cpus)),
        "sampling": task.sampling,
        "seed": seed,
        "form": task.form,
        "with_prompt": task.with_prompt,
    }
