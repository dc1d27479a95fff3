"""What comes out: pieces of answers while they are made, and whole answers."""

from dataclasses import dataclass
from typing import Literal

from quire.engine.sampler import SampledToken, ScoredToken

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What an answer took.

    Attributes:
        prompt_tokens: tokens of the prompt.
        completion_tokens: tokens generated.
        cached_tokens: prompt tokens whose KV was there already.
        preemptions: times the request was thrown out and begun again.
        kv_peak_bytes: most KV bytes it referred to at any time.
        first_token_s: from submission to the first token.
        total_s: from submission to the end.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    preemptions: int
    kv_peak_bytes: int
    first_token_s: float
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What a step added to one answer.

    Attributes:
        request_id: whose.
        text: text that may be shown now; may be empty while a character or stop text is open.
        token_ids: new tokens.
        logprobs: one for each new token, or None when not asked for.
        finish_reason: set on the last delta.
        stop_reason: the stop text or token id that ended it.
        error: why the request failed, with finish_reason "error".
        prompt_logprobs: on the last delta, when asked for; None for the first token.
        usage: on the last delta.
    """

    request_id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[SampledToken, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    prompt_logprobs: tuple[ScoredToken | None, ...] | None = None
    usage: Usage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole answer.

    Attributes are those of `Delta`, summed; `prompt_token_ids` is what was asked.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    error: str | None
    logprobs: tuple[SampledToken, ...] | None
    prompt_logprobs: tuple[ScoredToken | None, ...] | None
    usage: Usage


class AnswerBuilder:
    """Collects deltas of one request."""

    def __init__(self, request_id: str, prompt_token_ids: tuple[int, ...]) -> None:
        self._request_id, self._prompt = request_id, prompt_token_ids
        self._deltas: list[Delta] = []

    def add(self, delta: Delta) -> Answer | None:
        """Add the next delta; return the answer when it was the last."""
        self._deltas.append(delta)
        return self._build(delta) if delta.finish_reason is not None else None

    def _build(self, last: Delta) -> Answer:
        assert last.finish_reason is not None
        assert last.usage is not None
        logprobs = [d.logprobs for d in self._deltas if d.logprobs is not None]
        return Answer(
            request_id=self._request_id,
            prompt_token_ids=self._prompt,
            text="".join(d.text for d in self._deltas),
            token_ids=tuple(token for d in self._deltas for token in d.token_ids),
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            error=last.error,
            logprobs=tuple(token for part in logprobs for token in part) if logprobs else None,
            prompt_logprobs=last.prompt_logprobs,
            usage=last.usage,
        )
