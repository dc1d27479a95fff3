"""`quire batch` on Ray Data: reads the remaining lines of a file and yields their records.

    input file --> read tasks, on the machine of the file --> actors with engines --> records

Ray Data bounds the lines and records that wait between the stages. Records come in the order of
the lines.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import ray
from ray.data import ActorPoolStrategy, DataContext, Datasource, ReadTask
from ray.data.block import BlockMetadata
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

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
        size: bytes of all lines up to the last one that runs.
        first: number of the first line.
        numbers: numbers of the lines that run.
    """

    start: int
    size: int
    first: int
    numbers: tuple[int, ...]


def line_blocks(source: Path, completed: Collection[int], most_lines: int) -> list[LineBlock]:
    """Divide the lines of a file that have no record and are not blank into blocks.

    Args:
        source: the file.
        completed: numbers of lines with a record.
        most_lines: most lines of a block.
    """
    blocks: list[LineBlock] = []
    numbers: list[int] = []
    start, first, offset = 0, 1, 0
    with source.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            if raw.strip() and number not in completed:
                if not numbers:
                    start, first = offset, number
                numbers.append(number)
                size = offset + len(raw) - start
                if len(numbers) == most_lines:
                    blocks.append(LineBlock(start, size, first, tuple(numbers)))
                    numbers = []
            offset += len(raw)
    if numbers:
        blocks.append(LineBlock(start, size, first, tuple(numbers)))
    return blocks


def read_lines(source: Path, block: LineBlock) -> list[bytes]:
    """The lines of a block."""
    with source.open("rb") as file:
        file.seek(block.start)
        lines = file.read(block.size).split(b"\n")  # as the lines of a binary file
    return [lines[number - block.first] for number in block.numbers]


class RequestFile(Datasource):  # type: ignore[misc]  # Ray has no types
    """Lines of a file of requests, with their numbers.

    Args:
        source: the file.
        blocks: the lines to read.
    """

    def __init__(self, source: Path, blocks: list[LineBlock]) -> None:
        super().__init__()
        self._source, self._blocks = source, blocks

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ReadTask]:
        """One task for each block."""
        return [
            ReadTask(
                partial(_read, self._source, block),
                BlockMetadata(
                    num_rows=len(block.numbers),
                    size_bytes=block.size,
                    input_files=None,
                    exec_stats=None,
                ),
            )
            for block in self._blocks
        ]

    def estimate_inmemory_data_size(self) -> int:
        """Bytes of all lines."""
        return sum(block.size for block in self._blocks)


def _read(source: Path, block: LineBlock) -> list[pyarrow.Table]:
    return [pyarrow.table({NUMBER: list(block.numbers), LINE: read_lines(source, block)})]


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
    even = math.ceil(num_left / (config.max_replicas * _BLOCKS_PER_ACTOR))
    blocks = line_blocks(task.source, completed, min(_MOST_LINES, max(1, even)))
    if not blocks:
        return
    DataContext.get_current().execution_options.preserve_order = True
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    dataset = ray.data.read_datasource(
        RequestFile(task.source.resolve(), blocks),
        override_num_blocks=len(blocks),
        num_cpus=0,
        ray_remote_args={"scheduling_strategy": here},
    )
    records = dataset.map_batches(
        BatchActor,
        batch_size=None,
        fn_constructor_kwargs={
            "model": engine.model,
            "options": engine.options,
            "threads": engine.threads or max(1, int(config.cpus)),
            "sampling": task.sampling,
            "seed": seed,
            "form": task.form,
            "with_prompt": task.with_prompt,
        },
        num_cpus=config.cpus,
        num_gpus=config.gpus,
        compute=ActorPoolStrategy(
            min_size=config.min_replicas,
            max_size=config.max_replicas,
            max_tasks_in_flight_per_actor=_QUEUED_CALLS_PER_ACTOR,
            max_concurrent_calls_per_actor=_CALLS_PER_ACTOR,
        ),
    )
    for batch in records.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
        yield from batch.column(RECORD).to_pylist()
