"""Operations of a step: what is copied or computed, on which lane, after what.

    lane     operations                                            in this order, one at a time
    in       weights in, X in, KV in, hidden in                    host to device
    out      KV out, hidden and X out                              device to host
    device   project (recompute), attend, layer
    host     attend there

An operation begins when the one before it on its lane and all that it needs have ended. Lanes may
share one resource: both directions of a half-duplex link, the hosts of several devices. Buffers are
needs, too: what overwrites a slot needs what last read it.

A timeline says when each of them ran, and what each lane waited for.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from quire.errors import InvariantError


class Kind(StrEnum):
    """What an operation does."""

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
LANES: Mapping[Kind, str] = {
    Kind.WEIGHTS_IN: IN,
    Kind.KV_IN: IN,
    Kind.HIDDEN_IN: IN,
    Kind.X_IN: IN,
    Kind.KV_OUT: OUT,
    Kind.HIDDEN_OUT: OUT,
    Kind.PROJECT: DEVICE,
    Kind.ATTEND: DEVICE,
    Kind.LAYER: DEVICE,
    Kind.HOST_ATTEND: HOST,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One copy or one computation.

    Attributes:
        index: place in the schedule.
        kind: what it does.
        lane: where; see the module.
        layer: of the model.
        batch: of the step.
        part: chunk of X and of its projection; of weights 0 for W_K and W_V, 1 for W_Q and W_O,
            2 for the MLP.
        first: token, of those that are recomputed or carried; or byte, of a part of weights.
        slot: of staging for KV or weights, that it fills or reads.
        x_slot: of staging for X, likewise.
        tokens: it is about.
        num_bytes: it copies.
        seconds: it is expected to take.
        needs: indices of operations that must have ended.
    """

    index: int
    kind: Kind
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
        """For people: `KV in 3.0`."""
        return f"{self.kind} {self.layer}.{self.batch}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """Operations in the order in which their lanes take them.

    Attributes:
        operations: by index.
        shared: lane to the resource it shares; others have one of their own.
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
        """What a lane occupies."""
        return self.shared.get(lane, lane)

    def check(self) -> None:
        """Prove that every operation needs earlier ones only, so that no order can stand still.

        Raises:
            InvariantError: one does not.
        """
        for place, operation in enumerate(self.operations):
            if operation.index != place:
                raise InvariantError(f"{operation.label} is at {place}, not {operation.index}")
            if any(not 0 <= need < place for need in operation.needs):
                raise InvariantError(f"{operation.label} at {place} needs {operation.needs}")


# ---- timelines -----------------------------------------------------------------------------------

FIRST = "the first"
"""What a lane waits for before anything could be there."""


@dataclass(frozen=True, slots=True)
class Span:
    """One operation as it ran.

    Attributes:
        operation: what.
        start_s, end_s: since the step began.
    """

    operation: Operation
    start_s: int | float
    end_s: int | float

    @property
    def seconds(self) -> int | float:
        """It took."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Timeline:
    """A schedule as it ran.

    Attributes:
        schedule: what was to run.
        spans: by index of the operation.
        wall_s: that the run took by the wall clock; None where no wall clock was asked.
    """

    schedule: Schedule
    spans: tuple[Span, ...]
    wall_s: float | None = None

    @property
    def seconds(self) -> int | float:
        """Of the step, from its beginning to the last end."""
        return max((span.end_s for span in self.spans), default=0.0)

    def stalls(self, lane: str = DEVICE, from_layer: int = 0) -> dict[str, float]:
        """Seconds in which a lane stood still, by the kind of operation that it waited for.

        Args:
            lane: whose.
            from_layer: waits of earlier layers are left out: the first has nothing to hide behind.
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
        """Prove that lanes did one thing at a time, and nothing before what it needs.

        Raises:
            InvariantError: one did.
        """
        for lane in self.schedule.lanes:
            free_s: int | float = 0.0
            for span in self.of(lane):
                ready_s = max((self.spans[n].end_s for n in span.operation.needs), default=0.0)
                if span.start_s < max(free_s, ready_s) or span.end_s < span.start_s:
                    raise InvariantError(
                        f"{span.operation.label} ran from {span.start_s} to {span.end_s} s; its "
                        f"lane was free at {free_s}, what it needs there at {ready_s}"
                    )
                free_s = span.end_s

    def of(self, lane: str) -> list[Span]:
        """What a lane did, in order."""
        return [span for span in self.spans if span.operation.lane == lane]

    def _last_needed(self, operation: Operation) -> str:
        needs = [self.spans[need] for need in operation.needs]
        return max(needs, key=lambda span: span.end_s).operation.kind if needs else FIRST
