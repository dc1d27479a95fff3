"""Variants: tokens to recompute and to transfer, and the layout of a step."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.common.kvpr import paper_split
from benchmarks.offload.schedule import (
    BatchTokens,
    Rules,
    Sizes,
    Speeds,
    StepWork,
    even_layers,
    ring_rules,
)
from quire.offload.split import OffloadRates, pipelined_split

Division = Callable[[OffloadRates, int], int]
"""Maps (rates, tokens) to the number of recomputed tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One variant of a decode step.

    Attributes:
        name: name of the variant.
        label: display name.
        rules: rules of the layout.
        divide: division of the tokens.
        ring: whether X is staged in a ring of the smallest sufficient size.
    """

    name: str
    label: str
    rules: Rules
    divide: Division
    ring: bool = False


def _none(_rates: OffloadRates, _tokens: int) -> int:
    return 0


ARMS = (
    Arm(name="prefetch", label="prefetch only", rules=Rules(), divide=_none),
    Arm(name="lA", label="the paper's split", rules=Rules(x_chunks=1), divide=paper_split),
    Arm(name="lB", label="pipelined split", rules=Rules(), ring=True, divide=pipelined_split),
)
BY_NAME = {arm.name: arm for arm in ARMS}


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a layer for one arm.

    Attributes:
        batch: division of the tokens.
        rules: rules of the schedule.
        rates: rates of the layer, with the fixed times of its chunks.
    """

    batch: BatchTokens
    rules: Rules
    rates: OffloadRates


def lay_out(
    arm: Arm, speeds: Speeds, sizes: Sizes, *, rows: int, tokens: int, batches: int = 1
) -> Layout:
    """Divide a batch's tokens for an arm; the rates include the fixed time of each chunk.

    Args:
        arm: the arm.
        speeds: speeds of the machine.
        sizes: bytes on the link; all batches share the transfer of weights.
        rows: rows of the batch.
        tokens: tokens of all rows.
        batches: number of batches that share a layer.
    """
    plain = speeds.rates(sizes, rows=rows, tokens=tokens, batches=batches)
    rules = arm.rules
    if arm.ring:
        x = arm.divide(plain, tokens)
        ring = ring_rules(plain, tokens, x, call_s=speeds.inward.call_s)
        rules = replace(rules, x_chunks=ring.x_chunks, x_ring=ring.x_ring)
    rates = _with_calls(plain, speeds, rules)
    x = arm.divide(rates, tokens)
    batch = BatchTokens(rows=rows, x=x, kv=tokens - x)
    return Layout(batch, rules, rates)


def _with_calls(rates: OffloadRates, speeds: Speeds, rules: Rules) -> OffloadRates:
    copies = rules.x_chunks * (1 + bool(rules.x_ring))
    return replace(
        rates,
        other_s=rates.other_s + rules.x_chunks * speeds.project_call_s,
        link_s=rates.link_s + copies * speeds.inward.call_s,
    )


def step_work(
    batch: BatchTokens, num_layers: int, sizes: Sizes, speeds: Speeds, *, batches: int = 1
) -> StepWork:
    """A step of equal batches through all layers."""
    layers = even_layers((batch,) * batches, num_layers)
    return StepWork(layers=layers, sizes=sizes, speeds=speeds)
