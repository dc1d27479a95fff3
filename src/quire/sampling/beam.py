"""Beam search as a state machine over candidates: who goes on, who has ended, when to stop.

    candidates   best first, over all beams      -3.1 a   -3.4 b END   -3.9 c   -4.0 a END   ...
    open         the first `width` that go on     a, c, ...
    ended        of the first `width` candidates those that end: b, if it is among the best ended

Source: the semantics are those of Transformers 5 (`GenerationMixin._beam_search`), so that the
same sequences and scores come out. Its placeholders with scores of -1e9 are left out here: what
does not exist is not in the list. Of candidates with equal scores the one given first counts.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from quire.config.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Candidate:
    """A beam with one more token.

    Attributes:
        score: sum of log-probabilities (nats), this token's included.
        parent: which of the open beams it continues.
        token_id: the token.
        report: what its caller wants to know of it when the search has ended.
    """

    score: float
    parent: int
    token_id: int
    report: object = None


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A sequence that has ended.

    Attributes:
        score: sum of log-probabilities over length to the power of the length penalty.
        path: its tokens, the one that ended it included.
    """

    score: float
    path: tuple[Candidate, ...]


class BeamSearch:
    """One search, from the first token to its best sequences.

    Args:
        params: resolved options.
        eos_token_ids: the model's end-of-sequence tokens.

    Attributes:
        params: see above.
        width: beams that are kept.
        scores: of the open beams, best first.
        beams: tokens of the open beams, as the candidates that they were.
        ended: the best sequences that have ended, best first.
        is_done: whether no further token is wanted.
    """

    def __init__(self, params: SamplingParams, eos_token_ids: Collection[int]) -> None:
        eos = () if params.ignore_eos else eos_token_ids
        self._end_token_ids = frozenset(eos) | frozenset(params.stop_token_ids)
        self.params, self.width = params, params.num_sequences
        self.scores: list[float] = [0.0]
        self.beams: list[tuple[Candidate, ...]] = [()]
        self.ended: list[Hypothesis] = []
        self.is_done = False

    @property
    def num_candidates(self) -> int:
        """Candidates that are enough to find `width` beams that go on."""
        return max(2, 1 + len(self._end_token_ids)) * self.width

    def advance(self, candidates: Sequence[Candidate]) -> list[int]:
        """Add a token to every beam.

        Args:
            candidates: the best `num_candidates` continuations of the open beams, best first.

        Returns:
            For each beam that is open now, which of those before it continues.
        """
        length = len(self.beams[0]) + 1
        ends = [self._ends(candidate, length) for candidate in candidates]
        pairs = list(zip(candidates, ends, strict=True))
        for candidate in (c for c, over in pairs[: self.width] if over):
            score = candidate.score / float(length) ** self.params.length_penalty
            self.ended.append(Hypothesis(score, self._path(candidate)))
        self.ended = sorted(self.ended, key=lambda h: -h.score)[: self.width]
        going_on = [candidate for candidate, over in pairs if not over][: self.width]
        self.beams = [self._path(candidate) for candidate in going_on]
        self.scores = [candidate.score for candidate in going_on]
        self.is_done = not going_on or not self._may_improve(length)
        return [candidate.parent for candidate in going_on]

    def _path(self, candidate: Candidate) -> tuple[Candidate, ...]:
        return (*self.beams[candidate.parent], candidate)

    def _ends(self, candidate: Candidate, length: int) -> bool:
        return length >= self.params.max_tokens or candidate.token_id in self._end_token_ids

    def _may_improve(self, length: int) -> bool:
        """Whether an open beam could still enter the list of those that have ended.

        With early_stopping=False the best open beam is judged as if it ended now, which a length
        penalty over 0 makes a guess; "never" judges it by the longest sequence there can be.
        """
        params = self.params
        if len(self.ended) < self.width:
            return True
        if params.early_stopping is True:
            return False
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = params.max_tokens
        best: float = self.scores[0] / float(length) ** params.length_penalty
        return best > self.ended[-1].score
