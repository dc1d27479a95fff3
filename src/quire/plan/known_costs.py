"""What preemption costs here, before anything was measured in this run: stored, or assumed."""

from dataclasses import dataclass

from quire.errors import ConfigError
from quire.layout.model import ModelSpec
from quire.plan.ceilings import Ceilings, NotUsable
from quire.plan.rates import CopyRate, CopyRates, Costs, PrefillRates
from quire.plan.stored_rates import model_key

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
