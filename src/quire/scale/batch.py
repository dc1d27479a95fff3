"""The actor of batches on Ray Data: an engine that turns lines of requests into records.

    dataset.map_batches(
        BatchActor,
        fn_constructor_kwargs={"model": "quire-tiny", "options": {"kv": KVConfig(memory="1GiB")}},
        compute=ray.data.ActorPoolStrategy(size=4, max_concurrent_calls_per_actor=4),
    )

Several batches may run in an actor at the same time; the engine runs all their requests together.
The class does not use Ray.
"""

import asyncio
import json
import math
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.batch.lines import BatchError, BatchLine, BatchTask, LineFormat, line_seed, parse_line
from quire.batch.records import Record, error_record
from quire.batch.requests import LineResult, RecordFormat, record_of, requests_of
from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.errors import ConfigError, RequestError
from quire.scale.config import RayConfig
from quire.scale.recipe import EngineRecipe

if TYPE_CHECKING:
    from quire.engine.core import Engine


LINE, NUMBER, REPEATS, RECORD = "line", "number", "repeats", "record"
"""Columns: a line as JSON text, its number from 1, equal lines before it, its record as JSON."""

_SEED_BITS = 62


class BatchActor:
    """Runs lines of requests with its own engine; see the guide of Ray.

    A batch has either the column `line`, with lines as `quire batch` reads them, or a column for
    each member of a line, such as `prompt`, `id` and `max_tokens`. With a column `number`, a
    row samples with a seed of the run's seed and its content, and its record has the number as
    `line`. The result has the columns `number` and
    `record`.

    Args:
        model: "quire-tiny", a folder that every machine has, or a hub name.
        options: keyword arguments of `quire.LLM`.
        sampling: sampling options that lines do not set.
        seed: seed of the run; None: random.
        threads: CPU threads of PyTorch; 0: PyTorch's default.
        with_prompt: include prompts in the records of plain lines.
    """

    def __init__(
        self,
        model: str,
        options: Mapping[str, Any] | None = None,
        sampling: SamplingParams | None = None,
        seed: int | None = None,
        threads: int = 1,
        form: LineFormat | None = None,
        *,
        with_prompt: bool = False,
    ) -> None:
        from quire.api.async_llm import AsyncLLM  # imports torch

        recipe = EngineRecipe(model=model, options=options or {}, threads=threads)
        self._llm = recipe.open()
        self._engine = AsyncLLM(self._llm.engine)
        self._sampling = sampling or SamplingParams()
        self._seed = secrets.randbits(_SEED_BITS) if seed is None else seed
        self._form = form or LineFormat()
        self._records = RecordFormat(model=self._llm.model.name, with_prompt=with_prompt)

    async def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        lines, numbers = lines_of(batch, self._form.prompt_key)
        repeats = _listed(batch.get(REPEATS, [0] * len(lines)))
        records = await asyncio.gather(*map(self._record, lines, numbers, repeats))
        return {NUMBER: list(numbers), RECORD: [json.dumps(record) for record in records]}

    def close(self) -> None:
        self._engine.close()

    async def _record(self, raw: bytes, number: int, repeat: int) -> Record:
        try:
            line = parse_line(raw, number, self._form)
        except BatchError as error:
            return error_record(error.head, str(error))
        seed = line_seed(self._seed, raw, repeat) if number else secrets.randbits(_SEED_BITS)
        try:
            requests = requests_of(line, self._sampling, seed)
        except RequestError as error:
            return error_record(line.head, str(error))
        results = await asyncio.gather(*(self._result(line, request) for request in requests))
        record, output = record_of(line, results, self._records)
        if output is not None and line.options.get("record_evictions"):
            read = partial(_evictions, request_id=output.request_id)
            record["evictions"] = await self._engine.inspect(read)
        return record

    async def _result(self, line: BatchLine, request: GenerationRequest) -> LineResult:
        try:
            if line.messages is not None:
                ids = await asyncio.to_thread(self._llm.encode_chat, line.messages)
                request = replace(request, prompt=ids)
            return await self._engine.generate(request)
        except RequestError as refusal:
            return refusal


