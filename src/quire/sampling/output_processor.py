"""Output states of all unfinished requests, by request id."""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from quire.config.sampling_params import SamplingParams
from quire.errors import RequestError
from quire.sampling.beam import BeamSearch
from quire.sampling.beam_step import tokens_of
from quire.sampling.detokenizer import OutputText
from quire.sampling.outputs import FinishReason, OutputDelta, Usage, joined_delta
from quire.sampling.pooling import PooledStates, StepHidden
from quire.sampling.sampler import SampledToken, ScoredToken
from quire.scheduler.request import Request, RequestState, sequence_id


class SequenceOutput:
    """Output state of one sequence."""

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
        self._scores: list[ScoredToken | None] = [None]  # scores of the prompt, none for token 0
        self._pooled = PooledStates()

    def add_scores(self, first: int, scores: Sequence[ScoredToken]) -> None:
        """Add the log-probabilities of prompt tokens from position `first` on.

        A preempted prompt is scored again from its start; its earlier values are replaced. Those of
        a tail that was swapped out are retained, because it is not computed again.
        """
        self._scores[first : first + len(scores)] = scores

    def add_hidden(self, found: StepHidden) -> None:
        self._pooled.add(found)

    def add_token(self, token: SampledToken, now_s: float) -> OutputDelta:
        """Add a sampled token; return its delta, which has a finish reason for the last token."""
        request = self.request
        if token.error is not None:
            return self.end("error", now_s, error=token.error)
        is_first = not request.output_token_ids
        if is_first:
            request.progress.first_token_s = now_s
        request.output_token_ids.append(token.token_id)
        if self._score is not None:
            self._score += token.logprob or 0.0
        text = self._text.push(token.token_id)
        if self._must_end():
            text += self._text.complete()
        scored = replace(token, text_offset=self._text.text_offset)
        fields = {
            "text": text,
            "token_ids": (token.token_id,),
            "logprobs": None if request.params.logprobs is None else (scored,),
            "cached_tokens": request.progress.cached_tokens if is_first else None,
        }
        ending = self._text.ending
        if ending is None:
            return OutputDelta(request_id=self._submission_id, index=self._index, **fields)  # type: ignore[arg-type]
        return self.end(ending.finish_reason, now_s, stop_reason=ending.stop_reason, **fields)

    def _must_end(self) -> bool:
        """Whether the structure of the output is complete; beams end with their end token."""
        request, ending = self.request, self._text.ending
        if request.matcher is None or request.params.use_beam_search:
            return False
        if ending is not None and ending.finish_reason == "stop":
            return False
        return request.matcher.must_end(request.output_token_ids)

    def abort(self, now_s: float) -> OutputDelta:
        """End a cancelled completion; return its last delta, with the buffered text."""
        return self.end("abort", now_s, text=self._text.abort())

    def end(self, reason: FinishReason, now_s: float, **fields: object) -> OutputDelta:
        """Release the sequence and return its last delta."""
        request = self.request
        self._release(request)
        request.progress.finish_s = now_s
        if request.matcher is not None:
            request.matcher.close()
        wants_scores = request.params.prompt_logprobs is not None and not self._index
        has_pooled = request.params.pooling is not None and reason == "length"
        return OutputDelta(
            request_id=self._submission_id,
            index=self._index,
            finish_reason=reason,
            score=self._score,
            prompt_logprobs=tuple(self._scores) if wants_scores else None,
            embedding=self._pooled.vector() if has_pooled else None,
            **fields,  # type: ignore[arg-type]
        )


