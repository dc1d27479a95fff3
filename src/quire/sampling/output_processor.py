"""All replies that are open, by the id of their submission."""

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence

from quire.config.sampling_params import SamplingParams
from quire.errors import RequestError
from quire.sampling.beam import BeamSearch
from quire.sampling.outputs import FinishReason, OutputDelta
from quire.sampling.request_state import RequestOutputState
from quire.sampling.sampler import SampledToken, ScoredToken
from quire.sampling.stop_rules import OutputText
from quire.scheduler.group import sequence_id
from quire.scheduler.request import Request
from quire.scheduler.request_parts import RequestState


class OutputProcessor:
    """Finds the reply that a sequence belongs to, and forgets it when its last answer has ended.

    Args:
        open_text: makes what follows the text of a sequence.
        release: frees what a sequence holds.
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
        """An id for a new submission, such that the ids of its sequences are free too.

        Args:
            wanted: of the caller's choice; None for one of ours.
            number: that ours begin with.
            num_sequences: of the submission.

        Raises:
            RequestError: it is in use, or the id of one of its sequences is.
        """
        if wanted is None:
            ids = (f"request-{n}" for n in itertools.count(number))
            return next(free for free in ids if self._taken(free, num_sequences) is None)
        taken = self._taken(wanted, num_sequences)
        if taken is not None:
            raise RequestError(f"a request {taken!r} is already running; use another id")
        return wanted

    def _taken(self, request_id: str, num_sequences: int) -> str | None:
        """The first id of a submission's sequences that is in use."""
        ids = (sequence_id(request_id, index) for index in range(num_sequences))
        return next((taken for taken in ids if taken in self), None)

    def make(
        self, submission_id: str, params: SamplingParams, sequences: Sequence[Request]
    ) -> RequestOutputState:
        """Make the reply to a submission that has still to be accepted."""
        search = BeamSearch(params, self._eos_token_ids) if params.use_beam_search else None
        return RequestOutputState(
            submission_id, params, sequences, self._open_text, self._release, search
        )

    def open(self, reply: RequestOutputState) -> None:
        """From now on find this reply by its sequences."""
        self._open[reply.submission_id] = reply
        self._of_sequence |= {request.request_id: reply for request in reply.sequences}

    def unfinished(self, request_id: str | None = None) -> Iterator[tuple[int, Request]]:
        """Sequences that have not ended, each with its index: of one submission, or of all."""
        known = self._open.values() if request_id is None else (self._open.get(request_id),)
        for reply in known:
            for index, request in enumerate(() if reply is None else reply.sequences):
                if request.progress.state is not RequestState.FINISHED:
                    yield index, request

    def add_scores(self, request: Request, first: int, scores: Sequence[ScoredToken]) -> None:
        """Add scores of the prompt's tokens from `first` on."""
        self._of(request).add_scores(request, first, scores)

    def add_token(self, request: Request, token: SampledToken, now_s: float) -> list[OutputDelta]:
        """Add a token to a sequence; return what may be shown."""
        return self._close(request, self._of(request).add_token(request, token, now_s))

    def abort(self, request: Request, now_s: float) -> list[OutputDelta]:
        """Note that a sequence was ended from outside."""
        return self._close(request, self._of(request).abort(request, now_s))

    def end(
        self, request: Request, reason: FinishReason, now_s: float, error: str | None = None
    ) -> list[OutputDelta]:
        """End a sequence where it is; nothing where its reply has ended with another one."""
        if request.request_id not in self._of_sequence:
            return []
        return self._close(request, self._of(request).end(request, reason, now_s, error))

    def search_of(self, request: Request) -> BeamSearch:
        """The search that a sequence is a beam of."""
        search = self._of(request).search
        assert search is not None
        return search

    def end_search(self, request: Request, now_s: float) -> list[OutputDelta]:
        """End the search that a sequence is a beam of."""
        return self._close(request, self._of(request).end_search(now_s))

    def _of(self, request: Request) -> RequestOutputState:
        return self._of_sequence[request.request_id]

    def _close(self, request: Request, deltas: list[OutputDelta]) -> list[OutputDelta]:
        reply = self._of(request)
        if not reply.is_open:
            del self._open[reply.submission_id]
            for sequence in reply.sequences:
                del self._of_sequence[sequence.request_id]
        return deltas
