"""Incremental detokenization, and the rules that end an output: returned text is final."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from quire.config.sampling_params import SamplingParams

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""The character to which a tokenizer decodes bytes that are not (or not yet) a character."""

PROMPT_CONTEXT_TOKENS = 8
"""Prompt tokens decoded before the first output token. Enough for a split character, and for the
space that SentencePiece writes before a word but not at the start of a text."""

MAX_HELD_TOKENS = 64
"""Maximum number of buffered tokens; bounds the work per token. Only invalid bytes need more."""

MAX_CHARACTER_TOKENS = 4
"""Maximum tokens of a character: at most 4 bytes in UTF-8, at least one byte per token."""


@runtime_checkable
class TokenDecoder(Protocol):
    """The interface of a Transformers tokenizer that `Detokenizer` uses."""

    def decode(
        self,
        token_ids: list[int],
        skip_special_tokens: bool = ...,  # noqa: FBT001
        *,
        clean_up_tokenization_spaces: bool,
    ) -> str | list[str]: ...


class Detokenizer:
    """Text of one output, token by token.

    Tokens cannot be decoded one by one: several tokens may form one character, and the leading
    space of a word may depend on the previous token. Therefore a window of tokens is decoded
    without and with the new tokens. The difference is the new text, unless it ends within a
    character:

        prompt and output   ... | context       | buffered       |
                                ^ window        ^ read           ^ end
        returned so far     -------------------->

    A character that starts in the prompt and ends in the output belongs to the output.

    Attributes:
        num_characters: length of the returned text.
        offset: position of the newest token in the text. The tokens that form one character have
            the position of the character.
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
        self._known_text = self._text = self._decode(self._window)
        self.num_characters = self.offset = 0

    def push(self, token_id: int) -> str:
        """Add one token; return the text that became final, which may be ""."""
        if self._tokenizer is None:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        self.offset = self._offset_in(text)
        self._text = text
        if text != self._known_text and not text.endswith(REPLACEMENT):
            return self._advance(text, len(self._window))
        if len(self._window) - self._read < MAX_HELD_TOKENS:
            return ""
        if text == self._known_text:
            del self._window[self._read :]
            return ""
        cut = self._last_whole_character(text)
        return self._advance(self._decode(self._window[:cut]), cut)

    def finish(self) -> str:
        """Return the buffered text, with a replacement character for invalid bytes."""
        text = self._decode(self._window)
        return "" if text == self._known_text else self._advance(text, len(self._window))

    def _advance(self, text: str, end: int) -> str:
        """Return what `text`, the first `end` tokens of the window, adds to the known text."""
        known = self._known_text if text.startswith(self._known_text) else self._context_text
        del self._window[: self._read]
        self._read = end - self._read
        self._context_text = self._known_text = self._decode(self._window[: self._read])
        self._text = self._decode(self._window)
        self.num_characters += len(text) - len(known)
        return text[len(known) :]

    def _offset_in(self, text: str) -> int:
        """Position of the newest token, which made the window's text this one."""
        before = self._text
        if not text.startswith(before) or text.endswith(REPLACEMENT):
            before = before.rstrip(REPLACEMENT)  # bytes of a character that may be incomplete
        pairs = enumerate(zip(before, text, strict=False))
        begin = next((i for i, (a, b) in pairs if a != b), min(len(before), len(text)))
        return self.num_characters + max(0, begin - len(self._known_text))

    def _whole_characters(self, tail: list[int]) -> tuple[int, int]:
        """Return a start and an end in a prompt's last tokens that split no character."""
        first = max(len(tail) - PROMPT_CONTEXT_TOKENS, 0)
        for end in range(len(tail), max(len(tail) - MAX_CHARACTER_TOKENS, -1), -1):
            for start in range(first, max(first - MAX_CHARACTER_TOKENS, -1), -1):
                if REPLACEMENT not in self._decode(tail[start:end]):
                    return start, end
        return first, len(tail)

    def _last_whole_character(self, text: str) -> int:
        """Return the last index in the window at which no character is split.

        The two sides of a split character decode to more text than the whole. A character that
        starts before the last few tokens is complete.
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
    """Finds the first stop text in a stream, and buffers text that may be the start of one.

    The match that ends first is used; of matches with the same end, the longest. The result does
    not depend on how the stream was divided.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._include = include
        self._held = ""
        self._unsearched = 0  # characters of the held text in which no match may end

    def push(self, new_text: str, *, searched: bool = True) -> tuple[str, str | None]:
        """Add text; return the final text and the stop text that was found, or None.

        After a match, `push` must not be called again.

        Args:
            new_text: text that follows the text so far.
            searched: whether a stop text may end in the new text. It may begin before it.
        """
        text = self._held + new_text
        if not searched:
            self._unsearched = len(text)
        if (match := self._first_match(text)) is not None:
            end, stop = match
            self._held = ""
            return text[: end if self._include else end - len(stop)], stop
        shown = len(text) - self._num_possible(text)
        self._held = text[shown:]
        self._unsearched = max(0, self._unsearched - shown)
        return text[:shown], None

    def flush(self) -> str:
        """Return the buffered text, after the stream ended for another reason."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        matches = []
        for stop in self._stops:
            start = text.find(stop, max(0, self._unsearched - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), -len(stop), stop))
        end, _, stop = min(matches, default=(0, 0, ""))
        return (end, stop) if matches else None

    def _num_possible(self, text: str) -> int:
        """Length of the longest suffix of `text` that is a prefix of a stop text."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


