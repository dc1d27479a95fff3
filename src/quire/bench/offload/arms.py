"""The arms: which tokens are recomputed, carried, attended to on the host, and in which layout."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from quire.offload.schedule.rules import Rules
from quire.offload.schedule.work import BatchTokens, Sizes, Speeds, StepWork, even_layers
from quire.plan.offload.rates import OffloadRates
from quire.plan.offload.shares import best_shares
from quire.plan.offload.split import paper_split, pipelined_split

Division = Callable[[OffloadRates, int], tuple[int, int]]
"""Rates and tokens to tokens that are recomputed, and tokens of the host."""

RING = Rules(x_chunks=16, x_ring=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to do a step.

    Attributes:
        name: of it.
        label: for people.
        rules: of its layout.
        divide: of its tokens.
        coded: KV and X cross the link in codes of half the bytes.
    """

    name: str
    label: str
    rules: Rules
    divide: Division
    coded: bool = False


def _none(_rates: OffloadRates, _tokens: int) -> tuple[int, int]:
    return 0, 0


def _paper(rates: OffloadRates, tokens: int) -> tuple[int, int]:
    return paper_split(rates, tokens), 0


def _pipelined(rates: OffloadRates, tokens: int) -> tuple[int, int]:
    return pipelined_split(rates, tokens), 0


def _shared(rates: OffloadRates, tokens: int) -> tuple[int, int]:
    found = best_shares(rates, tokens)
    return round(found.x_tokens), min(tokens - round(found.x_tokens), round(found.host_tokens))


def _hosted(_rates: OffloadRates, tokens: int) -> tuple[int, int]:
    return 0, tokens


ARMS = (
    Arm(name="no_overlap", label="no overlap", rules=Rules(prefetch=False), divide=_none),
    Arm(name="prefetch", label="prefetch only", rules=Rules(), divide=_none),
    Arm(
        name="serial",
        label="recompute, then transfer",
        rules=Rules(serial=True, x_chunks=1),
        divide=_paper,
    ),
    Arm(name="lA", label="the paper's split", rules=Rules(x_chunks=1), divide=_paper),
    Arm(name="lB", label="pipelined split", rules=RING, divide=_pipelined),
    Arm(name="lB_codec", label="pipelined, codes", rules=RING, divide=_pipelined, coded=True),
    Arm(name="host_share", label="link, device and host", rules=RING, divide=_shared),
    Arm(name="all_host", label="all attention on the host", rules=Rules(), divide=_hosted),
)
BY_NAME = {arm.name: arm for arm in ARMS}


def layer_rates(arm: Arm, speeds: Speeds, sizes: Sizes, *, rows: int, tokens: int) -> OffloadRates:
    """Rates as an arm's layout has them: each of its pieces is a call."""
    rates = speeds.rates(sizes, rows=rows, tokens=tokens, half_duplex=arm.rules.half_duplex)
    pieces = arm.rules.x_chunks
    return replace(
        rates,
        other_s=rates.other_s + pieces * speeds.project_call_s,
        link_s=rates.link_s + pieces * (1 + bool(arm.rules.x_ring)) * speeds.inward.call_s,
    )


def divided(arm: Arm, rates: OffloadRates, *, rows: int, tokens: int) -> BatchTokens:
    """A batch's tokens as an arm divides them."""
    x, host = arm.divide(rates, tokens)
    return BatchTokens(rows=rows, x=x, kv=tokens - x - host, host=host)


def step_work(
    batch: BatchTokens, num_layers: int, sizes: Sizes, speeds: Speeds, *, batches: int = 1
) -> StepWork:
    """A step of equal batches through all layers."""
    layers = even_layers((batch,) * batches, num_layers)
    return StepWork(layers=layers, sizes=sizes, speeds=speeds)
