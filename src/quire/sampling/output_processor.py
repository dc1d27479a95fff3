"""Output states of all unfinished requests, by request id."""

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence

from quire.config.sampling_params import SamplingParams
from quire.errors import RequestError
from quire.sampling.beam import BeamSearch
from quire.sampling.outputs import FinishReason, OutputDelta
from quire.sampling.pooling import StepHidden
from quire.sampling.request_state import RequestOutputState
from quire.sampling.sampler import SampledToken, ScoredToken
from quire.sampling.stop_rules import OutputText
from quire.scheduler.group import sequence_id
from quire.scheduler.request import Request
from quire.scheduler.request_parts import RequestState


class OutputProcessor:
    """Output states of unfinished requests; removes a state when all of its outputs have ended.

    Args:
        open_text: creates the `OutputText` of a sequence.
        release: frees the resources of a sequence.
        eos_token_ids: the model's end-of-sequence tokens.
    """

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
        """Return an id for a new request that is unused, as are the ids of its sequences.

        Args:
            wanted: the caller's id; None to generate one.
            number: first number to try for a generated id.
            num_sequences: number of sequences of the request.

        Raises:
            RequestError: the caller's id or the id of one of its sequences is in use.
        """
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
        """Create the output state of a request that is not accepted yet."""
        search = BeamSearch(params, self._eos_token_ids) if params.use_beam_search else None
        return RequestOutputState(
            submission_id, params, sequences, self._open_text, self._release, search
        )

    def open(self, state: RequestOutputState) -> None:
        """Register the output state of an accepted request."""
        self._open[state.submission_id] = state
        self._of_sequence |= {request.request_id: state for request in state.sequences}

    def unfinished(self, request_id: str | None = None) -> Iterator[tuple[int, Request]]:
        """Yield the unfinished sequences with their index, of one request or of all requests."""
        known = self._open.values() if request_id is None else (self._open.get(request_id),)
        for state in known:
            for index, request in enumerate(() if state is None else state.sequences):
                if request.progress.state is not RequestState.FINISHED:
                    yield index, request

    def add_scores(self, request: Request, first: int, scores: Sequence[ScoredToken]) -> None:
        """Add log-probabilities of prompt tokens from position `first` on."""
        self._of(request).add_scores(request, first, scores)

    def add_hidden(self, found: StepHidden) -> None:
        """Add hidden states of prompt tokens of a request with `pooling`."""
        self._of(found.request).add_hidden(found)

    def add_token(self, request: Request, token: SampledToken, now_s: float) -> list[OutputDelta]:
        """Add a token to a sequence; return the deltas that may be sent."""
        return self._close(request, self._of(request).add_token(request, token, now_s))

    def abort(self, request: Request, now_s: float) -> list[OutputDelta]:
        """End a cancelled sequence; return the deltas that may be sent."""
        return self._close(request, self._of(request).abort(request, now_s))

    def end(
        self, request: Request, reason: FinishReason, now_s: float, error: str | None = None
    ) -> list[OutputDelta]:
        """End a sequence; return no deltas if its request has ended already."""
        if request.request_id not in self._of_sequence:
            return []
        return self._close(request, self._of(request).end(request, reason, now_s, error))

    def search_of(self, request: Request) -> BeamSearch:
        """Return the beam search that a sequence belongs to."""
        search = self._of(request).search
        assert search is not None
        return search

    def end_search(self, request: Request, now_s: float) -> list[OutputDelta]:
        """End the beam search that a sequence belongs to."""
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
