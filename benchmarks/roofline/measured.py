"""Measured steps, their floors and the claims: the time of each component of a step.

The floor of a step is the larger of two times: its bytes over the read rate, and the sum over its
components of FLOPs over the product rate of their arithmetic. The floor of a component is computed
likewise. A claim is refused if its floor is wrong.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.roofline.rates import Rates
from quire.plan.roofline import PartCost

PARTS = (
    *("qkv", "attention", "output projection", "mlp"),
    *("norms and RoPE", "head", "rest"),
)
PREFILL, DECODE = KINDS = ("prefill", "decode")
SAMPLING = "sampling"
ENGINE = "engine"  # scheduler, tables, flat batch, outputs: outside of the model
TOTAL = "total"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasure:
    """One kind of step.

    Attributes:
        kind: one of KINDS.
        rows: sequences of the step.
        tokens: tokens of the step.
        steps: number of measured steps.
        costs: cost of each component, of the median step.
        arithmetic: name of the arithmetic of components with products.
        seconds: time of each component, of SAMPLING and of ENGINE, of the median step.
        over_floor: time of the median step of a round over its floor, median over the rounds.
    """

    kind: str
    rows: int
    tokens: int
    steps: int
    costs: tuple[PartCost, ...]
    arithmetic: Mapping[str, str]
    seconds: Mapping[str, float]
    over_floor: float

    @property
    def step_s(self) -> float:
        """Time of the step."""
        return sum(self.seconds.values())

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "StepMeasure":
        """A measure from its JSON object.

        Raises:
            KeyError, TypeError: a field is missing or has another type.
        """
        costs = tuple(PartCost(**cost) for cost in stored["costs"])
        return cls(**(dict(stored) | {"costs": costs}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Measured steps of one model with one instruction set and one storage of its weights.

    Attributes:
        model: name of the shape.
        instruction_set: highest one that the C extension used.
        implementation: native or transformers.
        weight_codec, kv_codec: storage of weights and of KV.
        weight_bytes: of all parameters.
        rates: limits of the machine, medians over the rounds.
        steps: measured steps.
    """

    model: str
    instruction_set: str
    implementation: str
    weight_codec: str
    kv_codec: str
    weight_bytes: int
    rates: Rates
    steps: tuple[StepMeasure, ...]

    @property
    def name(self) -> str:
        """Text that identifies the cell."""
        return " ".join(self.key)

    @property
    def key(self) -> tuple[str, ...]:
        """Values that identify the cell."""
        storage = (self.weight_codec, self.kv_codec)
        return self.model, self.instruction_set, self.implementation, *storage

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Cell":
        """A cell from its JSON object.

        Raises:
            KeyError, TypeError: a field is missing or has another type.
        """
        steps = tuple(StepMeasure.from_json(step) for step in stored["steps"])
        return cls(**(dict(stored) | {"steps": steps, "rates": Rates(**stored["rates"])}))


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRow:
    """A row of the roofline page.

    Attributes:
        cost: cost of the component; its name is the row's.
        arithmetic: of its products; "" without products and for the total.
        floor_s: least time.
        measured_s: measured time.
        share: fraction of the step's time (0 to 1).
    """

    cost: PartCost
    arithmetic: str
    floor_s: float
    measured_s: float
    share: float

    @property
    def over_floor(self) -> float | None:
        """Measured over floor; None if the floor is zero."""
        return self.measured_s / self.floor_s if self.floor_s else None


def part_rows(measure: StepMeasure, rates: Rates) -> Iterator[PartRow]:
    """A row for each component, for sampling and the engine, and for the total."""
    none = {"weight_bytes": 0, "kv_bytes": 0, "flops": 0}
    others = [PartCost(name=name, **none) for name in (SAMPLING, ENGINE)]
    for cost in (*measure.costs, *others):
        measured_s = measure.seconds[cost.name]
        yield PartRow(
            cost=cost,
            arithmetic=measure.arithmetic.get(cost.name, ""),
            floor_s=floor_s([cost], measure.arithmetic, rates),
            measured_s=measured_s,
            share=measured_s / measure.step_s if measure.step_s else 0.0,
        )
    yield PartRow(
        cost=total_cost(measure.costs),
        arithmetic="",
        floor_s=floor_s(measure.costs, measure.arithmetic, rates),
        measured_s=measure.step_s,
        share=1.0,
    )


def total_cost(parts: Iterable[PartCost]) -> PartCost:
    """Total cost of components."""
    found = tuple(parts)
    return PartCost(
        name=TOTAL,
        weight_bytes=sum(part.weight_bytes for part in found),
        kv_bytes=sum(part.kv_bytes for part in found),
        flops=sum(part.flops for part in found),
    )


def floor_s(parts: Iterable[PartCost], arithmetic: Mapping[str, str], rates: Rates) -> float:
    """Shortest time of components that may overlap."""
    found = tuple(parts)
    return max(
        sum(part.num_bytes for part in found) / rates.read_bytes_per_s,
        products_s(found, arithmetic, rates),
    )


def products_s(parts: Iterable[PartCost], arithmetic: Mapping[str, str], rates: Rates) -> float:
    """Shortest time of the products of components."""
    return sum(
        part.flops / rates.flops_per_s[arithmetic[part.name]] for part in parts if part.flops
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
