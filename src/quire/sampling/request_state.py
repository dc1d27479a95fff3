"""Output of one submission: the text of each of its sequences, and what may be sent already."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from quire.config.sampling_params import SamplingParams
from quire.sampling.beam import BeamSearch
from quire.sampling.beam_step import tokens_of
from quire.sampling.outputs import FinishReason, OutputDelta, Usage
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


class RequestOutputState:
    """Passes on what its answers give; where they are ranked, only the best, when all have ended.

    Args:
        submission_id: what the submission is called.
        params: as submitted.
        sequences: of the submission.
        open_text: makes what follows the text of an answer.
        release: frees what a request holds.
        search: where the sequences are the beams of one.

    Attributes:
        submission_id: see above.
        sequences: all of them, those that have ended included.
    """

    def __init__(
        self,
        submission_id: str,
        params: SamplingParams,
        sequences: Sequence[Request],
        open_text: Callable[[Request], OutputText],
        release: Callable[[Request], None],
        search: BeamSearch | None = None,
    ) -> None:
        self.submission_id, self.sequences = submission_id, tuple(sequences)
        self._params = params
        self._answers = {
            request.request_id: SequenceOutput(
                request, submission_id, index, open_text(request), release
            )
            for index, request in enumerate(sequences)
        }
        self._num_open = len(sequences)
        self._held: dict[int, list[OutputDelta]] = {}
        self._search = search

    @property
    def search(self) -> BeamSearch | None:
        """The beam search that the answers come of; None where they are drawn."""
        return self._search

    @property
    def is_open(self) -> bool:
        """Whether any answer goes on."""
        return self._num_open > 0

    def add_scores(self, request: Request, first: int, scores: Sequence[ScoredToken]) -> None:
        """Add scores of the prompt's tokens; see `SequenceOutput`."""
        self._answers[request.request_id].add_scores(first, scores)

    def add_token(self, request: Request, token: SampledToken, now_s: float) -> list[OutputDelta]:
        """Add a token to one of the answers; return what may be shown."""
        return self._pass(self._answers[request.request_id].add_token(token, now_s), now_s)

    def abort(self, request: Request, now_s: float) -> list[OutputDelta]:
        """Note that one of the answers was ended from outside."""
        return self._pass(self._answers[request.request_id].abort(now_s), now_s)

    def end(
        self, request: Request, reason: FinishReason, now_s: float, error: str | None = None
    ) -> list[OutputDelta]:
        """End one of the answers where it is; beams end together."""
        if self._search is None:
            answer = self._answers[request.request_id]
            return self._pass(answer.end(reason, now_s, error=error), now_s)
        ended = [answer.end(reason, now_s, error=error) for answer in self._answers.values()]
        return [delta for part in ended for delta in self._pass(part, now_s)]

    def end_search(self, now_s: float) -> list[OutputDelta]:
        """End the answers with the best sequences that the search has found."""
        assert self._search is not None
        deltas: list[OutputDelta] = []
        best = self._search.ended[: self._params.n]
        for answer in self._answers.values():
            answer.request.progress.output_token_ids = []
        for answer, found in zip(self._answers.values(), best, strict=False):
            parts = [answer.add_token(token, now_s) for token in tokens_of(found.path)]
            deltas.append(replace(_joined(parts), score=found.score))
        for answer in list(self._answers.values())[len(best) :]:
            answer.end("abort", now_s)
        self._num_open = 0
        return self._numbered(deltas, now_s)

    def _pass(self, delta: OutputDelta, now_s: float) -> list[OutputDelta]:
        self._num_open -= delta.finish_reason is not None
        if self._params.ranked:
            self._held.setdefault(delta.index, []).append(delta)
            return [] if self._num_open else self._ranked(now_s)
        return [delta if self._num_open else replace(delta, usage=_usage(self.sequences, now_s))]

    def _ranked(self, now_s: float) -> list[OutputDelta]:
        """The n answers with the highest score, best first, each as one delta.

        The best one carries the scores of the prompt, which the first sequence has computed.
        """
        joined = sorted(map(_joined, self._held.values()), key=_rank)
        scores = next((d.prompt_logprobs for d in joined if d.prompt_logprobs is not None), None)
        best, *others = (replace(delta, prompt_logprobs=None) for delta in joined)
        ranked = [replace(best, prompt_logprobs=scores), *others]
        return self._numbered(ranked[: self._params.n], now_s)

    def _numbered(self, answers: Sequence[OutputDelta], now_s: float) -> list[OutputDelta]:
        requested = self._params.logprobs is not None
        usage = _usage(self.sequences, now_s)
        last = len(answers) - 1
        return [
            replace(
                answer,
                index=index,
                logprobs=answer.logprobs if requested else None,
                usage=usage if index == last else None,
            )
            for index, answer in enumerate(answers)
        ]


def _joined(deltas: Sequence[OutputDelta]) -> OutputDelta:
    scored = [token for delta in deltas for token in delta.logprobs or ()]
    return replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(scored),
    )


def _rank(answer: OutputDelta) -> tuple[bool, float, int]:
    """Answers that failed come last; of equal ones the first drawn comes first."""
    score = float("-inf") if answer.score is None else answer.score
    return answer.error is not None, -score, answer.index


def _usage(sequences: Iterable[Request], now_s: float) -> Usage:
    listed = list(sequences)
    first = listed[0]
    group = first.group or first.split_from
    # of one alone, or of one whose pages went while it ran on
    peaks = [r.memory.kv_peak_bytes for r in listed] + ([group.kv_peak_bytes] if group else [])
    started = [r.progress.first_token_s for r in listed if r.output_token_ids]
    return Usage(
        prompt_tokens=len(first.prompt_token_ids),
        completion_tokens=sum(len(r.output_token_ids) for r in listed),
        cached_tokens=max(r.progress.cached_tokens for r in listed),
        preemptions=max(r.progress.num_preemptions for r in listed),
        evicted_tokens=round(max(r.eviction.evicted_tokens for r in listed)),
        kv_peak_bytes=max(peaks),
        first_token_s=min(started, default=now_s) - first.spec.arrival_s,
        total_s=now_s - first.spec.arrival_s,
    )
