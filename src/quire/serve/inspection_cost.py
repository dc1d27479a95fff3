"""What the views of the engine cost it."""

from dataclasses import dataclass


@dataclass(slots=True)
class InspectionCost:
    """Time that the engine's thread spent on views of the engine.

    Attributes:
        calls: number of views.
        seconds: their total time.
        most_seconds: time of the longest.
    """

    calls: int = 0
    seconds: float = 0.0
    most_seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one view."""
        self.calls += 1
        self.seconds += seconds
        self.most_seconds = max(self.most_seconds, seconds)
