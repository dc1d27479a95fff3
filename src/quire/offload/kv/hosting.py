"""Fronts on the host in the steps of an engine: what is carried, made again, attended to there.

a step begins   inputs of its new tokens get a place; fronts are divided; the first layers come
a layer         its inputs are noted; its front arrives; it attends; the slot is free again
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.backend import AttentionBackend, AttentionMath, LayerPages, NewSlots
from quire.kv.flat_batch import FlatBatch
from quire.kv.listeners import MemoryListener
from quire.kv.memory import KVMemory
from quire.kv.slot_moves import SlotMoves
from quire.kv.step_log import StepLog, Timed
from quire.kv.tables import Rows
from quire.layout.pages import LaneGroup
from quire.offload.kv.front_shares import CARRIED, Front, Share
from quire.offload.kv.host_attention import HostAttention, StepHostAttention
from quire.offload.kv.hosted import HostedFronts
from quire.offload.kv.staging import can_have_front
from quire.offload.kv.streaming import FrontStream
from quire.offload.recompute.input_store import Written
from quire.offload.recompute.remaking import Remaking, StepRemaking
from quire.offload.swap.carrier import Carrier


@runtime_checkable
class Splits(Protocol):
    """Divides fronts, and learns from how long that took."""

    def divide(self, fronts: Mapping[int, Front], rows: int) -> dict[int, Share]:
        """What becomes of the fronts of a step of so many rows, by row."""
        ...

    def learn(self, timed: Sequence[Timed]) -> None:
        """What the last step that had fronts took."""
        ...


class Hosting(MemoryListener):
    """Fronts on the host and who brings them.

    Args:
        memory: of the sequences.
        fronts: of all sequences.
        carrier: copies.
        splits: divides fronts; None has all of them carried.
        remaking: makes keys and values again; None: nobody does.
        remade: names of the groups for which it can.
        attention: attends on the host; None: nobody does.
    """

    def __init__(
        self,
        memory: KVMemory,
        fronts: HostedFronts,
        carrier: Carrier,
        *,
        splits: Splits | None = None,
        remaking: Remaking | None = None,
        remade: Iterable[str] = (),
        attention: HostAttention | None = None,
    ) -> None:
        self.memory, self.fronts, self.carrier = memory, fronts, carrier
        self.splits, self.remaking, self.attention = splits, remaking, attention
        self.tables = [memory.tables[name] for name in remade]
        if remaking is not None:
            memory.listeners.subscribe(self)
        self._last: StepFronts | None = None

    @property
    def staging_bytes(self) -> int:
        """Of X on the device, beside the arena."""
        return 0 if self.remaking is None else self.remaking.staging_bytes

    def step(self, batch: FlatBatch) -> "StepFronts | None":
        """What a step has to do with fronts; None where that is nothing."""
        self._end()
        keeps = self._keep(batch)
        rows = [row for row in batch.rows.tolist() if self.fronts.pieces(row)]
        if rows:
            shares = dict.fromkeys(rows, CARRIED)
            if self.splits is not None:
                decodes = set(batch.rows[: batch.shape.num_decode].tolist())
                fronts = {row: self._front(row, decodes=row in decodes) for row in rows}
                shares = self.splits.divide(fronts, len(batch.rows))
            self._last = StepFronts(self, batch, shares)
            self.fronts.use.begin(self._last)
            return self._last
        return StepFronts(self, batch, {}) if keeps else None

    def released(self, rows: Rows) -> None:
        """Free the inputs of sequences."""
        if self.remaking is not None:
            self.remaking.store.book.forget(rows.tolist())

    def compacted(self, row: int, group: str, moves: SlotMoves | None, slots: int) -> None:
        """Let inputs follow the slots of a sequence that has lost some.

        Args:
            row: the sequence.
            group: its lanes.
            moves: of slots; None where whole pages left.
            slots: each lane has now, at least.
        """
        table = self.memory.tables[group]
        if self.remaking is None or table not in self.tables:
            return
        store = self.remaking.store
        known = store.book.known(row)
        if moves is None or known.start or (table.num_slots[row] != slots).any():
            store.book.forget([row])  # lanes differ, or it is not known what moved where
            return
        unknown = moves.source >= known.stop  # nothing is kept of what fills these
        stop = int(min(slots, known.stop, moves.target[unknown].min(initial=slots)))
        some = ~unknown & (moves.target < stop)
        followed = SlotMoves(moves.lane[some], moves.source[some], moves.target[some])
        if len(known):
            store.move(row, followed, table.group.layers)
            store.book.cut(row, stop)

    def _end(self) -> None:
        """The last step is over: learn from it."""
        last, self._last = self._last, None
        self.fronts.use.end()
        if last is not None and self.splits is not None:
            self.splits.learn(last.log.read())

    def _front(self, row: int, *, decodes: bool) -> Front:
        tables = self.memory.tables.values()  # of one group more may have moved than of another
        staged = min(int(t.staged[row]) for t in tables if can_have_front(t.group))
        on_host = decodes and self.attention is not None and not self.memory.statistics_of(row)
        if self.remaking is None or not self.tables:
            return Front(staged, on_host=on_host)
        tokens = self.tables[0].group.page_class.tokens
        slots = self.remaking.store.book.known(row)
        most = min(int(table.staged[row]) for table in self.tables)
        first = -(-slots.start // tokens)
        known = range(first, max(first, min(slots.stop // tokens, most)))
        return Front(staged, known=known, on_host=on_host)

    def _keep(self, batch: FlatBatch) -> bool:
        """Give the inputs of a batch's new tokens places; whether there are any."""
        if self.remaking is None:
            return False
        store, until = self.remaking.store, self.remaking.tokens.inputs_until
        starts = []
        for place, row in enumerate(batch.rows.tolist()):
            held = [table.num_slots[row] for table in self.tables]
            end, tokens = int(held[0][0]), int(batch.shape.tokens[place])
            if any((slots != end).any() for slots in held):
                store.book.forget([row])  # layers hold other tokens: slots would not match
                continue
            segments = store.book.note(row, end - tokens, tokens, until(row))
            if segments:
                starts.append((int(batch.shape.starts[place]), end - tokens, segments))
        store.begin(Written.of(starts, store))
        return bool(starts)


