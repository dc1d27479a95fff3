"""Beam search as a state machine over candidates: open beams, ended sequences, stopping rule.

    candidates   best first, over all beams      -3.1 a   -3.4 b END   -3.9 c   -4.0 a END   ...
    open         the first `width` candidates that do not end: a, c, ...
    ended        the candidates that end among the first `width`: b, if it is among the best

Source: `GenerationMixin._beam_search` of Transformers 5, with the same sequences and scores.
Differs from it: there are no placeholder beams with scores of -1e9. Of candidates with equal
scores, the first one is preferred.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from quire.config.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Candidate:
    """A beam with one more token."""

    score: float  # sum of log-probabilities (nats), this token included
    parent: int  # index of the open beam that it continues
    token_id: int
    report: object = None  # data that the caller attaches, such as logprobs


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """An ended sequence."""

    score: float  # sum of log-probabilities over length to the power of the length penalty
    path: tuple[Candidate, ...]  # including the last token


class BeamSearch:
    """State of one beam search.

    Attributes:
        params: see above.
        width: number of beams.
        scores: scores of the open beams, best first.
        beams: tokens of the open beams, as candidates.
        ended: the best ended sequences, best first.
        is_done: whether the search is finished.
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
        """Number of candidates among which at least `width` do not end."""
        return max(2, 1 + len(self._end_token_ids)) * self.width

    def advance(self, candidates: Sequence[Candidate]) -> list[int]:
        """Add a token to every beam; for each new open beam, the index of the beam it continues."""
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
        """Whether an open beam could still become one of the best ended sequences.

        With early_stopping=False the best open beam is scored with its current length, which is a
        heuristic for a length penalty above 0. With "never" it is scored with the maximum length.
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
