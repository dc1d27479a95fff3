"""Costs of preemption: stored or assumed at first, then learned from this run."""

from dataclasses import dataclass

from quire.errors import ConfigError
from quire.layout.model import ModelSpec
from quire.plan.ceilings import Ceilings, NotUsable
from quire.plan.fitting import RateEstimator
from quire.plan.rates import CopyRate, CopyRates, Costs, PrefillRates, model_key

# Initial costs of preemption: stored, or assumed.

# lower than any machine of the last ten years; samples of the run soon replace them
ASSUMED_COPY = CopyRate(bytes_per_s=2e9, call_s=1e-4, piece_s=2e-5)
ASSUMED_FLOPS_PER_S = 5e10


@dataclass(frozen=True, slots=True)
class KnownCosts:
    """Initial costs."""

    costs: Costs
    notice: str  # assumed rates, and how to measure them; empty if all are measured


def known_costs(
    found: Ceilings | NotUsable,
    model: ModelSpec,
    *,
    dtype: str,
    device: str,
    chunk_tokens: int,
    weight_codec: str = "auto",
) -> KnownCosts:
    """Costs from stored ceilings where available, and conservative ones for the rest."""
    missing = [found.reason] if isinstance(found, NotUsable) else []
    stored = None if isinstance(found, NotUsable) else found
    copies = stored.copies.get(device) if stored else None
    key = model_key(model, dtype=dtype, device=device, weight_codec=weight_codec)
    prefill = stored.prefill.get(key) if stored else None
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
    except ConfigError:  # no product was measured in this dtype
        return ASSUMED_FLOPS_PER_S


# Costs that start from the output of `quire profile` and follow the engine's measurements.

# An estimate of 0 would stay 0, so coefficients start at no less than these.
_MIN_CALL_S = 1e-4
_MIN_PIECE_S = 1e-5
_MIN_SQUARES_OF_A_TOKEN = 1e-5


class LearnedCosts:
    """Current costs of this engine on this machine."""

    def __init__(self, prior: Costs, *, forgetting: float = 0.97) -> None:
        self._chunk_tokens = prior.chunk_tokens
        self._out = _of_copies(prior.copies.out, forgetting)
        self._back = _of_copies(prior.copies.back, forgetting)
        prefill = prior.prefill
        call_s = max(prefill.call_s, _MIN_CALL_S)
        square_s = max(prefill.square_s, prefill.token_s * _MIN_SQUARES_OF_A_TOKEN)
        self._prefill = RateEstimator((call_s, prefill.token_s, square_s), forgetting)

    @property
    def costs(self) -> Costs:
        call_s, token_s, square_s = self._prefill.coefficients
        return Costs(
            copies=CopyRates(out=_rate(self._out), back=_rate(self._back)),
            prefill=PrefillRates(call_s=call_s, token_s=token_s, square_s=square_s),
            chunk_tokens=self._chunk_tokens,
        )

    @property
    def num_samples(self) -> int:
        return sum(e.num_samples for e in (self._out, self._back, self._prefill))

    def copied_out(self, num_bytes: int, seconds: int | float) -> None:
        """Learn from a swap out; it counts as one piece."""
        self._out.add((1, 1, num_bytes), seconds)

    def copied_back(self, num_bytes: int, seconds: int | float) -> None:
        """Learn from a swap in; it counts as one piece."""
        self._back.add((1, 1, num_bytes), seconds)

    def read(self, tokens: int, before: int, seconds: int | float) -> None:
        """Learn from a step with one chunk of a prompt, after `before` tokens."""
        self._prefill.add((1, tokens, (before + tokens) ** 2 - before**2), seconds)


def _of_copies(rate: CopyRate, forgetting: float) -> RateEstimator:
    call_s, piece_s = max(rate.call_s, _MIN_CALL_S), max(rate.piece_s, _MIN_PIECE_S)
    return RateEstimator((call_s, piece_s, 1 / rate.bytes_per_s), forgetting)


def _rate(estimator: RateEstimator) -> CopyRate:
    call_s, piece_s, byte_s = estimator.coefficients
    return CopyRate(bytes_per_s=1 / byte_s, call_s=call_s, piece_s=piece_s)