def lines_of(
    batch: Mapping[str, Any], prompt_key: str = "prompt"
) -> tuple[list[bytes], Sequence[int]]:
    """The lines of a batch, and their numbers; 0 without a column of numbers."""
    columns = {name: _listed(values) for name, values in batch.items()}
    numbers = columns.pop(NUMBER, None)
    if LINE in columns:
        lines = [_bytes(line) for line in columns[LINE]]
    elif columns.keys() & {prompt_key, "messages", "body"}:
        rows = zip(*columns.values(), strict=True)
        lines = [_json_line(dict(zip(columns, row, strict=True))) for row in rows]
    else:
        found = ", ".join(columns) or "none"
        raise ConfigError(f"expected a column line, {prompt_key}, messages or body, got {found}")
    return lines, [0] * len(lines) if numbers is None else numbers


def _json_line(row: Mapping[str, Any]) -> bytes:
    """A line of one row; members that are None in this row are left out."""
    given = {name: value for name, value in row.items() if value is not None}
    return json.dumps(given, default=_listed).encode()


def _listed(values: Any) -> Any:
    return values.tolist() if hasattr(values, "tolist") else values


def _bytes(line: str | bytes) -> bytes:
    return line.encode("utf-8", "surrogatepass") if isinstance(line, str) else line


def _evictions(engine: "Engine", request_id: str) -> list[dict[str, Any]]:
    return [retained.as_dict() for retained in engine.eviction_trace(request_id)]


_CALLS_PER_ACTOR = 4
"""Blocks that an actor runs at the same time, so that its engine always has requests."""
_QUEUED_CALLS_PER_ACTOR = 6
_MAX_LINES = 32
_BLOCKS_PER_ACTOR = 8
"""Blocks of a small file for each actor; a block has at most `_MAX_LINES` lines."""


@dataclass(frozen=True, slots=True)
class LineBlock:
    """Neighbouring lines of a file."""

    start: int  # offset of the first line in bytes
    size: int  # bytes from the first line to the last one that runs
    first: int
    skipped: str  # numbers of lines between them that have a record, separated by commas


def line_blocks(source: Path, completed: Collection[int], max_lines: int) -> Iterator[LineBlock]:
    """Divide the lines of a file that have no record and are not blank into blocks."""
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
                if num_lines == max_lines:
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


def _read(
    batch: Mapping[str, Any], source: Path, repeats: Mapping[int, int]
) -> dict[str, list[Any]]:
    """The lines of the blocks of a batch; a function of Ray Data."""
    columns = [batch[field.name].tolist() for field in fields(LineBlock)]
    blocks = [LineBlock(*row) for row in zip(*columns, strict=True)]
    found = [numbered for block in blocks for numbered in read_lines(source, block)]
    numbers = [number for number, _ in found]
    before = [repeats.get(number, 0) for number in numbers]
    return {NUMBER: numbers, REPEATS: before, LINE: [line for _, line in found]}


def batch_records(
    engine: EngineRecipe,
    task: BatchTask,
    config: RayConfig,
    *,
    completed: Collection[int],
    num_left: int,
    seed: int,
    repeats: Mapping[int, int],
) -> Iterator[str]:
    """Run the remaining lines of a batch on a connected Ray; yield their records as JSON."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    even = math.ceil(num_left / (config.max_replicas * _BLOCKS_PER_ACTOR))
    found = line_blocks(task.source, completed, min(_MAX_LINES, max(1, even)))
    blocks = [asdict(block) for block in found]
    if not blocks:
        return
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    lines = ray.data.from_items(blocks, override_num_blocks=len(blocks)).map_batches(
        partial(_read, source=task.source.resolve(), repeats=dict(repeats)),
        batch_size=None,
        num_cpus=0,
        scheduling_strategy=here,
    )
    records = lines.map_batches(
        BatchActor,
        batch_size=None,
        fn_constructor_kwargs={
            "model": engine.model,
            "options": engine.options,
            "threads": engine.threads or max(1, int(config.cpus)),
            "sampling": task.sampling,
            "form": task.form,
            "seed": seed,
            "with_prompt": task.with_prompt,
        },
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
