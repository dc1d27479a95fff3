"""Claims of the roofline benchmark, and claims refused because their floor is wrong."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from benchmarks.roofline.measured import (
    DECODE,
    PREFILL,
    Cell,
    StepMeasure,
    part_rows,
    products_s,
)

MIN_RATIO = 0.97  # of time and floor; below, more than noise separates them
SMALL_ROWS = 16
LARGE_ROWS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A claim that is not made.

    Attributes:
        claim: its name.
        reason: figures that contradict each other.
    """

    claim: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """Claims of several cells.

    Attributes:
        values: by name.
        refused: claims with a wrong floor.
    """

    values: Mapping[str, float]
    refused: tuple[Refused, ...]


def claims_of(cells: Iterable[Cell]) -> Claims:
    """Compute the claims of all cells.

    The claims of the first cell have plain names; those of other cells end with what is different:
    instruction set, implementation, weight codec, KV codec, model.
    """
    found = list(cells)
    values: dict[str, float] = {}
    refused: list[Refused] = []
    for cell in found:
        suffix = "".join(
            f"_{own}" for own, first in zip(cell.key, found[0].key, strict=True) if own != first
        )
        for name, ratio, measures in _ratios(cell):
            wrong = [step for step in measures if step.over_floor < MIN_RATIO]
            if wrong:
                reason = "; ".join(wrong_floor(step, cell) for step in wrong)
                refused.append(Refused(claim=name + suffix, reason=reason))
            else:
                values[name + suffix] = ratio
        values[f"read_bytes_per_s{suffix}"] = cell.rates.read_bytes_per_s
        for arithmetic, rate in cell.rates.flops_per_s.items():
            values[f"product_flops_per_s_{arithmetic}{suffix}"] = rate
    return Claims(values=values, refused=tuple(refused))


def wrong_floor(step: StepMeasure, cell: Cell) -> str:
    """Figures of a step that is faster than its floor."""
    *_, total = part_rows(step, cell.rates)
    rates = ", ".join(
        f"{name} {rate / 1e9:,.1f} GFLOP/s" for name, rate in cell.rates.flops_per_s.items()
    )
    return (
        f"{cell.name}: a {step.kind} step of {step.rows} sequences takes "
        f"{total.measured_s * 1e3:,.3f} ms, {step.over_floor:.2f} of its floor of "
        f"{total.floor_s * 1e3:,.3f} ms ({total.cost.num_bytes / 1e6:,.1f} MB at "
        f"{cell.rates.read_bytes_per_s / 1e9:,.1f} GB/s; {total.cost.flops / 1e9:,.2f} GFLOP at "
        f"{rates}): a measured rate is too low, or bytes are counted that the step does not read"
    )


def _ratios(cell: Cell) -> Iterator[tuple[str, float, list[StepMeasure]]]:
    """Yield claims as (name, ratio, the steps it depends on)."""
    decode = [step for step in cell.steps if step.kind == DECODE]
    for step in decode:
        if step.rows == LARGE_ROWS:
            yield "decode_step_over_floor", step.over_floor, [step]
    small = [step for step in decode if step.rows <= SMALL_ROWS]
    if small:
        largest = max(step.over_floor for step in small)
        yield "small_batch_step_over_floor", largest, small
    for step in cell.steps:
        if step.kind == PREFILL:
            products = products_s(step.costs, step.arithmetic, cell.rates)
            yield "prefill_over_product_rate", products / step.step_s, [step]
