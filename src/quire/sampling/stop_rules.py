"""When an answer ends, and which of its text is shown: end tokens, stop texts, length."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from quire.config.sampling_params import SamplingParams
from quire.sampling.detokenizer import Detokenizer, StopChecker, TokenDecoder


@dataclass(frozen=True, slots=True)
class Ending:
    """Why an answer ended, in the words of the OpenAI API and vLLM.

    Attributes:
        finish_reason: "stop" for an end token or a stop text, "length" at `max_tokens`.
        stop_reason: the stop text or the id from `stop_token_ids` that ended it; None for the
            model's own end-of-sequence token and for "length".
    """

    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None = None


def ending_token(
    params: SamplingParams, eos_token_ids: Iterable[int], token_id: int, num_output_tokens: int
) -> Ending | None:
    """Whether a token ends its answer, by its id or by the answer's length.

    Args:
        params: the options of the request.
        eos_token_ids: the model's end-of-sequence tokens.
        token_id: the newest token of the answer.
        num_output_tokens: tokens of the answer, the newest included.

    Returns:
        The ending, or None to go on. Ids are not looked at within the first `min_tokens` tokens.
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
    """Follows one answer: takes its tokens, gives its text, and says when it is over.

    The text of an end token is left out unless `include_stop_str_in_output` asks for it. A stop
    text counts before an end token or the length, and is not looked for in the text of the first
    `min_tokens` tokens.

    Args:
        params: the options of the request.
        eos_token_ids: the model's end-of-sequence tokens.
        tokenizer: None for a model without one: no text, and only ids and length end the answer.
        prompt_token_ids: what the answer continues.

    Attributes:
        ending: why the answer is over; None while it is not.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos_token_ids: Sequence[int],
        tokenizer: TokenDecoder | None,
        prompt_token_ids: Sequence[int],
    ) -> None:
        self.ending: Ending | None = None
        self._params = params
        self._eos_token_ids = frozenset(eos_token_ids)
        self._num_tokens = 0
        self._detokenizer = Detokenizer(
            tokenizer, prompt_token_ids, skip_special_tokens=params.skip_special_tokens
        )
        self._stops = StopChecker(params.stop, include=params.include_stop_str_in_output)

    def push(self, token_id: int) -> str:
        """Add the newest token; return the text that may be shown. Sets `ending` at the end."""
        self._num_tokens += 1
        self.ending = ending_token(self._params, self._eos_token_ids, token_id, self._num_tokens)
        text = self._text_of(token_id)
        if self._num_tokens <= self._params.min_tokens:
            return text
        text, stop = self._stops.push(text)
        if stop is not None:
            self.ending = Ending("stop", stop)
        elif self.ending is not None:
            text += self._stops.flush()
        return text

    def abort(self) -> str:
        """Return the text still held back: the answer was ended from outside."""
        return self._stops.flush() + self._detokenizer.finish()

    def _text_of(self, token_id: int) -> str:
        if self.ending is None:
            return self._detokenizer.push(token_id)
        hidden = self.ending.finish_reason == "stop" and not self._params.include_stop_str_in_output
        text = "" if hidden else self._detokenizer.push(token_id)
        return text + self._detokenizer.finish()
