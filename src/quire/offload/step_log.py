"""Timings of transfers, KV recompute and attention in a step, from which rates are estimated.

A mark is a time stamp: a clock reading on a CPU, a stream event on a device. Device events are read
after the step has finished.
"""

import time
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

KV_IN, X_IN = "KV in", "X in"
PROJECT, ATTEND, LAYER, HOST_ATTEND = "project", "attend", "layer", "attend on the host"


@dataclass(frozen=True, slots=True)
class Timed:
    """A timed operation of a step."""

    kind: str  # one of the names above
    layer: int  # index in the model
    tokens: int
    num_bytes: int
    start_s: float  # since the step began
    end_s: float  # since the step began


@runtime_checkable
class Marks(Protocol):
    """Time stamps of one step."""

    def now(self) -> object:
        """Mark the current time of the calling thread or of the current stream."""
        ...

    def begin(self, requested: object) -> object:
        """Mark the start of a copy requested at `requested`, after all earlier copies."""
        ...

    def ended(self) -> object:
        """Mark the end of a copy."""

    def seconds(self, mark: object) -> float:
        """Return the seconds from the beginning of the step to a mark."""


class ClockMarks:
    """Time stamps from the CPU clock."""

    def __init__(self) -> None:
        self._zero_s = self._last_end_s = time.perf_counter()

    def now(self) -> object:
        return time.perf_counter()

    def begin(self, requested: object) -> object:
        assert isinstance(requested, float), "a mark of this clock"
        return max(requested, self._last_end_s)

    def ended(self) -> object:
        self._last_end_s = time.perf_counter()
        return self._last_end_s

    def seconds(self, mark: object) -> float:
        assert isinstance(mark, float), "a mark of this clock"
        return mark - self._zero_s


@dataclass(frozen=True, slots=True)
class Excluded:
    """Parts of an operation that are not its own time."""

    waited_s: float = 0.0  # for weights
    # marks of the start and the end of another operation
    other: tuple[object, object] | None = None

    def seconds(self, marks: Marks) -> float:
        if self.other is None:
            return self.waited_s
        start, end = map(marks.seconds, self.other)
        return self.waited_s + end - start


NOTHING = Excluded()


class StepLog:
    """The timed operations of a step, in the order of `add` calls.

    Attributes:
        left: end of the last attention of any batch, and the seconds that computation had waited
            for weights by then; None before the first.
        early: start and end of the last recompute that preceded the weights of its layer; None
            if no layer has begun so since `left`.
    """

    def __init__(self, marks: Marks) -> None:
        self.marks = marks
        self.left: tuple[object, float] | None = None
        self.early: tuple[object, object] | None = None
        self._operations: list[tuple[str, int, int, int, object, object, Excluded]] = []

    def add(
        self,
        kind: str,
        layer: int,
        tokens: int,
        num_bytes: int,
        start: object,
        end: object,
        excluded: Excluded = NOTHING,
    ) -> None:
        """An operation that has ended or is queued on a stream, between two marks."""
        self._operations.append((kind, layer, tokens, num_bytes, start, end, excluded))

    def read(self) -> list[Timed]:
        """Return all operations with times in seconds; call after the step has finished."""
        marks = self.marks
        return [
            Timed(
                kind,
                layer,
                tokens,
                num_bytes,
                marks.seconds(start),
                marks.seconds(end) - excluded.seconds(marks),
            )
            for kind, layer, tokens, num_bytes, start, end, excluded in self._operations
        ]
