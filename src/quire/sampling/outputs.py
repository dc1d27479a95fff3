"""Outputs of requests: deltas for streaming, and complete outputs."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from quire.config.generation_request import GenerationRequest
from quire.sampling.sampler import SampledToken, ScoredToken

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Resources that a request used, over all of its sequences.

    Attributes:
        prompt_tokens: tokens of the prompt, counted once for any number of sequences.
        completion_tokens: generated tokens, including completions that `best_of` discards; in a
            beam search the tokens of the returned sequences.
        cached_tokens: prompt tokens whose KV was found in a prefix cache.
        preemptions: number of preemptions.
        evictions: evictions of one sequence, without those that a recomputation repeats.
        evicted_tokens: evicted tokens of one sequence, mean over all lanes; 0 if the cap was never
            reached. Of several sequences the maximum, because evictions before a fork are common.
        recomputed_tokens: tokens that were computed again after preemptions.
        kv_peak_bytes: peak KV bytes; pages shared by its sequences count once.
        first_token_s: seconds from submission to the first token.
        total_s: seconds from submission to the end.
        draft_tokens, accepted_draft_tokens: proposed tokens that steps have verified, and those of
            them that are part of the output.
        max_tokens: maximum tokens of each output that the request ran with.
        max_tokens_limit: why it is less than requested: "context", "kv_memory",
            or "tenant_kv_memory"; "": it is not.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    preemptions: int
    evictions: int = 0
    evicted_tokens: int
    recomputed_tokens: int = 0
    kv_peak_bytes: int
    first_token_s: float
    total_s: float
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    max_tokens: int = 0
    max_tokens_limit: str = ""

    def as_dict(self) -> dict[str, object]:
        """All fields; those of `limit` and of drafts only if there was a limit or a draft."""
        found = asdict(self)
        del found["max_tokens"], found["max_tokens_limit"]
        if not self.draft_tokens:
            del found["draft_tokens"], found["accepted_draft_tokens"]
        return found | self.limit()

    def extensions(self) -> dict[str, object]:
        """The fields that Quire adds to the `usage` of OpenAI's API."""
        names = ("kv_peak_bytes", "evictions", "evicted_tokens", "recomputed_tokens")
        return {name: getattr(self, name) for name in names} | self.limit()

    def limit(self) -> dict[str, object]:
        """`max_tokens` and `max_tokens_limit`; empty if `max_tokens` was not limited."""
        if not self.max_tokens_limit:
            return {}
        return {"max_tokens": self.max_tokens, "max_tokens_limit": self.max_tokens_limit}


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputDelta:
    """The part of one completion that a step added.

    Ranked completions (`best_of`, beam search) are returned when all have ended, each as one delta.

    Attributes:
        request_id: id of the request.
        index: index of the completion, 0 to n - 1.
        text: new text; may be empty while a character or a possible stop text is incomplete.
        token_ids: new tokens.
        logprobs: one per new token; None if not requested.
        finish_reason: set on the last delta of each completion.
        stop_reason: the stop text or token id that ended the completion.
        error: error message, with finish_reason "error".
        cached_tokens: in the delta of the first token, the prompt tokens whose KV was found in a
            prefix cache.
        score: in the last delta of a completion, the sum of its log-probabilities (nats), if they
            were requested or completions are ranked by it. For a beam this sum is divided by its
            length to the power of `length_penalty`.
        prompt_logprobs: in the last delta, the log-probabilities of the prompt, if requested; None
            for its first token.
        embedding: in the last delta, the pooled hidden states of the prompt in float32, if
            requested; not normalized.
        usage: set on the last delta of the request.
    """

    request_id: str
    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[SampledToken, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    cached_tokens: int | None = None
    score: float | None = None
    prompt_logprobs: tuple[ScoredToken | None, ...] | None = None
    embedding: tuple[float, ...] | None = None
    usage: Usage | None = None

    @property
    def is_last(self) -> bool:
        """Whether it is the last delta of the request."""
        return self.usage is not None


def joined(deltas: Sequence[OutputDelta]) -> Iterator[OutputDelta]:
    """Yield the deltas with those of each completion joined, in the order of their first ones."""
    found: dict[tuple[str, int], list[OutputDelta]] = {}
    for delta in deltas:
        found.setdefault((delta.request_id, delta.index), []).append(delta)
    for own in found.values():
        yield own[0] if len(own) == 1 else joined_delta(own)


def joined_delta(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """Join the deltas of one completion."""
    scored = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    return replace(
        deltas[-1],
        cached_tokens=deltas[0].cached_tokens,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(token for tokens in scored for token in tokens) if scored else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One completion of a prompt. Attributes are those of `OutputDelta`, joined."""

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
    """Complete output of a request.

    Attributes are those of `OutputDelta`, joined, of the first choice, which is the best one if
    choices are ranked. `prompt_token_ids` is the prompt. `choices` are all n completions, including
    the first. `error` is the first error of any choice. `request` is the submitted request; it is
    ignored by `==`.
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
    embedding: tuple[float, ...] | None = None
    request: GenerationRequest | None = field(default=None, compare=False, repr=False)


def merged(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Merge the outputs of several prompts: choice i of prompt k has the index k * n + i."""
    first = outputs[0]
    if len(outputs) == 1:
        return first
    return replace(
        first,
        error=next((output.error for output in outputs if output.error is not None), None),
        choices=tuple(
            replace(choice, index=number * len(output.choices) + choice.index)
            for number, output in enumerate(outputs)
            for choice in output.choices
        ),
        usage=summed([output.usage for output in outputs]),
    )


def summed(usages: Sequence[Usage]) -> Usage:
    """Sum the usage of several prompts.

    Token counts, preemptions and KV peaks are summed, because each prompt has its own KV. Times are
    the maximum, and the limit of `max_tokens` is that of the prompt with the fewest.
    """
    limited = min(usages, key=lambda usage: (not usage.max_tokens_limit, usage.max_tokens))
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        preemptions=sum(usage.preemptions for usage in usages),
        evictions=sum(usage.evictions for usage in usages),
        evicted_tokens=sum(usage.evicted_tokens for usage in usages),
        recomputed_tokens=sum(usage.recomputed_tokens for usage in usages),
        draft_tokens=sum(usage.draft_tokens for usage in usages),
        accepted_draft_tokens=sum(usage.accepted_draft_tokens for usage in usages),
        kv_peak_bytes=sum(usage.kv_peak_bytes for usage in usages),
        first_token_s=max(usage.first_token_s for usage in usages),
        total_s=max(usage.total_s for usage in usages),
        max_tokens=limited.max_tokens,
        max_tokens_limit=limited.max_tokens_limit,
    )


class OutputBuilder:
    """Builds a `RequestOutput` from the deltas of one request."""

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: tuple[int, ...],
        request: GenerationRequest | None = None,
    ) -> None:
        self._request_id, self._prompt, self._request = request_id, prompt_token_ids, request
        self._deltas: dict[int, list[OutputDelta]] = {}
        self._prompt_logprobs: tuple[ScoredToken | None, ...] | None = None
        self._embedding: tuple[float, ...] | None = None

    def add(self, delta: OutputDelta) -> RequestOutput | None:
        """Add the next delta; return the output after the last delta, else None."""
        self._deltas.setdefault(delta.index, []).append(delta)
        self._prompt_logprobs = delta.prompt_logprobs or self._prompt_logprobs
        self._embedding = delta.embedding or self._embedding
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
            embedding=self._embedding,
            request=self._request,
        )


def _choice(deltas: Sequence[OutputDelta]) -> Choice:
    last = deltas[-1]
    assert last.finish_reason is not None, "a request ends after all of its completions"
    logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    return Choice(
        index=last.index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        error=last.error,
        logprobs=tuple(token for tokens in logprobs for token in tokens) if logprobs else None,
        score=last.score,
    )
