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
from quire.kv.listeners import MemoryListener, SlotMoves
from quire.kv.memory import KVMemory
from quire.kv.step_log import StepLog, Timed
from quire.kv.tables import Rows
from quire.layout.layout import can_be_offloaded
from quire.layout.pages import LaneGroup
from quire.offload.kv.cpu_attention import CPUAttention, StepCPUAttention
from quire.offload.kv.offloaded_prefixes import OffloadedPrefixes
from quire.offload.kv.prefetch import PrefixPrefetch
from quire.offload.kv.prefix_splits import CARRIED, OffloadedPrefix, Share
from quire.offload.recompute.activation_store import Written
from quire.offload.recompute.kv_recompute import KVRecompute, StepKVRecompute
from quire.offload.swap.transfer import TransferWorker


@runtime_checkable
class Splits(Protocol):
    """Divides fronts, and learns from how long that took."""

    def divide(self, prefixes: Mapping[int, OffloadedPrefix], rows: int) -> dict[int, Share]:
        """What becomes of the fronts of a step of so many rows, by row."""
        ...

    def learn(self, timed: Sequence[Timed]) -> None:
        """What the last step that had fronts took."""
        ...


class KVOffload(MemoryListener):
    """Fronts on the host and who brings them.

    Args:
        memory: of the sequences.
        prefixes: of all sequences.
        transfer_worker: copies.
        splits: divides fronts; None has all of them carried.
        kv_recompute: makes keys and values again; None: nobody does.
        recomputed_share: names of the groups for which it can.
        attention: attends on the host; None: nobody does.
    """

    def __init__(
        self,
        memory: KVMemory,
        prefixes: OffloadedPrefixes,
        transfer_worker: TransferWorker,
        *,
        splits: Splits | None = None,
        kv_recompute: KVRecompute | None = None,
        recomputed_share: Iterable[str] = (),
        attention: CPUAttention | None = None,
    ) -> None:
        self.memory, self.prefixes, self.transfer_worker = memory, prefixes, transfer_worker
        self.splits, self.kv_recompute, self.attention = splits, kv_recompute, attention
        self.tables = [memory.tables[name] for name in recomputed_share]
        if kv_recompute is not None:
            memory.listeners.subscribe(self)
        self._last: StepKVOffload | None = None

    @property
    def staging_bytes(self) -> int:
        """Of X on the device, beside the arena."""
        return 0 if self.kv_recompute is None else self.kv_recompute.staging_bytes

    def step(self, batch: FlatBatch) -> "StepKVOffload | None":
        """What a step has to do with fronts; None where that is nothing."""
        self._end()
        keeps = self._keep(batch)
        rows = [row for row in batch.rows.tolist() if self.prefixes.pieces(row)]
        if rows:
            shares = dict.fromkeys(rows, CARRIED)
            if self.splits is not None:
                decodes = set(batch.rows[: batch.shape.num_decode].tolist())
                prefixes = {row: self._prefix_of(row, decodes=row in decodes) for row in rows}
                shares = self.splits.divide(prefixes, len(batch.rows))
            self._last = StepKVOffload(self, batch, shares)
            self.prefixes.use.begin(self._last)
            return self._last
        return StepKVOffload(self, batch, {}) if keeps else None

    def released(self, rows: Rows) -> None:
        """Free the inputs of sequences."""
        if self.kv_recompute is not None:
            self.kv_recompute.store.book.forget(rows.tolist())

    def compacted(self, row: int, group: str, moves: SlotMoves | None, slots: int) -> None:
        """Let inputs follow the slots of a sequence that has lost some.

        Args:
            row: the sequence.
            group: its lanes.
            moves: of slots; None where whole pages left.
            slots: each lane has now, at least.
        """
        table = self.memory.tables[group]
        if self.kv_recompute is None or table not in self.tables:
            return
        store = self.kv_recompute.store
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
        self.prefixes.use.end()
        if last is not None and self.splits is not None:
            self.splits.learn(last.log.read())

    def _prefix_of(self, row: int, *, decodes: bool) -> OffloadedPrefix:
        tables = self.memory.tables.values()  # of one group more may have moved than of another
        staged = min(int(t.staged[row]) for t in tables if can_be_offloaded(t.group))
        on_host = decodes and self.attention is not None and not self.memory.statistics_of(row)
        if self.kv_recompute is None or not self.tables:
            return OffloadedPrefix(staged, on_host=on_host)
        tokens = self.tables[0].group.page_class.tokens
        slots = self.kv_recompute.store.book.known(row)
        most = min(int(table.staged[row]) for table in self.tables)
        first = -(-slots.start // tokens)
        known = range(first, max(first, min(slots.stop // tokens, most)))
        return OffloadedPrefix(staged, known=known, on_host=on_host)

    def _keep(self, batch: FlatBatch) -> bool:
        """Give the inputs of a batch's new tokens places; whether there are any."""
        if self.kv_recompute is None:
            return False
        store, until = self.kv_recompute.store, self.kv_recompute.tokens.inputs_until
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


class StepKVOffload:
    """The fronts of one step.

    Args:
        kv_offload: of the engine.
        batch: of the step.
        shares: of the rows that have a front.

    Attributes:
        log: of what takes time.
        wants_inputs: whether inputs are kept.
    """

    def __init__(
        self, kv_offload: KVOffload, batch: FlatBatch, shares: Mapping[int, Share]
    ) -> None:
        self.log = StepLog(kv_offload.transfer_worker.marks())
        self.wants_inputs = kv_offload.kv_recompute is not None
        self._kv_recompute, self._parts = kv_offload.kv_recompute, dict[str, StepKVRecompute]()
        for table in kv_offload.tables if kv_offload.kv_recompute is not None and shares else ():
            assert kv_offload.kv_recompute is not None, "just asked"
            part = StepKVRecompute(
                kv_offload.kv_recompute, kv_offload.prefixes, table, shares, self.log
            )
            if part.tokens:
                self._parts[table.group.name] = part
        self._host = None
        if kv_offload.attention is not None:
            self._host = StepCPUAttention(kv_offload.attention, batch, shares, self.log)
        self._stream = PrefixPrefetch(
            kv_offload.prefixes,
            kv_offload.memory.layout,
            kv_offload.transfer_worker,
            shares,
            self.log,
            self._parts,
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
        if self._kv_recompute is not None:
            self._kv_recompute.store.note(layer, inputs)

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

    def start_cpu_attention(
        self, group: LaneGroup, index: int, query: Tensor, math: AttentionMath
    ) -> None:
        """Begin to attend on the host; see `StepCPUAttention.ask`."""
        if self._host is not None:
            self._host.ask(group, index, query, math)

    def merge_cpu_attention(
        self, out: Tensor, group: LaneGroup, pages: LayerPages, query: Tensor, math: AttentionMath
    ) -> None:
        """Put in what the host attended to; see `StepCPUAttention.merge_into`."""
        if self._host is not None:
            self._host.merge_into(out, group, pages, query, math)

    def leave(self, group: LaneGroup, index: int) -> None:
        """A layer has attended."""
        self._stream.leave(group, index)

    def finalize(self) -> None:
        """Return when nothing is under way, also where a step has ended early."""
        self._stream.finalize()
        if self._host is not None:
            self._host.finalize()