@dataclass(frozen=True, slots=True)
class Ending:
    """Why an output ended, with the values of the OpenAI API and vLLM."""

    # "stop" for an end token or a stop text, "length" at `max_tokens`
    finish_reason: Literal["stop", "length"]
    # the stop text or stop token id; None for the model's own end tokens
    stop_reason: str | int | None = None


def ending_token(
    params: SamplingParams, eos_token_ids: Iterable[int], token_id: int, num_output_tokens: int
) -> Ending | None:
    """Whether a token ends its output; ids of the first `min_tokens` tokens do not."""
    if num_output_tokens > params.min_tokens:
        if not params.ignore_eos and token_id in eos_token_ids:
            return Ending("stop")
        if token_id in params.stop_token_ids:
            return Ending("stop", token_id)
    if num_output_tokens >= params.max_tokens:
        return Ending("length")
    return None


class OutputText:
    """Detokenizes one output and applies its stop rules.

    The text of an end token is left out unless `include_stop_str_in_output` is set. A stop text
    takes precedence over an end token and over the length. A stop text that ends in the text of
    the first `min_tokens` tokens does not end the output.

    Attributes:
        ending: why the output ended; None while it continues.
        text_offset: position of the newest token in the text, which a stop text may cut before it.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos_token_ids: Sequence[int],
        tokenizer: TokenDecoder | None,
        prompt_token_ids: Sequence[int],
    ) -> None:
        self.ending: Ending | None = None
        self.text_offset = 0
        self._params = params
        self._eos_token_ids = frozenset(eos_token_ids)
        self._num_tokens = 0
        self._detokenizer = Detokenizer(
            tokenizer, prompt_token_ids, skip_special_tokens=params.skip_special_tokens
        )
        self._stops = StopChecker(params.stop, include=params.include_stop_str_in_output)

    def push(self, token_id: int) -> str:
        """Add the newest token; return the text that became final. Sets `ending` at the end."""
        self._num_tokens += 1
        self.ending = ending_token(self._params, self._eos_token_ids, token_id, self._num_tokens)
        searched = self._num_tokens > self._params.min_tokens
        text, stop = self._stops.push(self._text_of(token_id), searched=searched)
        if stop is not None:
            self.ending = Ending("stop", stop)
        elif self.ending is not None:
            text += self._stops.flush()
        return text

    def complete(self) -> str:
        """End an output whose structure is complete; return the text that became final."""
        if self.ending is not None:  # by its length, after the last token of the structure
            self.ending = Ending("stop")
            return ""
        text, stop = self._stops.push(self._detokenizer.finish())
        self.ending = Ending("stop", stop)
        return text if stop is not None else text + self._stops.flush()

    def abort(self) -> str:
        return self._stops.flush() + self._detokenizer.finish()

    def _text_of(self, token_id: int) -> str:
        ending = self.ending
        hidden = ending is not None and ending.finish_reason == "stop"
        if not hidden or self._params.include_stop_str_in_output:
            text, self.text_offset = self._detokenizer.push(token_id), self._detokenizer.offset
            return text if ending is None else text + self._detokenizer.finish()
        text = self._detokenizer.finish()
        self.text_offset = self._detokenizer.num_characters
        return text
