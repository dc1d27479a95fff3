"""Where the time of steps goes, in seconds since the engine's start."""

from dataclasses import dataclass


@dataclass(slots=True)
class StepTimes:
    """Sums over all steps.

    Attributes:
        steps_s: whole steps without sampling and detokenising.
        schedule_s: choosing rows, growing tables, evicting.
        prepare_s: building the flat batch: token ids, positions, slots, buckets.
    """

    steps_s: float = 0.0
    schedule_s: float = 0.0
    prepare_s: float = 0.0

    def scheduled(self, seconds: float) -> None:
        """Note what planning a step took."""
        self.schedule_s += seconds
        self.steps_s += seconds

    @property
    def bookkeeping_share(self) -> float:
        """Part of the steps' time that is neither model nor attention."""
        return (self.schedule_s + self.prepare_s) / self.steps_s if self.steps_s else 0.0
