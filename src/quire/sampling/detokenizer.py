"""Turns tokens into text while they arrive: text given out is final and is never taken back.

When an answer ends is decided in `quire.sampling.stop_rules`.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer decodes bytes to that are not (or not yet) a character."""

PROMPT_CONTEXT_TOKENS = 8
"""Prompt tokens decoded before the first token of the answer: enough for a split character and for
the space that SentencePiece writes before a word but not before a text."""

MAX_HELD_TOKENS = 64
"""Tokens held back at most, which bounds the work a token. No text but broken bytes needs more."""

MAX_CHARACTER_TOKENS = 4
"""A character is 4 bytes in UTF-8 at most, and a token one byte at least."""


@runtime_checkable
class TokenDecoder(Protocol):
    """The part of a Transformers tokenizer that is needed here."""

    def decode(  # noqa: D102
        self,
        token_ids: list[int],
        skip_special_tokens: bool = ...,  # noqa: FBT001
        *,
        clean_up_tokenization_spaces: bool,
    ) -> str | list[str]: ...


class Detokenizer:
    """The text of one answer, token by token.

    Tokens do not decode one by one: a character may be split over several, and a word's leading
    space may depend on the token before it. So a window of tokens is decoded without and with the
    new ones, and the difference is the new text, unless it ends in the middle of a character:

        prompt and output   ... | context       | held           |
                                ^ window        ^ read           ^ end
        given out so far    -------------------->

    A character that the prompt began and the answer completes belongs to the answer.

    Args:
        tokenizer: decodes token ids; None for a model without one, whose text is always "".
        prompt_token_ids: what the answer continues.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(
        self,
        tokenizer: TokenDecoder | None,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        tail = list(prompt_token_ids[-PROMPT_CONTEXT_TOKENS - MAX_CHARACTER_TOKENS :])
        start, self._read = self._whole_characters(tail)
        self._window = tail[start:]
        self._read -= start
        self._context_text = self._decode(self._window[: self._read])
        self._known_text = self._decode(self._window)

    def push(self, token_id: int) -> str:
        """Add one token; return the text that became final, often "" and never half a character."""
        if self._tokenizer is None:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text != self._known_text and not text.endswith(REPLACEMENT):
            return self._give_out(text, len(self._window))
        if len(self._window) - self._read < MAX_HELD_TOKENS:
            return ""
        if text == self._known_text:
            del self._window[self._read :]
            return ""
        cut = self._last_whole_character(text)
        return self._give_out(self._decode(self._window[:cut]), cut)

    def finish(self) -> str:
        """Return what was still held back, with a replacement character for broken bytes."""
        text = self._decode(self._window)
        return "" if text == self._known_text else self._give_out(text, len(self._window))

    def _give_out(self, text: str, end: int) -> str:
        """Return what `text`, the first `end` tokens of the window, adds to the known text."""
        known = self._known_text if text.startswith(self._known_text) else self._context_text
        del self._window[: self._read]
        self._read = end - self._read
        self._context_text = self._known_text = self._decode(self._window[: self._read])
        return text[len(known) :]

    def _whole_characters(self, tail: list[int]) -> tuple[int, int]:
        """Where to start and end in a prompt's last tokens so as to split no character."""
        first = max(len(tail) - PROMPT_CONTEXT_TOKENS, 0)
        for end in range(len(tail), max(len(tail) - MAX_CHARACTER_TOKENS, -1), -1):
            for start in range(first, max(first - MAX_CHARACTER_TOKENS, -1), -1):
                if REPLACEMENT not in self._decode(tail[start:end]):
                    return start, end
        return first, len(tail)

    def _last_whole_character(self, text: str) -> int:
        """The last place in the window where no character can be split, whatever follows.

        Bytes that belong together decode to less together than apart, and a character that began
        before the last few tokens has all its bytes by now.
        """
        end = len(self._window) - MAX_CHARACTER_TOKENS + 1
        for cut in range(end, end - MAX_CHARACTER_TOKENS, -1):
            if self._decode(self._window[:cut]) + self._decode(self._window[cut:]) == text:
                return cut
        return len(self._window)

    def _decode(self, token_ids: list[int]) -> str:
        if self._tokenizer is None:
            return ""
        text = self._tokenizer.decode(
            token_ids, self._skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text if isinstance(text, str) else "".join(text)


class StopChecker:
    """Finds the first stop text in a stream, and holds back what may become one.

    The match that ends first counts; of several that end together, the longest. How the stream was
    cut into pieces makes no difference.

    Args:
        stops: texts that end the stream; none of them empty.
        include: give the stop text out as the end of the stream.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._include = include
        self._held = ""

    def push(self, new_text: str) -> tuple[str, str | None]:
        """Add text; return what may be shown of it, and the stop text that was found.

        After a match nothing more may be pushed.
        """
        text = self._held + new_text
        matches = [
            (text.index(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in text
        ]
        if matches:
            end, _, stop = min(matches)
            self._held = ""
            return text[: end if self._include else end - len(stop)], stop
        shown = len(text) - self._num_possible(text)
        self._held = text[shown:]
        return text[:shown], None

    def flush(self) -> str:
        """Return what was held back: the stream ended for another reason."""
        held, self._held = self._held, ""
        return held

    def _num_possible(self, text: str) -> int:
        """Length of the longest end of `text` that some stop text begins with."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
