"""From a line of a batch to requests of the engine, and from their outputs to its record."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire.batch.lines import BatchLine
from quire.batch.records import Record, error_record, output_record
from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.errors import NeverFits, RequestError
from quire.sampling.outputs import RequestOutput, merged
from quire.serve.config import MAX_OUTPUTS

LineResult = RequestOutput | RequestError
"""The output of one prompt of a line, or its refusal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFormat:
    """What the records of a batch contain."""

    model: str
    with_prompt: bool = False  # include prompts in the records of plain lines


def requests_of(line: BatchLine, sampling: SamplingParams, seed: int) -> list[GenerationRequest]:
    """The requests of a line, one for each prompt; `seed` is used if the line has none."""
    params = replace(sampling, **{"seed": seed} | dict(line.sampling))
    if len(line.prompts) * params.num_sequences > MAX_OUTPUTS:
        raise RequestError(
            f"{len(line.prompts)} prompts x {params.num_sequences} outputs exceed the limit of "
            f"{MAX_OUTPUTS} outputs per line: write several lines"
        )
    return [GenerationRequest(prompt or "", params, **line.options) for prompt in line.prompts]


def record_of(
    line: BatchLine, results: Sequence[LineResult], form: RecordFormat
) -> tuple[Record, RequestOutput | None]:
    """The record of a line, and its output; None for an error record."""
    for result in results:
        if isinstance(result, RequestError):
            return error_record(line.head, _refusal_text(line, result)), None
    output = merged([result for result in results if isinstance(result, RequestOutput)])
    record = output_record(line, output, model=form.model, with_prompt=form.with_prompt)
    return record, output


def _refusal_text(line: BatchLine, refusal: RequestError) -> str:
    """Error text of a refused line; with number and name if the request never fits."""
    if not isinstance(refusal, NeverFits):
        return str(refusal)
    name = "" if line.head.name is None else f" ({line.head.name!r})"
    return f"line {line.head.number}{name} does not fit the KV memory: {refusal}"
