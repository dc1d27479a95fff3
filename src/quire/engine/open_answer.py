"""An answer in the making: its request, its text so far, and the deltas it gives."""

from collections.abc import Callable, Sequence

from quire.engine.outputs import Delta, FinishReason, Usage
from quire.engine.request import Request
from quire.engine.sampler import SampledToken, ScoredToken
from quire.engine.stop_rules import OutputText


class OpenAnswer:
    """What the engine keeps of a request besides its KV.

    Args:
        request: whose answer this is.
        text: follows the answer's tokens.
        release: frees what a request holds; called when the answer ends.
    """

    def __init__(
        self, request: Request, text: OutputText, release: Callable[[Request], None]
    ) -> None:
        self.request = request
        self._text, self._release = text, release
        self._scores: list[ScoredToken | None] = [None]  # of the prompt; its first token has none

    def add_scores(self, first: int, scores: Sequence[ScoredToken]) -> None:
        """Add the scores of the prompt's tokens from `first` on.

        A preempted prompt is scored again from its start; what it had before is dropped.
        """
        self._scores[first:] = scores

    def add_token(self, token: SampledToken, now_s: float) -> Delta:
        """Add a token that was chosen. The delta says whether it was the last one."""
        request = self.request
        if token.error is not None:
            return self.end("error", now_s, error=token.error)
        if not request.output_token_ids:
            request.first_token_s = now_s
        request.output_token_ids.append(token.token_id)
        parts = {
            "text": self._text.push(token.token_id),
            "token_ids": (token.token_id,),
            "logprobs": None if request.params.logprobs is None else (token,),
        }
        ending = self._text.ending
        if ending is None:
            return Delta(request_id=request.request_id, **parts)  # type: ignore[arg-type]
        return self.end(ending.finish_reason, now_s, stop_reason=ending.stop_reason, **parts)

    def abort(self, now_s: float) -> Delta:
        """The last delta of an answer ended from outside, with the text held back so far."""
        return self.end("abort", now_s, text=self._text.abort())

    def end(self, reason: FinishReason, now_s: float, **parts: object) -> Delta:
        """Release the request and give the last delta.

        Args:
            reason: why there are no more.
            now_s: clock reading.
            parts: other fields of the delta.
        """
        request = self.request
        self._release(request)
        request.finish_s = now_s
        wants_scores = request.params.prompt_logprobs is not None
        return Delta(
            request_id=request.request_id,
            finish_reason=reason,
            prompt_logprobs=tuple(self._scores) if wants_scores else None,
            usage=_usage(request),
            **parts,  # type: ignore[arg-type]
        )


def _usage(request: Request) -> Usage:
    first_s = request.first_token_s if request.output_token_ids else request.finish_s
    return Usage(
        prompt_tokens=len(request.prompt_token_ids),
        completion_tokens=len(request.output_token_ids),
        cached_tokens=request.cached_tokens,
        preemptions=request.preemptions,
        kv_peak_bytes=request.kv_peak_bytes,
        first_token_s=first_s - request.arrival_s,
        total_s=request.finish_s - request.arrival_s,
    )