class StepFronts:
    """The fronts of one step.

    Args:
        hosting: of the engine.
        batch: of the step.
        shares: of the rows that have a front.

    Attributes:
        log: of what takes time.
        wants_inputs: whether inputs are kept.
    """

    def __init__(self, hosting: Hosting, batch: FlatBatch, shares: Mapping[int, Share]) -> None:
        self.log = StepLog(hosting.carrier.marks())
        self.wants_inputs = hosting.remaking is not None
        self._remaking, self._parts = hosting.remaking, dict[str, StepRemaking]()
        for table in hosting.tables if hosting.remaking is not None and shares else ():
            assert hosting.remaking is not None, "just asked"
            part = StepRemaking(hosting.remaking, hosting.fronts, table, shares, self.log)
            if part.tokens:
                self._parts[table.group.name] = part
        self._host = None
        if hosting.attention is not None:
            self._host = StepHostAttention(hosting.attention, batch, shares, self.log)
        self._stream = FrontStream(
            hosting.fronts, hosting.memory.layout, hosting.carrier, shares, self.log, self._parts
        )

    def slots(self, group: LaneGroup, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """Live slots [rows, lanes] that a backend attends to: one of rows that are served here."""
        if self._host is None or not self._host.serves(group):
            return slots
        fewer = slots.copy()
        fewer[self._host.places] = 1
        return fewer

    def note_input(self, layer: int, inputs: Tensor) -> None:
        """Keep what a layer's attention is given."""
        if self._remaking is not None:
            self._remaking.store.note(layer, inputs)

    def arrive(
        self,
        group: LaneGroup,
        index: int,
        backend: AttentionBackend,
        slots: NewSlots,
        positions: Tensor | None,
    ) -> None:
        """Return when the front of a layer, counted inside its group, is in its slot.

        Args:
            group: of the layer.
            index: of the layer.
            backend: writes what is made again.
            slots: of the layer's new tokens.
            positions: of all pages of the class; None where they carry none.
        """
        part = self._parts.get(group.name)
        self._stream.arriving(group, index)
        if part is not None:

            def write(pages: Tensor, offsets: Tensor, at: Tensor, key: Tensor, v: Tensor) -> None:
                backend.write(replace(slots, pages=pages, offsets=offsets), key, v)
                if positions is not None:
                    positions[pages, offsets] = at.int()[:, None].expand_as(pages)

            part.make(index, write)
        self._stream.arrive(group, index)

    def ask_host(self, group: LaneGroup, index: int, query: Tensor, math: AttentionMath) -> None:
        """Begin to attend on the host; see `StepHostAttention.ask`."""
        if self._host is not None:
            self._host.ask(group, index, query, math)

    def merge_host(
        self, out: Tensor, group: LaneGroup, pages: LayerPages, query: Tensor, math: AttentionMath
    ) -> None:
        """Put in what the host attended to; see `StepHostAttention.merge_into`."""
        if self._host is not None:
            self._host.merge_into(out, group, pages, query, math)

    def leave(self, group: LaneGroup, index: int) -> None:
        """A layer has attended."""
        self._stream.leave(group, index)

    def settle(self) -> None:
        """Return when nothing is under way, also where a step has ended early."""
        self._stream.settle()
        if self._host is not None:
            self._host.settle()