class RequestOutputState:
    """Output state of one request: returns the deltas of its sequences.

    If completions are ranked, only the best ones are returned, after all have ended.

    Attributes:
        submission_id: see above.
        sequences: all sequences, including ended ones.
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
        self._outputs = {
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
        return self._search

    @property
    def is_open(self) -> bool:
        return self._num_open > 0

    def add_scores(self, request: Request, first: int, scores: Sequence[ScoredToken]) -> None:
        self._outputs[request.request_id].add_scores(first, scores)

    def add_hidden(self, found: StepHidden) -> None:
        self._outputs[found.request.request_id].add_hidden(found)

    def add_token(self, request: Request, token: SampledToken, now_s: float) -> list[OutputDelta]:
        return self._pass(self._outputs[request.request_id].add_token(token, now_s), now_s)

    def abort(self, request: Request, now_s: float) -> list[OutputDelta]:
        return self._pass(self._outputs[request.request_id].abort(now_s), now_s)

    def end(
        self, request: Request, reason: FinishReason, now_s: float, error: str | None = None
    ) -> list[OutputDelta]:
        """End one of the sequences; beams end together."""
        if self._search is None:
            output = self._outputs[request.request_id]
            return self._pass(output.end(reason, now_s, error=error), now_s)
        ended = [output.end(reason, now_s, error=error) for output in self._outputs.values()]
        return [delta for last in ended for delta in self._pass(last, now_s)]

    def end_search(self, now_s: float) -> list[OutputDelta]:
        assert self._search is not None
        deltas: list[OutputDelta] = []
        best = self._search.ended[: self._params.n]
        for output in self._outputs.values():
            output.request.progress.output_token_ids = []
        for output, found in zip(self._outputs.values(), best, strict=False):
            steps = [output.add_token(token, now_s) for token in tokens_of(found.path)]
            deltas.append(replace(joined_delta(steps), score=found.score))
        for output in list(self._outputs.values())[len(best) :]:
            output.end("abort", now_s)
        self._num_open = 0
        return self._numbered(deltas, now_s)

    def _pass(self, delta: OutputDelta, now_s: float) -> list[OutputDelta]:
        self._num_open -= delta.finish_reason is not None
        if self._params.ranked:
            self._held.setdefault(delta.index, []).append(delta)
            return [] if self._num_open else self._ranked(now_s)
        return [delta if self._num_open else replace(delta, usage=_usage(self.sequences, now_s))]

    def _ranked(self, now_s: float) -> list[OutputDelta]:
        """Return the n completions with the highest score, best first, each as one delta.

        The best one contains the prompt log-probabilities, which the first sequence computed.
        """
        joined = sorted(map(joined_delta, self._held.values()), key=_rank)
        scores = next((d.prompt_logprobs for d in joined if d.prompt_logprobs is not None), None)
        best, *others = (replace(delta, prompt_logprobs=None) for delta in joined)
        ranked = [replace(best, prompt_logprobs=scores), *others]
        return self._numbered(ranked[: self._params.n], now_s)

    def _numbered(self, completions: Sequence[OutputDelta], now_s: float) -> list[OutputDelta]:
        requested = self._params.logprobs is not None
        usage = _usage(self.sequences, now_s)
        last = len(completions) - 1
        return [
            replace(
                completion,
                index=index,
                logprobs=completion.logprobs if requested else None,
                usage=usage if index == last else None,
            )
            for index, completion in enumerate(completions)
        ]


def _rank(completion: OutputDelta) -> tuple[bool, float, int]:
    """Sort key: highest score first, failed completions last, equal scores by index."""
    score = float("-inf") if completion.score is None else completion.score
    return completion.error is not None, -score, completion.index


def _usage(sequences: Iterable[Request], now_s: float) -> Usage:
    listed = list(sequences)
    first = listed[0]
    group = first.group or first.split_from
    # peaks of single sequences, and of the group while its pages were shared
    peaks = [r.memory.kv_peak_bytes for r in listed] + ([group.kv_peak_bytes] if group else [])
    proposals = [r.drafts for r in listed if r.drafts is not None]
    started = [r.progress.first_token_s for r in listed if r.output_token_ids]
    return Usage(
        prompt_tokens=len(first.prompt_token_ids),
        completion_tokens=sum(len(r.output_token_ids) for r in listed),
        cached_tokens=max(r.progress.cached_tokens for r in listed),
        preemptions=max(r.progress.num_preemptions for r in listed),
        evictions=max(r.eviction.num_evictions for r in listed),
        evicted_tokens=round(max(r.eviction.evicted_tokens for r in listed)),
        recomputed_tokens=sum(r.progress.recomputed_tokens for r in listed),
        kv_peak_bytes=max(peaks),
        draft_tokens=sum(drafts.num_proposed for drafts in proposals),
        accepted_draft_tokens=sum(drafts.accepted + drafts.num_accepted for drafts in proposals),
        first_token_s=min(started, default=now_s) - first.spec.arrival_s,
        total_s=now_s - first.spec.arrival_s,
        max_tokens=first.params.max_tokens,
        max_tokens_limit=first.spec.max_tokens_limit,
    )


class OutputProcessor:
    """Output states of unfinished requests; removes a state when all of its outputs have ended."""

    def __init__(
        self,
        open_text: Callable[[Request], OutputText],
        release: Callable[[Request], None],
        eos_token_ids: Collection[int],
    ) -> None:
        self._open_text, self._release = open_text, release
        self._eos_token_ids = eos_token_ids
        self._open: dict[str, RequestOutputState] = {}
        self._of_sequence: dict[str, RequestOutputState] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open or request_id in self._of_sequence

    def free_id(self, wanted: str | None, number: int, num_sequences: int = 1) -> str:
        """An id for a new request that is unused, as are the ids of its sequences."""
        if wanted is None:
            ids = (f"request-{n}" for n in itertools.count(number))
            return next(free for free in ids if self._first_used(free, num_sequences) is None)
        used = self._first_used(wanted, num_sequences)
        if used is not None:
            raise RequestError(f"request id {used!r} is in use: use another id")
        return wanted

    def _first_used(self, request_id: str, num_sequences: int) -> str | None:
        """Return the first id of a request's sequences that is in use; None if all are unused."""
        ids = (sequence_id(request_id, index) for index in range(num_sequences))
        return next((used for used in ids if used in self), None)

    def make(
        self, submission_id: str, params: SamplingParams, sequences: Sequence[Request]
    ) -> RequestOutputState:
        search = BeamSearch(params, self._eos_token_ids) if params.use_beam_search else None
        return RequestOutputState(
            submission_id, params, sequences, self._open_text, self._release, search
        )

    def open(self, state: RequestOutputState) -> None:
        self._open[state.submission_id] = state
        self._of_sequence |= {request.request_id: state for request in state.sequences}

    def unfinished(self, request_id: str | None = None) -> Iterator[tuple[int, Request]]:
        known = self._open.values() if request_id is None else (self._open.get(request_id),)
        for state in known:
            for index, request in enumerate(() if state is None else state.sequences):
                if request.progress.state is not RequestState.FINISHED:
                    yield index, request

    def add_scores(self, request: Request, first: int, scores: Sequence[ScoredToken]) -> None:
        self._of(request).add_scores(request, first, scores)

    def add_hidden(self, found: StepHidden) -> None:
        self._of(found.request).add_hidden(found)

    def add_token(self, request: Request, token: SampledToken, now_s: float) -> list[OutputDelta]:
        return self._close(request, self._of(request).add_token(request, token, now_s))

    def abort(self, request: Request, now_s: float) -> list[OutputDelta]:
        return self._close(request, self._of(request).abort(request, now_s))

    def end(
        self, request: Request, reason: FinishReason, now_s: float, error: str | None = None
    ) -> list[OutputDelta]:
        """End a sequence; return no deltas if its request has ended already."""
        if request.request_id not in self._of_sequence:
            return []
        return self._close(request, self._of(request).end(request, reason, now_s, error))

    def search_of(self, request: Request) -> BeamSearch:
        search = self._of(request).search
        assert search is not None
        return search

    def end_search(self, request: Request, now_s: float) -> list[OutputDelta]:
        return self._close(request, self._of(request).end_search(now_s))

    def _of(self, request: Request) -> RequestOutputState:
        return self._of_sequence[request.request_id]

    def _close(self, request: Request, deltas: list[OutputDelta]) -> list[OutputDelta]:
        state = self._of(request)
        if not state.is_open:
            del self._open[state.submission_id]
            for sequence in state.sequences:
                del self._of_sequence[sequence.request_id]
        return deltas
