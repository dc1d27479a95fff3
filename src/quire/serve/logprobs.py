"""Log-probabilities in the two formats of OpenAI's API, in nats, of the unmodified distribution."""

from collections.abc import Sequence
from itertools import accumulate, count

from transformers import PreTrainedTokenizerBase

from quire.sampling.detokenizer import REPLACEMENT
from quire.sampling.sampler import SampledToken, ScoredToken

# ---- pieces --------------------------------------------------------------------------------------

# Text and bytes of single tokens, for log-probabilities.


class TokenPieces:
    """Texts and bytes of a tokenizer's tokens.

    Args:
        tokenizer: tokenizer of the model; None: tokens are named by their ids.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}  # at most one entry per vocabulary entry

    def text(self, token_id: int) -> str:
        """The text that a token appends to preceding text, including a leading space.

        A single SentencePiece token loses its leading space when decoded. The token is therefore
        decoded twice in sequence, and the text of the first is removed.
        """
        if self._tokenizer is None:
            return f"token_id:{token_id}"
        if token_id not in self._texts:
            alone = self._decode([token_id])
            self._texts[token_id] = self._decode([token_id, token_id])[len(alone) :]
        return self._texts[token_id]

    def raw(self, token_id: int) -> bytes:
        """The bytes of a token, exact even if they are an incomplete character."""
        text = self.text(token_id)
        if self._tokenizer is None or REPLACEMENT not in text:
            return text.encode()
        name = str(self._tokenizer.convert_ids_to_tokens(token_id))
        if len(name) == len("<0x00>") and name.startswith("<0x"):
            return bytes.fromhex(name[3:5])
        if all(character in _BYTE_OF for character in name):
            return bytes(_BYTE_OF[character] for character in name)
        return text.encode()

    def _decode(self, token_ids: list[int]) -> str:
        assert self._tokenizer is not None
        text = self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
        return text if isinstance(text, str) else "".join(text)


def _byte_level_alphabet() -> dict[str, int]:
    """The characters that byte-level tokenizers use for bytes (Radford et al. 2019, GPT-2).

    Printable bytes map to themselves, the others to the characters from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = count(0x100)
    return {chr(byte if byte in printable else next(others)): byte for byte in range(0x100)}


_BYTE_OF = _byte_level_alphabet()


# ---- logprobs ------------------------------------------------------------------------------------

LEAST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot represent."""

Scored = SampledToken | ScoredToken | None  # None: the first token of a prompt has no score


def completion_logprobs(
    pieces: TokenPieces, token_ids: Sequence[int], scores: Sequence[Scored], first_offset: int
) -> dict[str, object]:
    """The `logprobs` object of the completions API.

    Args:
        pieces: texts of the model's tokens.
        token_ids: the tokens.
        scores: one score per token.
        first_offset: number of characters of the choice's text before the first token.
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
    """The `logprobs` object of the chat completions API."""
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


def prompt_logprobs(
    pieces: TokenPieces, scores: Sequence[ScoredToken | None]
) -> list[dict[str, dict[str, object]] | None]:
    """The field `prompt_logprobs` of vLLM: for each token of the prompt the scores of some tokens.

    The first token has no score. Keys are token ids.
    """
    return [None if score is None else _by_id(pieces, score) for score in scores]


def _by_id(pieces: TokenPieces, score: ScoredToken) -> dict[str, dict[str, object]]:
    ranked = {
        token_id: (logprob, rank)
        for rank, (token_id, logprob) in enumerate(score.top_logprobs or (), 1)
    }
    ranked = {score.token_id: (score.logprob, score.rank)} | ranked
    return {
        str(token_id): {
            "logprob": _clamped(logprob),
            "rank": rank,
            "decoded_token": pieces.text(token_id),
        }
        for token_id, (logprob, rank) in ranked.items()
    }


def _top_by_text(pieces: TokenPieces, score: SampledToken | ScoredToken) -> dict[str, float]:
    """Most likely tokens first, then the token itself; tokens with equal text are merged."""
    top: dict[str, float] = {}
    for token_id, logprob in score.top_logprobs or ():
        top.setdefault(pieces.text(token_id), _clamped(logprob))
    top.setdefault(pieces.text(score.token_id), _logprob(score))
    return top


def _chat_token(pieces: TokenPieces, token_id: int, logprob: float) -> dict[str, object]:
    text = pieces.text(token_id)
    return {"token": text, "logprob": logprob, "bytes": list(pieces.raw(token_id))}


def _logprob(score: SampledToken | ScoredToken) -> float:
    assert score.logprob is not None, "requested with `logprobs`"
    return _clamped(score.logprob)


def _clamped(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
