"""Runs prompts through an engine to the end, every answer of one length, and times it."""

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
    """Prompts that were submitted together, answered.

    Attributes:
        total_s: from the first submission to the last token.
        prefill_s: until every prompt has its first token.
        rows_peak: most requests in the KV memory at once.
        preemptions: requests that gave way.
        answers: token ids, in the order of the prompts.
    """

    total_s: float
    prefill_s: float
    rows_peak: int
    preemptions: int
    answers: tuple[tuple[int, ...], ...]

    @property
    def decode_s(self) -> float:
        """Seconds behind the prompts."""
        return self.total_s - self.prefill_s

    @property
    def new_tokens(self) -> int:
        """Tokens generated."""
        return sum(map(len, self.answers))

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over the whole time, prefill included."""
        return self.new_tokens / self.total_s


def answer_all(engine: Engine, prompts: Sequence[Sequence[int]], new_tokens: int) -> Finished:
    """Submit all prompts, step until they are answered; end tokens are ignored.

    Args:
        engine: idle.
        prompts: token ids.
        new_tokens: of each answer.

    Raises:
        InvariantError: a request failed, or an answer is shorter.
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
            _refuse(delta.error)
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


def _refuse(error: str | None) -> None:
    if error is not None:
        raise InvariantError(f"a request of a bench failed: {error}")


def _check_lengths(answers: Iterable[list[int]], new_tokens: int) -> None:
    lengths = {len(answer) for answer in answers}
    if lengths != {new_tokens}:
        raise InvariantError(f"expected answers of {new_tokens} tokens, got {sorted(lengths)}")


def text_of(model: LoadedModel, answer: Sequence[int]) -> str:
    """An answer up to its first end token, as text: what goes on behind it only costs time."""
    assert model.tokenizer is not None, "questions are texts"
    ends = [place for place, token in enumerate(answer) if token in model.generation.eos_token_ids]
    kept = list(answer[: ends[0]] if ends else answer)
    return str(model.tokenizer.decode(kept, skip_special_tokens=True))
