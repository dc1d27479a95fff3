"""Results of the sampler: the tokens of rows, and the scores of prompt tokens."""

from dataclasses import dataclass

NO_TOKEN = -1
"""The `token_id` of a row that failed."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token of one row, with its requested log-probabilities.

    Attributes:
        token_id: the token; `NO_TOKEN` if `error` is set.
        logprob: log-probability (nats) under the unmodified logits; None if not requested.
        top_logprobs: the most likely tokens as (token id, log-probability), most likely first; may
            not contain the sampled token.
        rank: rank of the token; 1 for the most likely one.
        error: why this row has no token; other rows are unaffected.
        text_offset: position in the output's text at which the token begins; None without
            requested log-probabilities. If a stop text cut the token, it may be beyond the end.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] | None = None
    rank: int | None = None
    error: str | None = None
    text_offset: int | None = None


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A prompt token with its log-probability (nats) and its rank (1 for the most likely)."""

    token_id: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]
    rank: int
