"""Schedules of a decode step with offloaded KV and weights, on a virtual clock.

    lane     operations                                            in this order, one at a time
    in       weights in, X in, KV in, hidden in                    host to device
    out      KV out, hidden and X out                              device to host
    device   project (recompute), attend, layer

A lane is a queue: an operation starts when the previous operation of its lane and all operations
that it depends on have ended. An operation that overwrites staging depends on the last reader of
the staging.

Operations take exactly their durations, so results are deterministic and equal to the formulas of
`quire.offload.split`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise

from quire.offload.split import OffloadRates, pipelined_seconds
from quire.plan.rates import CopyRate


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
    LAYER = "layer"


IN, OUT, DEVICE = "in", "out", "device"
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
        part: of weights 0 for W_K and W_V, 1 for W_Q and W_O, 2 for the MLP.
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
    tokens: int = 0
    num_bytes: int = 0
    seconds: int | float = 0.0
    needs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Schedule:
    """Operations, in issue order for each lane.

    Attributes:
        operations: operations by index.
    """

    operations: tuple[Operation, ...]

    @property
    def lanes(self) -> dict[str, tuple[Operation, ...]]:
        """Operations by lane."""
        found: dict[str, list[Operation]] = {}
        for operation in self.operations:
            found.setdefault(operation.lane, []).append(operation)
        return {lane: tuple(operations) for lane, operations in found.items()}


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
    """

    schedule: Schedule
    spans: tuple[Span, ...]

    @property
    def seconds(self) -> int | float:
        """Duration of the step, up to the end of its last operation."""
        return max((span.end_s for span in self.spans), default=0.0)

    def of(self, lane: str) -> list[Span]:
        """Spans of a lane, in order."""
        return [span for span in self.spans if span.operation.lane == lane]


# ---- bytes and durations -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes that cross the link; 0 for data that does not.

    Attributes:
        kv_bytes: KV of a token in a layer.
        x_bytes: activation of a token in a layer.
        new_kv_bytes: KV of a row's new token, device to host.
        new_x_bytes: activation of a row's new token, device to host.
        hidden_bytes: hidden state of a row between layers, in each direction.
        kv_weight_bytes: W_K and W_V of a layer.
        qo_weight_bytes: W_Q and W_O of a layer.
        mlp_weight_bytes: MLP weights of a layer.
    """

    kv_bytes: int | float
    x_bytes: int | float
    new_kv_bytes: int | float = 0
    new_x_bytes: int | float = 0
    hidden_bytes: int | float = 0
    kv_weight_bytes: int | float = 0
    qo_weight_bytes: int | float = 0
    mlp_weight_bytes: int | float = 0

    @property
    def weight_bytes(self) -> int | float:
        """Weights of a whole layer."""
        return self.kv_weight_bytes + self.qo_weight_bytes + self.mlp_weight_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Durations of operations.

    Attributes:
        inward: rate of copies to the device.
        outward: rate of copies from the device.
        project_token_s: recompute of a token's KV in a layer.
        project_call_s: fixed cost of a recompute call.
        attend_token_s: attention to a token on the device.
        attend_call_s: fixed cost of an attention call on the device.
        row_s: other products of a row in a layer.
        layer_s: fixed cost of a layer.
    """

    inward: CopyRate
    outward: CopyRate
    project_token_s: int | float
    project_call_s: int | float = 0.0
    attend_token_s: int | float = 0.0
    attend_call_s: int | float = 0.0
    row_s: int | float = 0.0
    layer_s: int | float = 0.0

    def rates(self, sizes: Sizes, *, rows: int, tokens: int, batches: int = 1) -> OffloadRates:
        """Rates of a layer of one batch, with its part of the transfer of the layer's weights.

        Args:
            sizes: bytes that cross the link.
            rows: number of rows of the batch.
            tokens: tokens of all rows, which the device attends to.
            batches: number of batches that share a transferred layer.
        """
        byte_s = 1 / self.inward.bytes_per_s
        attend_s = self.attend_call_s + self.attend_token_s * tokens
        return OffloadRates(
            kv_s=sizes.kv_bytes * byte_s,
            x_s=sizes.x_bytes * byte_s,
            recompute_s=self.project_token_s,
            other_s=attend_s + self.row_s * rows + self.layer_s,
            link_s=sizes.weight_bytes / self.inward.bytes_per_s / batches,
        )


