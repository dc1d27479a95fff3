"""When a step carried, made again and attended: what rates are learned from.

Marks are moments: of a clock on a CPU, events in a stream on a device, which are read when the step
is long over.
"""

import time
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

KV_IN, X_IN = "KV in", "X in"
PROJECT, ATTEND, LAYER, HOST_ATTEND = "project", "attend", "layer", "attend on the host"


@dataclass(frozen=True, slots=True)
class Timed:
    """Something that took time.

    Attributes:
        kind: one of the names above.
        layer: of the model.
        tokens: it was about.
        num_bytes: that were copied.
        start_s, end_s: since the step began.
    """

    kind: str
    layer: int
    tokens: int
    num_bytes: int
    start_s: float
    end_s: float


@runtime_checkable
class Marks(Protocol):
    """Moments of one step."""

    def now(self) -> object:
        """Mark this moment of whoever works here: a thread, or the current stream."""
        ...

    def begin(self, requested: object) -> object:
        """Mark the beginning of a copy that was asked for then and waited for those before it."""
        ...

    def ended(self) -> object:
        """Mark the end of a copy."""
        ...

    def seconds(self, mark: object) -> float:
        """Since the step began."""
        ...


class ClockMarks:
    """Moments of the clock."""

    def __init__(self) -> None:
        self._zero_s = self._last_end_s = time.perf_counter()

    def now(self) -> object:
        """See `Marks`."""
        return time.perf_counter()

    def begin(self, requested: object) -> object:
        """See `Marks`: a carrier does one copy after the other."""
        assert isinstance(requested, float), "a mark of this clock"
        return max(requested, self._last_end_s)

    def ended(self) -> object:
        """Mark the end of a copy."""
        self._last_end_s = time.perf_counter()
        return self._last_end_s

    def seconds(self, mark: object) -> float:
        """See `Marks`."""
        assert isinstance(mark, float), "a mark of this clock"
        return mark - self._zero_s


class StepLog:
    """What a step did, in the order in which it ended.

    Args:
        marks: of the step.
    """

    def __init__(self, marks: Marks) -> None:
        self.marks = marks
        self._found: list[tuple[str, int, int, int, object, object]] = []

    def add(
        self, kind: str, layer: int, tokens: int, num_bytes: int, start: object, end: object
    ) -> None:
        """Note something that has ended, or will when the stream gets there."""
        self._found.append((kind, layer, tokens, num_bytes, start, end))

    def read(self) -> list[Timed]:
        """All of it, in seconds, once the step is over."""
        seconds = self.marks.seconds
        return [
            Timed(kind, layer, tokens, num_bytes, seconds(start), seconds(end))
            for kind, layer, tokens, num_bytes, start, end in self._found
        ]
