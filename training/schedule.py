"""Functions of the step number: sequence length, learning rate, primer fraction."""

from dataclasses import dataclass

from quire.errors import ConfigError

_LAST_FACTOR = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A number of steps at one sequence length."""

    length: int
    steps: int
    batch_tokens: int

    @property
    def rows(self) -> int:
        """Sequences in a batch."""
        return max(1, self.batch_tokens // self.length)


@dataclass(frozen=True, slots=True)
class Plan:
    """Consecutive stages: short sequences first, since recall is learned more easily there.

    Attributes:
        stages: in order.
    """

    stages: tuple[Stage, ...]

    @property
    def steps(self) -> int:
        """Steps of all stages."""
        return sum(stage.steps for stage in self.stages)

    def stage(self, step: int) -> Stage:
        """The stage of a step; after the end, the last stage."""
        for stage in self.stages:
            if step < stage.steps:
                return stage
            step -= stage.steps
        return self.stages[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Primer:
    """Fraction of sequences of repeated random tokens, decreasing over the first steps."""

    first: float
    last: float
    steps: int

    def share(self, step: int) -> float:
        """The fraction at one step."""
        return self.last + (self.first - self.last) * max(0.0, 1 - step / self.steps)


def parse_plan(text: str) -> Plan:
    """Parse "128:600:4096,256:800:8192" as length, steps and tokens per batch of each stage."""
    stages = []
    for item in text.split(","):
        parts = item.split(":")
        if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
            raise ConfigError(
                f"expected length:steps:tokens, got {item!r}; write for example 512:400:8192"
            )
        length, steps, batch_tokens = map(int, parts)
        stages.append(Stage(length=length, steps=steps, batch_tokens=batch_tokens))
    return Plan(tuple(stages))


def parse_primer(text: str) -> Primer:
    """Parse "0.7,0.03,700": fraction at the start and at the end, and steps in between."""
    first, last, steps = text.split(",")
    return Primer(first=float(first), last=float(last), steps=max(1, int(steps)))


def parse_mixture(text: str) -> dict[str, float]:
    """Parse "lines=.5,text=.5" as fractions by name."""
    return {name: float(share) for name, share in (item.split("=") for item in text.split(","))}


def lr_factor(step: int, total_steps: int, *, warmup_steps: int, decay: float) -> float:
    """Linear warm-up, constant, then linear decrease over the last fraction `decay` of steps."""
    rising = min(1.0, (step + 1) / warmup_steps)
    falling = (total_steps - step) / max(1e-9, decay * total_steps)
    return rising * min(1.0, max(_LAST_FACTOR, falling))