# ---- work ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTokens:
    """Tokens of one batch in one layer, over all rows.

    Attributes:
        rows: decoding rows, with one new token each.
        x: recomputed tokens.
        kv: tokens with transferred KV.
        x_on_device: tokens of `x` whose activation needs no transfer: in the first layer, where it
            comes from the token ids.
    """

    rows: int
    x: int = 0
    kv: int = 0
    x_on_device: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """Input of a step's schedule.

    Attributes:
        layers: batches of each layer, equally many in every layer.
        sizes: bytes.
        speeds: durations.
    """

    layers: tuple[tuple[BatchTokens, ...], ...]
    sizes: Sizes
    speeds: Speeds

    @property
    def num_batches(self) -> int:
        """Batches that share a layer's weights."""
        return len(self.layers[0])


def even_layers(
    batches: Sequence[BatchTokens], num_layers: int, *, embedded: bool = True
) -> tuple[tuple[BatchTokens, ...], ...]:
    """The same batches in every layer.

    Args:
        batches: batches of a layer.
        num_layers: number of layers.
        embedded: whether the first layer's activations come from the token ids, without a transfer.
    """
    first = tuple(replace(batch, x_on_device=batch.x) if embedded else batch for batch in batches)
    return (first, *[tuple(batches)] * (num_layers - 1))


