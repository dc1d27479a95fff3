"""Costs that begin with what `quire profile` stored and follow what the engine measures."""

from quire.plan.estimator import RateEstimator
from quire.plan.rates import CopyRate, CopyRates, Costs, PrefillRates

# what was stored as nothing may still turn out to be something, and is learned from about there
_LEAST_CALL_S = 1e-4
_LEAST_PIECE_S = 1e-5
_LEAST_SQUARES_OF_A_TOKEN = 1e-5


class LearnedCosts:
    """Costs of this engine on this machine, as far as they are known now.

    Args:
        prior: stored or conservative ones.
        forgetting: see `RateEstimator`.
    """

    def __init__(self, prior: Costs, *, forgetting: float = 0.97) -> None:
        self._chunk_tokens = prior.chunk_tokens
        self._out = _of_copies(prior.copies.out, forgetting)
        self._back = _of_copies(prior.copies.back, forgetting)
        reading = prior.prefill
        call_s = max(reading.call_s, _LEAST_CALL_S)
        square_s = max(reading.square_s, reading.token_s * _LEAST_SQUARES_OF_A_TOKEN)
        self._prefill = RateEstimator((call_s, reading.token_s, square_s), forgetting)

    @property
    def costs(self) -> Costs:
        """All rates."""
        call_s, token_s, square_s = self._prefill.coefficients
        return Costs(
            copies=CopyRates(out=_rate(self._out), back=_rate(self._back)),
            prefill=PrefillRates(call_s=call_s, token_s=token_s, square_s=square_s),
            chunk_tokens=self._chunk_tokens,
        )

    @property
    def num_samples(self) -> int:
        """Measurements learned from."""
        return sum(e.num_samples for e in (self._out, self._back, self._prefill))

    def copied_out(self, num_bytes: int, seconds: int | float, *, pieces: int = 1) -> None:
        """Learn from a swap out."""
        self._out.add((1, pieces, num_bytes), seconds)

    def copied_back(self, num_bytes: int, seconds: int | float, *, pieces: int = 1) -> None:
        """Learn from a swap in."""
        self._back.add((1, pieces, num_bytes), seconds)

    def read(self, tokens: int, before: int, seconds: int | float) -> None:
        """Learn from a step that did nothing but read a chunk of one prompt.

        Args:
            tokens: of the chunk.
            before: tokens of the sequence ahead of it.
            seconds: of the step.
        """
        self._prefill.add((1, tokens, (before + tokens) ** 2 - before**2), seconds)


def _of_copies(rate: CopyRate, forgetting: float) -> RateEstimator:
    call_s, piece_s = max(rate.call_s, _LEAST_CALL_S), max(rate.piece_s, _LEAST_PIECE_S)
    return RateEstimator((call_s, piece_s, 1 / rate.bytes_per_s), forgetting)


def _rate(estimator: RateEstimator) -> CopyRate:
    call_s, piece_s, byte_s = estimator.coefficients
    return CopyRate(bytes_per_s=1 / byte_s, call_s=call_s, piece_s=piece_s)
