"""What comes out: pieces of answers while they are made, and whole answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from quire.config.generation_request import GenerationRequest
from quire.sampling.sampler import SampledToken, ScoredToken

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a request took, all answers to its prompt together.

    Attributes:
        prompt_tokens: tokens of the prompt, read once however many answers it gets.
        completion_tokens: tokens generated, those of answers that `best_of` drops included; of a
            beam search the tokens of the sequences that are returned.
        cached_tokens: prompt tokens whose KV was there already.
        preemptions: times the request was thrown out and begun again.
        evicted_tokens: tokens of one sequence whose KV was evicted, the mean over all lanes; 0
            where the cap was never reached. Of several answers to a prompt the most of any: what
            they lost before they were forked is the same.
        kv_peak_bytes: most KV bytes it referred to at any time; pages that its answers share count
            once.
        first_token_s: from submission to the first token.
        total_s: from submission to the end.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    preemptions: int
    evicted_tokens: int
    kv_peak_bytes: int
    first_token_s: float
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputDelta:
    """What a step added to one answer.

    Answers that are ranked (`best_of`, beams) come when all have ended, each in one piece.

    Attributes:
        request_id: whose.
        index: which of the request's answers, 0 to n - 1.
        text: text that may be shown now; may be empty while a character or stop text is open.
        token_ids: new tokens.
        logprobs: one for each new token, or None when not asked for.
        finish_reason: set on the last delta of each answer.
        stop_reason: the stop text or token id that ended it.
        error: why the request failed, with finish_reason "error".
        score: on the last delta of an answer: the sum of its log-probabilities (nats) where they
            were asked for or answers are ranked by it; of a beam, over its length to the power of
            `length_penalty`.
        prompt_logprobs: on the last delta, when asked for; None for the first token.
        usage: on the last delta of all: it says that no answer of this request goes on.
    """

    request_id: str
    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[SampledToken, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    score: float | None = None
    prompt_logprobs: tuple[ScoredToken | None, ...] | None = None
    usage: Usage | None = None

    @property
    def is_last(self) -> bool:
        """Whether nothing more comes of the whole request."""
        return self.usage is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of the answers to a prompt. Attributes are those of `OutputDelta`, summed."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    error: str | None
    logprobs: tuple[SampledToken, ...] | None
    score: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A whole answer.

    Attributes are those of `OutputDelta`, summed, of the first choice: the best one where choices
    are ranked. `prompt_token_ids` is what was asked, `choices` are all n answers, the first
    included, `error` is the first of any choice. `request` is what was submitted, with its options;
    outputs that differ only there are equal.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    error: str | None
    logprobs: tuple[SampledToken, ...] | None
    score: float | None
    prompt_logprobs: tuple[ScoredToken | None, ...] | None
    choices: tuple[Choice, ...]
    usage: Usage
    request: GenerationRequest | None = field(default=None, compare=False, repr=False)


def merged(answers: Sequence[RequestOutput]) -> RequestOutput:
    """Answers to several prompts as one: choice i of prompt k has the index k * n + i."""
    first = answers[0]
    if len(answers) == 1:
        return first
    return replace(
        first,
        error=next((answer.error for answer in answers if answer.error is not None), None),
        choices=tuple(
            replace(choice, index=number * len(answer.choices) + choice.index)
            for number, answer in enumerate(answers)
            for choice in answer.choices
        ),
        usage=summed([answer.usage for answer in answers]),
    )


def summed(usages: Sequence[Usage]) -> Usage:
    """What several prompts took together.

    Tokens, evicted ones too, preemptions and peaks of KV are summed over the prompts: each has KV
    of its own. Times are the longest of any.
    """
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        preemptions=sum(usage.preemptions for usage in usages),
        evicted_tokens=sum(usage.evicted_tokens for usage in usages),
        kv_peak_bytes=sum(usage.kv_peak_bytes for usage in usages),
        first_token_s=max(usage.first_token_s for usage in usages),
        total_s=max(usage.total_s for usage in usages),
    )


class OutputBuilder:
    """Collects deltas of one request.

    Args:
        request_id: of the deltas.
        prompt_token_ids: what was asked.
        request: as submitted, for the output.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: tuple[int, ...],
        request: GenerationRequest | None = None,
    ) -> None:
        self._request_id, self._prompt, self._request = request_id, prompt_token_ids, request
        self._deltas: dict[int, list[OutputDelta]] = {}
        self._prompt_logprobs: tuple[ScoredToken | None, ...] | None = None

    def add(self, delta: OutputDelta) -> RequestOutput | None:
        """Add the next delta; return the answer when it was the last."""
        self._deltas.setdefault(delta.index, []).append(delta)
        self._prompt_logprobs = delta.prompt_logprobs or self._prompt_logprobs
        return None if delta.usage is None else self._build(delta.usage)

    def _build(self, usage: Usage) -> RequestOutput:
        choices = tuple(_choice(deltas) for _, deltas in sorted(self._deltas.items()))
        first = choices[0]
        return RequestOutput(
            request_id=self._request_id,
            prompt_token_ids=self._prompt,
            text=first.text,
            token_ids=first.token_ids,
            finish_reason=first.finish_reason,
            stop_reason=first.stop_reason,
            error=next((choice.error for choice in choices if choice.error is not None), None),
            logprobs=first.logprobs,
            score=first.score,
            prompt_logprobs=self._prompt_logprobs,
            choices=choices,
            usage=usage,
            request=self._request,
        )


def _choice(deltas: Sequence[OutputDelta]) -> Choice:
    last = deltas[-1]
    assert last.finish_reason is not None, "a request ends after all of its answers"
    logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    return Choice(
        index=last.index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        error=last.error,
        logprobs=tuple(token for part in logprobs for token in part) if logprobs else None,
        score=last.score,
    )
