"""Operations of a step: what is copied or computed, on which lane, after what.

    lane     operations                                            in this order, one at a time
    in       weights in, X in, KV in, hidden in                    host to device
    out      KV out, hidden and X out                              device to host
    device   project (recompute), attend, layer
    host     attend there

An operation begins when the one before it on its lane and all that it needs have ended. Lanes may
share one resource: both directions of a half-duplex link, the hosts of several devices. Buffers are
needs, too: what overwrites a slot needs what last read it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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

    def num_bytes(self, *kinds: Kind) -> int:
        """Bytes of these kinds of copies."""
        return sum(op.num_bytes for op in self.operations if op.kind in kinds)

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


def side_by_side(schedules: Sequence[Schedule], shared: Sequence[str] = (HOST,)) -> Schedule:
    """Schedules of several devices on one host, each with a link of its own.

    Args:
        schedules: of the devices; their lanes become `0/in`, `1/in`, ...
        shared: lanes that all devices have together.
    """
    operations: list[Operation] = []
    resources: dict[str, str] = {}
    for device, schedule in enumerate(schedules):
        offset = len(operations)
        for lane in schedule.lanes:
            own = f"{device}/{schedule.resource(lane)}"
            resources[f"{device}/{lane}"] = lane if lane in shared else own
        operations += [
            replace(
                operation,
                index=operation.index + offset,
                lane=f"{device}/{operation.lane}",
                needs=tuple(need + offset for need in operation.needs),
            )
            for operation in schedule.operations
        ]
    return Schedule(tuple(operations), resources)
