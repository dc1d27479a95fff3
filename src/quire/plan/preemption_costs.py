"""What preemption costs: stored or assumed at first, then as measured in this run."""

from dataclasses import dataclass

from quire.errors import ConfigError
from quire.layout.model import ModelSpec
from quire.plan.ceilings import Ceilings, NotUsable
from quire.plan.fitting import RateEstimator
from quire.plan.rates import CopyRate, CopyRates, Costs, PrefillRates, model_key

# What preemption costs here, before anything was measured in this run: stored, or assumed.

# below what any machine of the last ten years does; samples of the run soon take their place
ASSUMED_COPY = CopyRate(bytes_per_s=2e9, call_s=1e-4, piece_s=2e-5)
ASSUMED_FLOPS_PER_S = 5e10


@dataclass(frozen=True, slots=True)
class KnownCosts:
    """Costs to begin with.

    Attributes:
        costs: all rates.
        notice: what was assumed and how to have it measured; empty where all was.
    """

    costs: Costs
    notice: str


def known_costs(
    found: Ceilings | NotUsable, model: ModelSpec, *, dtype: str, device: str, chunk_tokens: int
) -> KnownCosts:
    """Costs from stored ceilings as far as these go, and conservative ones for the rest.

    Args:
        found: what `read_ceilings` gave.
        model: the shape, whose arithmetic stands for a prefill that was not measured.
        dtype: of its weights, as `bfloat16`.
        device: `cpu`, or the name of the accelerator.
        chunk_tokens: tokens a step reads of a prompt.
    """
    missing = [found.reason] if isinstance(found, NotUsable) else []
    stored = None if isinstance(found, NotUsable) else found
    copies = stored.copies.get(device) if stored else None
    prefill = stored.prefill.get(model_key(model, dtype=dtype, device=device)) if stored else None
    if stored and copies is None:
        missing.append(f"copies with {device} were not measured: run `quire profile`")
    if stored and prefill is None:
        missing.append("prefill of this model was not measured: run `quire profile MODEL`")
    costs = Costs(
        copies=copies or CopyRates(out=ASSUMED_COPY, back=ASSUMED_COPY),
        prefill=prefill
        or assumed_prefill(model, _product_rate(stored, model, dtype, chunk_tokens)),
        chunk_tokens=chunk_tokens,
    )
    notice = f"costs of preemption are assumed at first ({'; '.join(missing)})" if missing else ""
    return KnownCosts(costs, notice)


def assumed_prefill(model: ModelSpec, flops_per_s: int | float) -> PrefillRates:
    """Prefill rates from arithmetic: 2 FLOP for each weight, and attention's two products.

    A token at position p multiplies p keys and p values of each query head: 4 * heads * head_dim
    * p FLOP a layer, which sums up to 2 * heads * head_dim * (b^2 - a^2) from a to b.

    Args:
        model: the shape; of the vocabulary's matrix only a prompt's last row is multiplied.
        flops_per_s: rate of products.
    """
    weights = model.num_active_parameters - model.embedding_parameters
    if not model.tied_embeddings:
        weights -= model.embedding_parameters
    attention = 2 * model.num_layers * model.num_heads * model.head_dim
    return PrefillRates(token_s=2 * weights / flops_per_s, square_s=attention / flops_per_s)


def _product_rate(
    stored: Ceilings | None, model: ModelSpec, dtype: str, chunk_tokens: int
) -> float:
    if stored is None:
        return ASSUMED_FLOPS_PER_S
    try:
        return stored.product_rate(
            chunk_tokens, model.hidden_size, model.intermediate_size, dtype=dtype
        )
    except ConfigError:  # nothing was measured in this dtype
        return ASSUMED_FLOPS_PER_S


# ---- learned costs -------------------------------------------------------------------------------

# Costs that begin with what `quire profile` stored and follow what the engine measures.

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
