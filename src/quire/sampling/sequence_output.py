"""An answer in the making: its request, its text so far, and the deltas it gives."""

from collections.abc import Callable, Sequence

from quire.sampling.outputs import FinishReason, OutputDelta
from quire.sampling.sampler import SampledToken, ScoredToken
from quire.sampling.stop_rules import OutputText
from quire.scheduler.request import Request


class SequenceOutput:
    """What the engine keeps of a request besides its KV.

    Args:
        request: whose answer this is.
        submission_id: what its submission is called.
        index: which of the answers to its prompt.
        text: follows the answer's tokens.
        release: frees what a request holds; called when the answer ends.
    """

    def __init__(
        self,
        request: Request,
        submission_id: str,
        index: int,
        text: OutputText,
        release: Callable[[Request], None],
    ) -> None:
        self.request = request
        self._index = index
        self._submission_id = submission_id
        self._score: float | None = None if request.params.logprobs is None else 0.0
        self._text, self._release = text, release
        self._scores: list[ScoredToken | None] = [None]  # of the prompt; its first token has none

    def add_scores(self, first: int, scores: Sequence[ScoredToken]) -> None:
        """Add the scores of the prompt's tokens from `first` on.

        A preempted prompt is scored again from its start; what it had before is dropped.
        """
        self._scores[first:] = scores

    def add_token(self, token: SampledToken, now_s: float) -> OutputDelta:
        """Add a token that was chosen. The delta says whether it was the last one."""
        request = self.request
        if token.error is not None:
            return self.end("error", now_s, error=token.error)
        if not request.output_token_ids:
            request.progress.first_token_s = now_s
        request.output_token_ids.append(token.token_id)
        if self._score is not None:
            self._score += token.logprob or 0.0
        parts = {
            "text": self._text.push(token.token_id),
            "token_ids": (token.token_id,),
            "logprobs": None if request.params.logprobs is None else (token,),
        }
        ending = self._text.ending
        if ending is None:
            return OutputDelta(request_id=self._submission_id, index=self._index, **parts)  # type: ignore[arg-type]
        return self.end(ending.finish_reason, now_s, stop_reason=ending.stop_reason, **parts)

    def abort(self, now_s: float) -> OutputDelta:
        """The last delta of an answer ended from outside, with the text held back so far."""
        return self.end("abort", now_s, text=self._text.abort())

    def end(self, reason: FinishReason, now_s: float, **parts: object) -> OutputDelta:
        """Release the request and give the last delta.

        Args:
            reason: why there are no more.
            now_s: clock reading.
            parts: other fields of the delta.
        """
        request = self.request
        self._release(request)
        request.progress.finish_s = now_s
        wants_scores = request.params.prompt_logprobs is not None and not self._index
        return OutputDelta(
            request_id=self._submission_id,
            index=self._index,
            finish_reason=reason,
            score=self._score,
            prompt_logprobs=tuple(self._scores) if wants_scores else None,
            **parts,  # type: ignore[arg-type]
        )
