"""Run prompts in an engine, with outputs of one length, and measure the time."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import InvariantError
from quire.models.loader import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Results of prompts that were submitted together.

    Attributes:
        total_s: time from the first submission to the last token.
        prefill_s: time until every prompt has its first token.
        rows_peak: most requests with KV at once.
        preemptions: number of preempted requests.
        answers: output token ids, in the order of the prompts.
    """

    total_s: float
    prefill_s: float
    rows_peak: int
    preemptions: int
    answers: tuple[tuple[int, ...], ...]

    @property
    def decode_s(self) -> float:
        """Time after all prompts have their first token."""
        return self.total_s - self.prefill_s

    @property
    def new_tokens(self) -> int:
        """Number of generated tokens."""
        return sum(map(len, self.answers))

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over the whole time, with prefill."""
        return self.new_tokens / self.total_s


def generate_all(engine: Engine, prompts: Sequence[Sequence[int]], new_tokens: int) -> Finished:
    """Submit all prompts and step until all outputs are complete; end tokens are ignored.

    Args:
        engine: idle engine.
        prompts: token ids of each prompt.
        new_tokens: tokens of each output.

    Raises:
        InvariantError: a request failed, or an output is too short.
    """
    options = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    before = engine.scheduler.num_preemptions
    started_s = time.perf_counter()
    ids = [engine.submit(GenerationRequest(prompt, options)) for prompt in prompts]
    answers: dict[str, list[int]] = {key: [] for key in ids}
    waiting, rows_peak, prefill_s = set(ids), 0, 0.0
    while engine.has_work:
        for delta in engine.step():
            answers[delta.request_id] += delta.token_ids
            waiting.discard(delta.request_id)
            _raise_failure(delta.error)
        rows_peak = max(rows_peak, len(engine.scheduler.running))
        if not waiting and not prefill_s:
            prefill_s = time.perf_counter() - started_s
    total_s = time.perf_counter() - started_s
    _check_lengths(answers.values(), new_tokens)
    return Finished(
        total_s=total_s,
        prefill_s=prefill_s,
        rows_peak=rows_peak,
        preemptions=engine.scheduler.num_preemptions - before,
        answers=tuple(tuple(answers[key]) for key in ids),
    )


def _raise_failure(error: str | None) -> None:
    if error is not None:
        raise InvariantError(f"expected no failed request in a benchmark, got: {error}")


def _check_lengths(answers: Iterable[list[int]], new_tokens: int) -> None:
    lengths = {len(answer) for answer in answers}
    if lengths != {new_tokens}:
        raise InvariantError(f"expected outputs of {new_tokens} tokens, got {sorted(lengths)}")


def text_of(model: LoadedModel, answer: Sequence[int]) -> str:
    """Decode an output up to its first end-of-sequence token."""
    assert model.tokenizer is not None, "graded prompts are texts"
    ends = [i for i, token in enumerate(answer) if token in model.generation.eos_token_ids]
    tokens = list(answer[: ends[0]] if ends else answer)
    return str(model.tokenizer.decode(tokens, skip_special_tokens=True))
