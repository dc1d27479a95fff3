"""Stop rules of outputs: end tokens, stop texts and the length, applied during detokenization."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from quire.config.sampling_params import SamplingParams
from quire.sampling.detokenizer import Detokenizer, StopChecker, TokenDecoder


@dataclass(frozen=True, slots=True)
class Ending:
    """Why an output ended, with the values of the OpenAI API and vLLM.

    Attributes:
        finish_reason: "stop" for an end token or a stop text, "length" at `max_tokens`.
        stop_reason: the stop text, or the id from `stop_token_ids`, that ended the output; None for
            the model's end-of-sequence tokens and for "length".
    """

    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None = None


def ending_token(
    params: SamplingParams, eos_token_ids: Iterable[int], token_id: int, num_output_tokens: int
) -> Ending | None:
    """Check whether a token ends its output, by its id or by the output's length.

    Args:
        params: the sampling options of the request.
        eos_token_ids: the model's end-of-sequence tokens.
        token_id: the newest output token.
        num_output_tokens: number of output tokens, the newest included.

    Returns:
        The ending; None if the output continues. Ids of the first `min_tokens` tokens do not end
        the output.
    """
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

    Args:
        params: the sampling options of the request.
        eos_token_ids: the model's end-of-sequence tokens.
        tokenizer: None for a model without a tokenizer: there is no text, and only token ids and
            the length end the output.
        prompt_token_ids: the prompt.

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
        """Return the buffered text of a cancelled output."""
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
