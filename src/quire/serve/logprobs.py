"""Log-probabilities in the two formats of OpenAI's API, in nats, of the unmodified distribution."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import count

from transformers import PreTrainedTokenizerBase

from quire.sampling.detokenizer import REPLACEMENT, Detokenizer
from quire.sampling.sampler import SampledToken, ScoredToken

MAX_CHARACTER_BYTES = 4
"""Bytes of a character in UTF-8."""

SEARCHED_CHARACTERS = 16
"""Characters in which a token is searched that does not match the text, such as removed spaces."""


# Text and bytes of single tokens, for log-probabilities.


class TokenPieces:
    """Texts and bytes of a tokenizer's tokens."""

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

    def prompt_offsets(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Position of each token of a prompt in its text.

        Tokens are matched with the text in order. The text may lack special tokens and the leading
        space of its first word. A text that the tokenizer normalized differs from its tokens: a
        token that does not match is searched within the next characters, and else takes as many
        characters as it has.
        """
        if REPLACEMENT in text:  # decoded, with bytes that are not a character
            detokenizer, decoded = Detokenizer(self._tokenizer, (), skip_special_tokens=False), ""
            offsets = []
            for token_id in token_ids:
                decoded += detokenizer.push(token_id)
                offsets.append(detokenizer.offset)
            if decoded + detokenizer.finish() == text:
                return offsets
        offsets, end, raw = [], 0, b""
        for token_id in token_ids:
            offsets.append(end)
            piece = self.text(token_id)
            if REPLACEMENT in piece or raw:
                raw += self.raw(token_id)
                if len(raw) < MAX_CHARACTER_BYTES and _is_cut(raw):
                    continue
                piece, raw = raw.decode(errors="replace"), b""
            if not text.startswith(piece := as_shown(piece, text, end), end):
                if token_id in self._special_ids:
                    continue
                near = text[end : end + len(piece) + SEARCHED_CHARACTERS].casefold()
                piece = piece.strip() or piece
                end += max(0, near.find(piece.casefold()))
            end = min(len(text), end + len(piece))
        return offsets

    def placed(
        self, token_ids: Iterable[int], offsets: Iterable[int], text: str, start: int = 0
    ) -> list[tuple[str, int]]:
        """Text and position of tokens in `text`, which begins at `start`."""
        return [
            (as_shown(self.text(token), text, offset - start), min(offset, start + len(text)))
            for token, offset in zip(token_ids, offsets, strict=True)
        ]

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        if self._tokenizer is None:
            return frozenset()
        return frozenset(self._tokenizer.all_special_ids) | {
            token for token, one in self._tokenizer.added_tokens_decoder.items() if one.special
        }


def as_shown(piece: str, text: str, offset: int) -> str:
    """A token's text at a position of a text, whose first word may lack its leading space."""
    rest = text[offset : offset + len(piece)]
    if piece[:1] == " " and rest and not piece.startswith(rest):
        return piece[1:] if piece[1:].startswith(rest[: len(piece) - 1]) else piece
    return piece


def _is_cut(raw: bytes) -> bool:
    """Whether bytes end within a character of UTF-8."""
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return False


def _byte_level_alphabet() -> dict[str, int]:
    """The characters that byte-level tokenizers use for bytes (Radford et al. 2019, GPT-2).

    Printable bytes map to themselves, the others to the characters from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = count(0x100)
    return {chr(byte if byte in printable else next(others)): byte for byte in range(0x100)}


_BYTE_OF = _byte_level_alphabet()


MIN_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot represent."""

Scored = SampledToken | ScoredToken | None  # None: the first token of a prompt has no score


def completion_logprobs(
    pieces: TokenPieces, placed: Sequence[tuple[str, int]], scores: Sequence[Scored]
) -> dict[str, object]:
    """The `logprobs` object of the completions API."""
    return {
        "tokens": [text for text, _ in placed],
        "token_logprobs": [None if score is None else _logprob(score) for score in scores],
        "top_logprobs": [
            None if score is None else _top_by_text(pieces, score, text)
            for score, (text, _) in zip(scores, placed, strict=True)
        ],
        "text_offset": [offset for _, offset in placed],
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


def _top_by_text(
    pieces: TokenPieces, score: SampledToken | ScoredToken, text: str
) -> dict[str, float]:
    """Most likely tokens first, then the token itself; tokens with equal text are merged.

    `text` is the token's text in the choice: its first word may lack a leading space.
    """
    top: dict[str, float] = {}
    for token_id, logprob in score.top_logprobs or ():
        key = text if token_id == score.token_id else pieces.text(token_id)
        top.setdefault(key, _clamped(logprob))
    top.setdefault(text, _logprob(score))
    return top


def _chat_token(pieces: TokenPieces, token_id: int, logprob: float) -> dict[str, object]:
    text = pieces.text(token_id)
    return {"token": text, "logprob": logprob, "bytes": list(pieces.raw(token_id))}


def _logprob(score: SampledToken | ScoredToken) -> float:
    assert score.logprob is not None, "requested with `logprobs`"
    return _clamped(score.logprob)


def _clamped(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
