"""Log-probabilities in the two formats of OpenAI's API, in nats, of the unmodified distribution."""

from collections.abc import Sequence
from itertools import count

from transformers import PreTrainedTokenizerBase

from quire.sampling.detokenizer import REPLACEMENT
from quire.sampling.sampler import SampledToken, ScoredToken

MAX_CHARACTER_BYTES = 4
"""Bytes of a character in UTF-8."""

SEARCHED_CHARACTERS = 16
"""Characters in which a token is searched that does not match the text, such as removed spaces."""

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

    def is_special(self, token_id: int) -> bool:
        """Whether the token is special, so that a text may leave it out."""
        return self._tokenizer is not None and token_id in self._tokenizer.all_special_ids


class TextOffsets:
    """Positions of tokens in the text of a choice, which may grow.

    Tokens are matched with the text in order. The text may lack special tokens, the leading space
    of its first word, and the end of the last token, which a stop text cut. All tokens of a
    character that several tokens form have the position of the character. A text that the
    tokenizer normalized differs from its tokens: a token that does not match is searched within
    the next characters, and else takes as many characters as it has.

    Args:
        pieces: texts of the model's tokens.
        start: characters of the text before the first token.
    """

    def __init__(self, pieces: TokenPieces, start: int = 0) -> None:
        self._pieces = pieces
        self._end = start  # of the last token; beyond the known text if its rest has not arrived
        self._text = ""
        self._text_start = start
        self._raw = b""  # of a character whose last token has not arrived
        self._waiting: list[int] = []

    def push(self, token_ids: Sequence[int], text: str, *, is_last: bool) -> list[tuple[str, int]]:
        """Add tokens and text; return text and position of each token whose position is known.

        Args:
            token_ids: the next tokens.
            text: text that follows the known text.
            is_last: whether the text is complete; all tokens are then returned.
        """
        self._text += text
        self._waiting += token_ids
        placed = []
        for token_id in self._waiting:
            if not is_last and self._end >= self._text_start + len(self._text):
                break
            placed.append(self._place(token_id))
        del self._waiting[: len(placed)]
        if is_last:
            length = self._text_start + len(self._text)
            placed = [(shown, min(offset, length)) for shown, offset in placed]
        return placed

    def _place(self, token_id: int) -> tuple[str, int]:
        """Text and position of the next token; moves the end."""
        piece, offset = self._pieces.text(token_id), self._end
        if REPLACEMENT in piece or self._raw:
            self._raw += self._pieces.raw(token_id)
            if len(self._raw) < MAX_CHARACTER_BYTES and _is_cut(self._raw):
                return piece, offset
            character, self._raw = self._raw.decode(errors="replace"), b""
            self._move(character, token_id)
            return piece, offset
        rest = self._rest(len(piece))
        if piece[:1] == " " and rest and not piece.startswith(rest):
            word = piece[1:]
            piece = word if word.startswith(rest[: len(word)]) else piece
        self._move(piece, token_id)
        return piece, offset

    def _rest(self, length: int) -> str:
        """At most so many characters of the known text after the end."""
        start = self._end - self._text_start
        return self._text[start : start + length]

    def _move(self, piece: str, token_id: int) -> None:
        """Move the end behind a piece, if the text has it."""
        rest = self._rest(len(piece))
        if rest and piece.startswith(rest):  # the whole piece, or as much as has arrived
            self._end += len(piece)
        elif not self._pieces.is_special(token_id):
            near, word = self._rest(len(piece) + SEARCHED_CHARACTERS), piece.strip() or piece
            skipped = max(0, near.casefold().find(word.casefold()))
            self._end += min(len(near), skipped + len(word))


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


# ---- logprobs ------------------------------------------------------------------------------------

LEAST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot represent."""

Scored = SampledToken | ScoredToken | None  # None: the first token of a prompt has no score


def completion_logprobs(
    pieces: TokenPieces, placed: Sequence[tuple[str, int]], scores: Sequence[Scored]
) -> dict[str, object]:
    """The `logprobs` object of the completions API.

    Args:
        pieces: texts of the model's tokens.
        placed: text of each token, and its position in the choice's text.
        scores: one score per token.
    """
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
    return max(logprob, LEAST_LOGPROB)
