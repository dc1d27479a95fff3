"""Measured steps beside their floors: where the time of a prefill or decode step goes."""

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
        tokens: processed in such a step, the mean.
        steps: how many such steps a run has.
        costs: what each part needs at least, the mean over these steps.
        seconds: time of each part, and of ENGINE: the mean over these steps, of the median run.
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
            KeyError, TypeError: a field is missing, or is not what it should be.
        """
        values: dict[str, object] = dict(stored)
        costs = values.pop("costs")
        if not isinstance(costs, list):
            raise TypeError("expected a list `costs`")
        return cls(costs=tuple(PartCost(**cost) for cost in costs), **values)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRow:
    """A line of the roofline page.

    Attributes:
        cost: what the part needs; its name is the line's.
        floor_s: least time.
        measured_s: time taken.
        share: of the step's time, 0 to 1.
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
        """Rate reached."""
        return self.cost.flops / self.measured_s if self.measured_s else 0.0


def part_rows(
    measure: StepMeasure, read_bytes_per_s: float, flops_per_s: float
) -> Iterator[PartRow]:
    """A row for each part, for the engine outside of the model, and for all together.

    Args:
        measure: of one kind of step.
        read_bytes_per_s: ceiling of memory.
        flops_per_s: ceiling of products.

    Raises:
        ConfigError: a rate of 0 or less.
    """
    nothing = PartCost(name=ENGINE, weight_bytes=0, kv_bytes=0, flops=0)
    whole_s = sum(measure.seconds.values())
    for cost in (*measure.costs, nothing):
        taken_s = measure.seconds[cost.name]
        yield PartRow(
            cost=cost,
            floor_s=cost.floor_s(read_bytes_per_s, flops_per_s),
            measured_s=taken_s,
            share=taken_s / whole_s if whole_s else 0.0,
        )
    total = total_cost(measure.costs)
    floor_s = total.floor_s(read_bytes_per_s, flops_per_s)
    yield PartRow(cost=total, floor_s=floor_s, measured_s=whole_s, share=1.0)


def total_cost(parts: Iterable[PartCost]) -> PartCost:
    """All parts together: the floor of a step whose parts could overlap."""
    found = tuple(parts)
    return PartCost(
        name="total",
        weight_bytes=sum(part.weight_bytes for part in found),
        kv_bytes=sum(part.kv_bytes for part in found),
        flops=sum(part.flops for part in found),
    )
