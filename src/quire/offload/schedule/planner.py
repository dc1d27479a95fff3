"""Plan the schedule of one step: all layers, and in each layer batch after batch.

    in      W_KV 0  X 0  KV 0  W_QO 0  MLP 0 | W_KV 1  X 1  KV 1 ...        X first, in chunks
    device               project 0 ..  attend 0  layer 0 | project 1 ..
    out                                       KV 0  hidden and X 0 ...

The link prefetches for as many items (a layer of a batch) as there are slots. If several batches
share a layer, the next layer's weights are transferred in as many chunks, one after each batch's
KV, so that no queue waits for a whole layer of weights. W_K and W_V are the first weights, because
recompute needs no others.

Differs from the paper: devices are not synchronized after each item, X is transferred in chunks,
and the first layer needs no X transfer.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from quire.offload.schedule.executor import ScheduleClock
from quire.offload.schedule.work import BatchTokens, Rules, StepWork
from quire.offload.timeline import HOST, IN, LANES, OUT, Operation, Schedule, TaskKind

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
        shared = {IN: "link", OUT: "link"} if self._rules.half_duplex else {}
        return Schedule(tuple(self._operations), shared)

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
            waits = item.projected if rules.serial else ()
            item.arrived += self._load_kv(0, item.tokens.kv, waits)
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
        chunks = _cut(tokens.x_on_device, tokens.x, self._rules.x_chunks)
        borders = _cut(0, tokens.kv, len(chunks)) if self._rules.x_ring and chunks else []
        for i, (first, count) in enumerate(chunks):
            fields = {
                "part": i + bool(tokens.x_on_device),
                "first": first,
                "x_slot": self._x_slot(),
            }
            x_bytes = self._work.sizes.x_bytes
            landed = self._copy(TaskKind.X_IN, count, x_bytes, self._x_released(), **fields)
            self._project(count, [*landed, *weights], **fields)
            self._ring.append(item.projected[-1])
            if i < len(borders):
                item.arrived += self._load_kv(*borders[i])
        return len(chunks)

    def _project(self, count: int, needs: Iterable[int], **fields: int) -> None:
        speeds = self._work.speeds
        seconds = speeds.project_call_s + count * speeds.project_token_s
        fields |= {"tokens": count}
        self._item.projected.append(self._add(TaskKind.PROJECT, needs, seconds, **fields))

    def _x_slot(self) -> int:
        """Slot of the next X chunk: in the ring, or of its item."""
        rules = self._rules
        if rules.x_ring:
            return len(self._ring) % rules.x_ring
        return (len(self._items) - 1) % rules.slots

    def _x_released(self) -> list[int]:
        ring = self._rules.x_ring
        if not ring:
            return self._released(lambda used: used.projected[-1:])
        last = self._ring[-ring:][:1] if len(self._ring) >= ring else []
        return [*last, *self._released(lambda _: [])]

    def _load_kv(self, first: int, count: int, waits: Iterable[int] = ()) -> list[int]:
        needs = [*waits, *self._released(lambda used: [used.attended])]
        return self._copy(TaskKind.KV_IN, count, self._work.sizes.kv_bytes, needs, first=first)

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

    def _add_weights(self, layer: int, part: int, num_bytes: int | float, first: int = 0) -> None:
        if not num_bytes:
            return
        # chunks of the next layer are loaded while this layer's are in use
        slots = max(self._rules.slots, 1 + (self._work.num_batches > 1))
        last_user = (layer - slots + 1) * self._work.num_batches - 1
        needs = [self._items[last_user].done] if last_user >= 0 else []
        if not self._rules.prefetch and len(self._items) > 1:
            needs.append(self._items[-2].done)
        seconds = self._work.speeds.inward.seconds(num_bytes)
        fields = {"part": part, "first": first, "slot": layer % slots}
        index = self._add(
            TaskKind.WEIGHTS_IN, needs, seconds, layer=layer, num_bytes=round(num_bytes), **fields
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
                self._add_weights(self._item.layer + 1, part, end - first, round(first - start))
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
        if tokens.host:
            seconds = speeds.host_call_s + tokens.host * speeds.host_token_s
            needs.append(self._add(TaskKind.HOST_ATTEND, ready, seconds, tokens=tokens.host))
        on_device = tokens.x + tokens.kv + tokens.resident
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
        if index and (rules.serial or not rules.prefetch):
            needs = [*needs, self._items[index - 1].done]
        return needs

    def _copy(
        self,
        kind: TaskKind,
        count: int,
        unit_bytes: int | float,
        needs: Iterable[int],
        **fields: int,
    ) -> list[int]:
        """Add a copy to or from the device; a copy of 0 bytes is omitted."""
        num_bytes = count * unit_bytes
        if not num_bytes:
            return []
        speeds = self._work.speeds
        rate = speeds.inward if LANES[kind] == IN else speeds.outward
        seconds = rate.seconds(num_bytes)
        return [self._add(kind, needs, seconds, tokens=count, num_bytes=round(num_bytes), **fields)]

    def _add(
        self, kind: TaskKind, needs: Iterable[int], seconds: int | float, **fields: int
    ) -> int:
        """Append an operation of the item; `fields` overrides the item's values."""
        item, index = self._item, len(self._operations)
        slot = (len(self._items) - 1) % self._rules.slots
        of_item = {"layer": item.layer, "batch": item.batch, "slot": slot}
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


def _cut(first: int, end: int, chunks: int) -> list[tuple[int, int]]:
    """First token and number of tokens of each chunk; the numbers differ by at most one."""
    borders = [first + (end - first) * i // chunks for i in range(chunks + 1)]
    return [(a, b - a) for a, b in pairwise(borders) if b > a]


# ---- selection -----------------------------------------------------------------------------------

# Selects the fastest variant of a step by the virtual clock.


def fastest(variants: Sequence[tuple[StepWork, Rules]]) -> tuple[int, Schedule]:
    """Return the index and the schedule of the fastest variant; the first of equally fast ones.

    The formulas describe the steady state. The virtual clock also counts few layers, first chunks
    and fixed times. If a variant transfers all KV, the selected step is expected to be no slower.


    Args:
        variants: work and layout of each variant.
    """
    schedules = [plan_step(work, rules) for work, rules in variants]
    times = [ScheduleClock().run(schedule).seconds for schedule in schedules]
    best = min(range(len(variants)), key=lambda index: (times[index], index))
    return best, schedules[best]


# ---- several devices -----------------------------------------------------------------------------


def combine_devices(schedules: Sequence[Schedule], shared: Sequence[str] = (HOST,)) -> Schedule:
    """Combine the schedules of several devices on one host; each device has its own link.

    Args:
        schedules: schedules of the devices; their lanes become `0/in`, `1/in`, ...
        shared: lanes that all devices share.
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
