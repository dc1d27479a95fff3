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
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from quire.batch.lines import BatchError, BatchLine, LineFormat, parse_line
from quire.batch.records import Record, error_record
from quire.batch.requests import LineResult, RecordFormat, record_of, requests_of
from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.errors import ConfigError, RequestError
from quire.scale.recipe import EngineRecipe

if TYPE_CHECKING:
    from quire.engine.core import Engine

LINE, NUMBER, RECORD = "line", "number", "record"
"""Columns: a line as JSON text, its number from 1, and its record as JSON text."""

_SEED_BITS = 62


class BatchActor:
    """Runs lines of requests with its own engine; see the guide of Ray.

    A batch has either the column `line`, with lines as `quire batch` reads them, or a column for
    each member of a line, such as `prompt`, `id` and `max_tokens`. With a column `number`, row n
    samples with seed + n, and its record has n as `line`. The result has the columns `number` and
    `record`.

    Args:
        model: "quire-tiny", a folder that every machine has, or a hub name.
        options: keyword arguments of `quire.LLM`.
        sampling: sampling options that lines do not set.
        seed: seed of the run; None: random.
        threads: CPU threads of PyTorch; 0: PyTorch's default.
        form: format of plain lines.
        with_prompt: include prompts in the records of plain lines.

    Raises:
        ConfigError: invalid options.
        ModelError: the model cannot be read.
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
        """Run the rows of a batch.

        Raises:
            ConfigError: a batch without a column of prompts.
            EngineDead: the engine has stopped.
        """
        lines, numbers = lines_of(batch, self._form.prompt_key)
        records = await asyncio.gather(*map(self._record, lines, numbers))
        return {NUMBER: list(numbers), RECORD: [json.dumps(record) for record in records]}

    def close(self) -> None:
        """Stop the engine."""
        self._engine.close()

    async def _record(self, raw: bytes, number: int) -> Record:
        try:
            line = parse_line(raw, number, self._form)
        except BatchError as error:
            return error_record(error.head, str(error))
        seed = self._seed if number else secrets.randbits(_SEED_BITS)
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
    """The lines of a batch, and their numbers; 0 without a column of numbers.

    Args:
        batch: columns by name: lists, or arrays of NumPy.
        prompt_key: name of the column of prompts.

    Raises:
        ConfigError: no column of lines or prompts.
    """
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
    """Values of Python for those of NumPy."""
    return values.tolist() if hasattr(values, "tolist") else values


def _bytes(line: str | bytes) -> bytes:
    return line.encode("utf-8", "surrogatepass") if isinstance(line, str) else line


def _evictions(engine: "Engine", request_id: str) -> list[dict[str, Any]]:
    return [retained.as_dict() for retained in engine.eviction_trace(request_id)]