_CALLS_OF_A_CHUNK = 10  # least duration of a chunk in fixed copy times, so overhead is at most 10 %
_MAX_CHUNKS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Layout rules of a step; the arms of a comparison differ in these.

    Attributes:
        slots: number of items that staging holds.
        x_chunks: number of chunks in which an item's X is transferred and recomputed.
        x_ring: X chunks that staging holds. KV chunks then alternate with X chunks, so that the
            link need not wait for free staging. 0: all of an item's X, transferred before its KV.
        prefetch: whether the link prefetches; otherwise an item's copies wait for the item before.
        fine_weights: whether only W_K and W_V precede X and the others follow KV; otherwise all
            attention weights precede X.
    """

    slots: int = 2
    x_chunks: int = 4
    x_ring: int = 0
    prefetch: bool = True
    fine_weights: bool = True


def ring_rules(
    rates: OffloadRates, tokens: int, x_tokens: int, *, call_s: int | float = 0.0
) -> Rules:
    """A layout with the smallest ring of X for which the link never waits.

    While the device runs attention and the rest of a layer, for `other_s`, it projects nothing: the
    ring holds the X that is transferred meanwhile, and two chunks more. If that is all of X, there
    is no ring.

    Args:
        rates: rates of a layer.
        tokens: tokens of all rows.
        x_tokens: recomputed tokens.
        call_s: fixed time of a copy of any size.
    """
    chunks = _MAX_CHUNKS
    if call_s:
        transfer_s = rates.x_s * x_tokens
        chunks = min(max(int(transfer_s / (_CALLS_OF_A_CHUNK * call_s)), 1), _MAX_CHUNKS)
    layer_s = pipelined_seconds(rates, tokens, x_tokens)
    ring = 2 + (math.ceil(chunks * rates.other_s / layer_s) if layer_s else 0)
    return Rules(x_chunks=chunks, x_ring=ring if ring < chunks else 0)


# ---- clock ---------------------------------------------------------------------------------------


def run_clock(schedule: Schedule) -> Timeline:
    """Run a schedule on the virtual clock; no thread waits."""
    spans: dict[int, Span] = {}
    free_s: dict[str, int | float] = {}
    heads = {lane: iter(operations) for lane, operations in schedule.lanes.items()}
    waiting = {lane: next(operations) for lane, operations in heads.items()}
    while waiting:
        start_s, _, operation = min(_startable(waiting, spans, free_s))
        end_s = start_s + operation.seconds
        spans[operation.index] = Span(operation, start_s, end_s)
        free_s[operation.lane] = end_s
        following = next(heads[operation.lane], None)
        if following is None:
            del waiting[operation.lane]
        else:
            waiting[operation.lane] = following
    return Timeline(schedule, tuple(spans[i] for i in range(len(spans))))


def _startable(
    waiting: dict[str, Operation],
    spans: dict[int, Span],
    free_s: dict[str, int | float],
) -> Iterator["tuple[int | float, int, Operation]"]:
    """Earliest start of each lane's next operation whose dependencies have ended.

    An operation with a dependency that has not ended cannot start before these.
    """
    for operation in waiting.values():
        if all(need in spans for need in operation.needs):
            ready_s = max((spans[need].end_s for need in operation.needs), default=0.0)
            yield max(ready_s, free_s.get(operation.lane, 0.0)), operation.index, operation


# ---- planner -------------------------------------------------------------------------------------

# Plan the schedule of one step: all layers, and in each layer batch after batch.
#
#     in      W_KV 0  X 0  KV 0  W_QO 0  MLP 0 | W_KV 1  X 1  KV 1 ...        X first, in chunks
#     device               project 0 ..  attend 0  layer 0 | project 1 ..
#     out                                       KV 0  hidden and X 0 ...
#
# The link prefetches for as many items (a layer of a batch) as there are slots. If several batches
# share a layer, the next layer's weights are transferred in as many chunks, one after each batch's
# KV, so that no queue waits for a whole layer of weights. W_K and W_V are the first, because
# recompute needs no others.
#
# Differs from the paper: devices are not synchronized after each item, X is transferred in chunks,
# and the first layer needs no X transfer.

KV_WEIGHTS, QO_WEIGHTS, MLP_WEIGHTS = range(3)


@dataclass(slots=True)
class _Item:
    """A layer of a batch: its tokens, and indices of operations that others depend on."""

    layer: int
    batch: int
    tokens: BatchTokens
    projected: list[int] = field(default_factory=list)
    arrived: list[int] = field(default_factory=list)
    attended: int = -1
    done: int = -1
    stored: int = -1


def plan_step(work: StepWork, rules: Rules | None = None) -> Schedule:
    """Plan the schedule of a step.

    Args:
        work: tokens, bytes and speeds.
        rules: rules of the layout; None: defaults.
    """
    return _Planner(work, rules or Rules()).plan()


class _Planner:
    def __init__(self, work: StepWork, rules: Rules) -> None:
        self._work, self._rules = work, rules
        self._operations: list[Operation] = []
        self._items: list[_Item] = []
        self._ring: list[int] = []  # projections of transferred X chunks
        # copies of each part of the weights of each layer
        self._weights: dict[tuple[int, int], list[int]] = {}

    def plan(self) -> Schedule:
        for layer, found in enumerate(self._work.layers):
            for batch, tokens in enumerate(found):
                self._items.append(_Item(layer, batch, tokens))
                self._load()
                self._compute()
                self._store()
        return Schedule(tuple(self._operations))

    # ---- copies to the device ------------------------------------------------------------------

    def _load(self) -> None:
        """Add the transfers of an item, in link order, and its recompute."""
        item, rules = self._item, self._rules
        # one batch transfers its own weights; several batches start with the first layer's
        whole = item.batch == 0 and (item.layer == 0 or self._work.num_batches == 1)
        before = (KV_WEIGHTS,) if rules.fine_weights else (KV_WEIGHTS, QO_WEIGHTS)
        for part in before if whole else ():
            self._add_weights(item.layer, part, self._part_bytes[part])
        chunks = self._recompute(coarse=not rules.fine_weights)
        if not rules.x_ring or not chunks:
            item.arrived += self._load_kv(item.tokens.kv)
        for part in range(len(before), 3) if whole else ():
            self._add_weights(item.layer, part, self._part_bytes[part])
        if self._work.num_batches > 1:
            self._add_weight_chunk()
            item.arrived += self._hidden_in()

    def _recompute(self, *, coarse: bool) -> int:
        """Add X transfers in chunks, each with its projection; return the number of chunks.

        X on the device is projected first. With a ring, a chunk of KV follows each chunk of X.

        """
        item, tokens = self._item, self._item.tokens
        weights = self._needed_weights(KV_WEIGHTS)
        weights += self._needed_weights(QO_WEIGHTS) if coarse else []
        if tokens.x_on_device:
            self._project(tokens.x_on_device, weights)
        chunks = _cut(tokens.x - tokens.x_on_device, self._rules.x_chunks)
        kv_chunks = _cut(tokens.kv, len(chunks)) if self._rules.x_ring and chunks else []
        for i, count in enumerate(chunks):
            landed = self._copy(TaskKind.X_IN, count, self._work.sizes.x_bytes, self._x_released())
            self._project(count, [*landed, *weights])
            self._ring.append(item.projected[-1])
            if i < len(kv_chunks):
                item.arrived += self._load_kv(kv_chunks[i])
        return len(chunks)

    def _project(self, count: int, needs: Iterable[int]) -> None:
        speeds = self._work.speeds
        seconds = speeds.project_call_s + count * speeds.project_token_s
        self._item.projected.append(self._add(TaskKind.PROJECT, needs, seconds, tokens=count))

    def _x_released(self) -> list[int]:
        ring = self._rules.x_ring
        if not ring:
            return self._released(lambda used: used.projected[-1:])
        last = self._ring[-ring:][:1] if len(self._ring) >= ring else []
        return [*last, *self._released(lambda _: [])]

    def _load_kv(self, count: int) -> list[int]:
        needs = self._released(lambda used: [used.attended])
        return self._copy(TaskKind.KV_IN, count, self._work.sizes.kv_bytes, needs)

    def _hidden_in(self) -> list[int]:
        """Copy a batch's hidden states to the device, if other batches ran since its last layer."""
        before = self._before
        if before is None or before.stored < 0:
            return []
        rows, hidden_bytes = self._item.tokens.rows, self._work.sizes.hidden_bytes
        return self._copy(TaskKind.HIDDEN_IN, rows, hidden_bytes, [before.stored])

    # ---- weights -------------------------------------------------------------------------------

    @property
    def _part_bytes(self) -> tuple[int | float, int | float, int | float]:
        sizes = self._work.sizes
        return sizes.kv_weight_bytes, sizes.qo_weight_bytes, sizes.mlp_weight_bytes

    def _add_weights(self, layer: int, part: int, num_bytes: int | float) -> None:
        if not num_bytes:
            return
        # chunks of the next layer are loaded while this layer's are in use
        slots = max(self._rules.slots, 1 + (self._work.num_batches > 1))
        last_user = (layer - slots + 1) * self._work.num_batches - 1
        needs = [self._items[last_user].done] if last_user >= 0 else []
        if not self._rules.prefetch and len(self._items) > 1:
            needs.append(self._items[-2].done)
        seconds = self._work.speeds.inward.seconds(num_bytes)
        index = self._add(
            TaskKind.WEIGHTS_IN, needs, seconds, layer=layer, part=part, num_bytes=round(num_bytes)
        )
        self._weights.setdefault((layer, part), []).append(index)

    def _add_weight_chunk(self) -> None:
        """Transfer an equal chunk of the next layer's weights after each batch's KV."""
        sizes, batches, batch = self._work.sizes, self._work.num_batches, self._item.batch
        if self._item.layer + 1 == len(self._work.layers):
            return
        low, high = (sizes.weight_bytes * chunk / batches for chunk in (batch, batch + 1))
        start: int | float = 0
        for part, part_bytes in enumerate(self._part_bytes):
            first, end = max(low, start), min(high, start + part_bytes)
            if end > first:
                self._add_weights(self._item.layer + 1, part, end - first)
            start += part_bytes

    def _needed_weights(self, part: int) -> list[int]:
        return list(self._weights.get((self._item.layer, part), ()))

    # ---- computation, and copies from the device -----------------------------------------------

    def _compute(self) -> None:
        """Add attention after all KV is on the device, then the rest of the layer."""
        item, tokens, speeds = self._item, self._item.tokens, self._work.speeds
        ready = [] if self._before is None else [self._before.done]
        ready += self._needed_weights(QO_WEIGHTS)
        needs = [*item.projected, *item.arrived, *ready]
        on_device = tokens.x + tokens.kv
        attend_s = speeds.attend_call_s + on_device * speeds.attend_token_s
        item.attended = self._add(TaskKind.ATTEND, needs, attend_s, tokens=on_device)
        rest_s = speeds.layer_s + tokens.rows * speeds.row_s
        needs = [item.attended, *self._needed_weights(MLP_WEIGHTS)]
        item.done = self._add(TaskKind.LAYER, needs, rest_s, tokens=tokens.rows)

    def _store(self) -> None:
        """Add the copies of new KV, then of new X and, with several batches, of hidden states."""
        item, sizes = self._item, self._work.sizes
        rows = item.tokens.rows
        self._copy(TaskKind.KV_OUT, rows, sizes.new_kv_bytes, [item.attended])
        returns = self._work.num_batches > 1 and item.layer + 1 < len(self._work.layers)
        row_bytes = sizes.new_x_bytes + (sizes.hidden_bytes if returns else 0)
        stored = self._copy(TaskKind.HIDDEN_OUT, rows, row_bytes, [item.done])
        item.stored = stored[0] if returns and stored else -1

    # ---- operations ----------------------------------------------------------------------------

    @property
    def _item(self) -> _Item:
        return self._items[-1]

    @property
    def _before(self) -> _Item | None:
        """The same batch in the layer before."""
        batches = self._work.num_batches
        return self._items[-1 - batches] if self._item.layer else None

    def _released(self, users: Callable[[_Item], list[int]]) -> list[int]:
        """Operations that must end before the item's slot may be written."""
        rules, index = self._rules, len(self._items) - 1
        needs = users(self._items[index - rules.slots]) if index >= rules.slots else []
        if index and not rules.prefetch:
            needs = [*needs, self._items[index - 1].done]
        return needs

    def _copy(
        self,
        kind: TaskKind,
        count: int,
        unit_bytes: int | float,
        needs: Iterable[int],
    ) -> list[int]:
        """Add a copy to or from the device; a copy of 0 bytes is omitted."""
        num_bytes = count * unit_bytes
        if not num_bytes:
            return []
        speeds = self._work.speeds
        rate = speeds.inward if LANES[kind] == IN else speeds.outward
        seconds = rate.seconds(num_bytes)
        return [self._add(kind, needs, seconds, tokens=count, num_bytes=round(num_bytes))]

    def _add(
        self, kind: TaskKind, needs: Iterable[int], seconds: int | float, **fields: int
    ) -> int:
        """Append an operation of the item; `fields` overrides the item's values."""
        item, index = self._item, len(self._operations)
        of_item = {"layer": item.layer, "batch": item.batch}
        self._operations.append(
            Operation(
                index=index,
                kind=kind,
                lane=LANES[kind],
                seconds=seconds,
                needs=tuple(dict.fromkeys(needs)),
                **(of_item | fields),
            )
        )
        return index


def _cut(count: int, chunks: int) -> list[int]:
    """Sizes of chunks, which differ by at most one; none is empty."""
    borders = [count * i // chunks for i in range(chunks + 1)]
    return [b - a for a, b in pairwise(borders) if b > a]


def fastest(variants: Sequence[tuple[StepWork, Rules]]) -> tuple[int, Schedule]:
    """Return the index and the schedule of the fastest variant; the first of equally fast ones.

    The formulas describe the steady state. The virtual clock also counts few layers, first chunks
    and fixed times.

    Args:
        variants: work and layout of each variant.
    """
    schedules = [plan_step(work, rules) for work, rules in variants]
    times = [run_clock(schedule).seconds for schedule in schedules]
    best = min(range(len(variants)), key=lambda index: (times[index], index))
    return best, schedules[best]
