"""Measured steps and their floors: the time of each component of a prefill or decode step."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from quire.plan.roofline import PartCost

PARTS = ("qkv", "attention", "output projection", "mlp", "head", "rest")
KINDS = ("prefill", "decode")
ENGINE = "engine"  # scheduler, tables, flat batch, sampling: outside of the model


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasure:
    """One kind of step: `prefill` (a full budget of prompt tokens) or `decode` (all sequences).

    Attributes:
        kind: one of KINDS.
        tokens: mean number of tokens of such a step.
        steps: number of such steps in a run.
        costs: least cost of each component, mean over these steps.
        seconds: time of each component and of ENGINE: mean over these steps, of the median run.
    """

    kind: str
    tokens: float
    steps: int
    costs: tuple[PartCost, ...]
    seconds: Mapping[str, float]

    @classmethod
    def from_json(cls, stored: Mapping[str, object]) -> "StepMeasure":
        """A measure from its JSON object.

        Raises:
            KeyError, TypeError: a field is missing or has another type.
        """
        values: dict[str, object] = dict(stored)
        costs = values.pop("costs")
        if not isinstance(costs, list):
            raise TypeError("expected a list `costs`")
        return cls(costs=tuple(PartCost(**cost) for cost in costs), **values)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRow:
    """A row of the roofline page.

    Attributes:
        cost: least cost of the component; its name is the row's.
        floor_s: least time.
        measured_s: measured time.
        share: fraction of the step's time (0 to 1).
    """

    cost: PartCost
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


def part_rows(
    measure: StepMeasure, read_bytes_per_s: float, flops_per_s: float
) -> Iterator[PartRow]:
    """A row for each component, for the engine outside the model, and for the total.

    Args:
        measure: measurement of one kind of step.
        read_bytes_per_s: memory bandwidth.
        flops_per_s: compute rate of products.

    Raises:
        ConfigError: a rate of 0 or less.
    """
    engine = PartCost(name=ENGINE, weight_bytes=0, kv_bytes=0, flops=0)
    whole_s = sum(measure.seconds.values())
    for cost in (*measure.costs, engine):
        measured_s = measure.seconds[cost.name]
        yield PartRow(
            cost=cost,
            floor_s=cost.floor_s(read_bytes_per_s, flops_per_s),
            measured_s=measured_s,
            share=measured_s / whole_s if whole_s else 0.0,
        )
    total = total_cost(measure.costs)
    floor_s = total.floor_s(read_bytes_per_s, flops_per_s)
    yield PartRow(cost=total, floor_s=floor_s, measured_s=whole_s, share=1.0)


def total_cost(parts: Iterable[PartCost]) -> PartCost:
    """Total cost: the floor of a step whose components could overlap."""
    found = tuple(parts)
    return PartCost(
        name="total",
        weight_bytes=sum(part.weight_bytes for part in found),
        kv_bytes=sum(part.kv_bytes for part in found),
        flops=sum(part.flops for part in found),
    )
