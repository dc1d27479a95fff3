"""Measured steps and their floors: the time of each component of a prefill or decode step.

The floor of a step is the larger of two times: its bytes over the read rate, and the sum over its
components of FLOPs over the product rate of their arithmetic. The floor of a component is computed
likewise.
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

    @property
    def flops_per_s(self) -> float:
        """Achieved compute rate."""
        return self.cost.flops / self.measured_s if self.measured_s else 0.0


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
