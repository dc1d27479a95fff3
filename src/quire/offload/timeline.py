"""Operations of a step: copies and computations, their lanes and dependencies.

    lane     operations                                            in this order, one at a time
    in       weights in, X in, KV in, hidden in                    host to device
    out      KV out, hidden and X out                              device to host
    device   project (recompute), attend, layer
    host     CPU attention

A lane is a queue: an operation starts when the previous operation of its lane and all operations
that it depends on have ended. Lanes may share a resource, such as a half-duplex link or the CPU of
several devices. Buffers are dependencies too: an operation that overwrites a slot depends on the
slot's last reader.

A timeline records when each operation ran and how long each lane stalled.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from quire.errors import InvariantError


class TaskKind(StrEnum):
    """Type of an operation."""

    WEIGHTS_IN = "weights in"
    KV_IN = "KV in"
    HIDDEN_IN = "hidden in"
    X_IN = "X in"
    KV_OUT = "KV out"
    HIDDEN_OUT = "hidden and X out"
    PROJECT = "project"
    ATTEND = "attend"
    HOST_ATTEND = "attend on the host"
    LAYER = "layer"


IN, OUT, DEVICE, HOST = "in", "out", "device", "host"
LANES: Mapping[TaskKind, str] = {
    TaskKind.WEIGHTS_IN: IN,
    TaskKind.KV_IN: IN,
    TaskKind.HIDDEN_IN: IN,
    TaskKind.X_IN: IN,
    TaskKind.KV_OUT: OUT,
    TaskKind.HIDDEN_OUT: OUT,
    TaskKind.PROJECT: DEVICE,
    TaskKind.ATTEND: DEVICE,
    TaskKind.LAYER: DEVICE,
    TaskKind.HOST_ATTEND: HOST,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One copy or one computation.

    Attributes:
        index: index in the schedule.
        kind: type of the operation.
        lane: queue that runs it; see the module.
        layer: index of the layer in the model.
        batch: index of the batch in the step.
        part: chunk of X and of its projection; of weights 0 for W_K and W_V, 1 for W_Q and W_O,
            2 for the MLP.
        first: first token that is recomputed or transferred; for weights the first byte.
        slot: staging slot for KV or weights that the operation writes or reads.
        x_slot: staging slot for X that the operation writes or reads.
        tokens: number of tokens processed.
        num_bytes: number of bytes copied.
        seconds: predicted duration.
        needs: indices of the operations it depends on.
    """

    index: int
    kind: TaskKind
    lane: str
    layer: int
    batch: int = 0
    part: int = 0
    first: int = 0
    slot: int = 0
    x_slot: int = 0
    tokens: int = 0
    num_bytes: int = 0
    seconds: int | float = 0.0
    needs: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        """Display name, such as `KV in 3.0`."""
        return f"{self.kind} {self.layer}.{self.batch}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """Operations, in issue order for each lane.

    Attributes:
        operations: operations by index.
        shared: resource of each lane that shares one; other lanes have a resource of their own.
    """

    operations: tuple[Operation, ...]
    shared: Mapping[str, str] = field(default_factory=dict)

    @property
    def lanes(self) -> dict[str, tuple[Operation, ...]]:
        """Operations by lane."""
        found: dict[str, list[Operation]] = {}
        for operation in self.operations:
            found.setdefault(operation.lane, []).append(operation)
        return {lane: tuple(operations) for lane, operations in found.items()}

    def resource(self, lane: str) -> str:
        """Resource that a lane occupies."""
        return self.shared.get(lane, lane)

    def check(self) -> None:
        """Check that every operation depends on earlier ones only, which excludes deadlocks.

        Raises:
            InvariantError: an operation depends on a later one.
        """
        for index, operation in enumerate(self.operations):
            if operation.index != index:
                raise InvariantError(f"{operation.label} is at {index}, not {operation.index}")
            if any(not 0 <= need < index for need in operation.needs):
                raise InvariantError(f"{operation.label} at {index} needs {operation.needs}")


FIRST = "the first"
"""Cause of a stall before the first operation of a lane."""


@dataclass(frozen=True, slots=True)
class Span:
    """One operation as it ran.

    Attributes:
        operation: the operation.
        start_s, end_s: seconds since the start of the step.
    """

    operation: Operation
    start_s: int | float
    end_s: int | float

    @property
    def seconds(self) -> int | float:
        """Duration."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Timeline:
    """A schedule as it ran.

    Attributes:
        schedule: the operations.
        spans: start and end of each operation, by its index.
        wall_s: wall-clock duration of the run; None if it was not measured.
    """

    schedule: Schedule
    spans: tuple[Span, ...]
    wall_s: float | None = None

    @property
    def seconds(self) -> int | float:
        """Duration of the step, up to the end of its last operation."""
        return max((span.end_s for span in self.spans), default=0.0)

    def stalls(self, lane: str = DEVICE, from_layer: int = 0) -> dict[str, float]:
        """Stall seconds of a lane, by the kind of operation that it waited for.

        Args:
            lane: the lane.
            from_layer: first layer whose stalls count; the first layer's copies cannot be hidden.
        """
        found: dict[str, float] = {}
        free_s: int | float = 0.0
        for span in self.of(lane):
            if span.start_s > free_s and span.operation.layer >= from_layer:
                cause = self._last_needed(span.operation)
                found[cause] = found.get(cause, 0.0) + span.start_s - free_s
            free_s = span.end_s
        return found

    def check(self) -> None:
        """Check that each lane ran one operation at a time, each after its dependencies.

        Raises:
            InvariantError: operations overlap, or one ran before a dependency.
        """
        for lane in self.schedule.lanes:
            free_s: int | float = 0.0
            for span in self.of(lane):
                ready_s = max((self.spans[n].end_s for n in span.operation.needs), default=0.0)
                if span.start_s < max(free_s, ready_s) or span.end_s < span.start_s:
                    raise InvariantError(
                        f"{span.operation.label} ran from {span.start_s} to {span.end_s} s; its "
                        f"lane was free at {free_s} s, its dependencies ended at {ready_s} s"
                    )
                free_s = span.end_s

    def of(self, lane: str) -> list[Span]:
        """Spans of a lane, in order."""
        return [span for span in self.spans if span.operation.lane == lane]

    def _last_needed(self, operation: Operation) -> str:
        needs = [self.spans[need] for need in operation.needs]
        return max(needs, key=lambda span: span.end_s).operation.kind if needs else FIRST
