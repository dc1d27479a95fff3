"""The open answers to one submission: who is still going on, and what may be shown already."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from quire.config.sampling_params import SamplingParams
from quire.sampling.beam import BeamSearch
from quire.sampling.outputs import FinishReason, OutputDelta, Usage
from quire.sampling.sampler import SampledToken, ScoredToken
from quire.sampling.searching import tokens_of
from quire.sampling.sequence_output import SequenceOutput
from quire.sampling.stop_rules import OutputText
from quire.scheduler.request import Request


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
