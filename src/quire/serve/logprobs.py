"""Log-probabilities in the two shapes of OpenAI's API. Nats, under the unmodified distribution."""

from collections.abc import Sequence
from itertools import accumulate

from quire.sampling.sampler import SampledToken, ScoredToken
from quire.serve.pieces import TokenPieces

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""

Scored = SampledToken | ScoredToken | None  # None: the first token of a prompt, which has no score


def completion_logprobs(
    pieces: TokenPieces, token_ids: Sequence[int], scores: Sequence[Scored], first_offset: int
) -> dict[str, object]:
    """The four columns of the completions API.

    Args:
        pieces: of the model's tokenizer.
        token_ids: the tokens.
        scores: one for each of them.
        first_offset: characters of the choice's text before the first of them.
    """
    tokens = [pieces.text(token_id) for token_id in token_ids]
    offsets = list(accumulate(map(len, tokens), initial=first_offset))
    return {
        "tokens": tokens,
        "token_logprobs": [None if score is None else _logprob(score) for score in scores],
        "top_logprobs": [
            None if score is None else _top_by_text(pieces, score) for score in scores
        ],
        "text_offset": offsets[:-1],
    }


def chat_logprobs(pieces: TokenPieces, scores: Sequence[SampledToken]) -> dict[str, object]:
    """The list of the chat API."""
    content = [
        {
            **_chat_token(pieces, score.token_id, _logprob(score)),
            "top_logprobs": [
                _chat_token(pieces, token_id, _clamped(logprob))
                for token_id, logprob in score.top_logprobs or ()
            ],
        }
        for score in scores
    ]
    return {"content": content, "refusal": None}


def _top_by_text(pieces: TokenPieces, score: SampledToken | ScoredToken) -> dict[str, float]:
    """Likeliest first, then the token itself; of tokens with equal text the likeliest."""
    top: dict[str, float] = {}
    for token_id, logprob in score.top_logprobs or ():
        top.setdefault(pieces.text(token_id), _clamped(logprob))
    top.setdefault(pieces.text(score.token_id), _logprob(score))
    return top


def _chat_token(pieces: TokenPieces, token_id: int, logprob: float) -> dict[str, object]:
    piece = pieces.text(token_id)
    return {"token": piece, "logprob": logprob, "bytes": list(pieces.raw(token_id))}


def _logprob(score: SampledToken | ScoredToken) -> float:
    assert score.logprob is not None, "asked for with `logprobs`"
    return _clamped(score.logprob)


def _clamped(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
