"""KV offload in the steps of an engine: transfer, recompute and CPU attention.

step start   activations of new tokens get blocks; prefixes are split; first layers are prefetched
each layer   store its activations, wait for its prefix, attend, free its staging slot

Batches of a step that share each layer have an offload of their own each (column by column).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.backend import AttentionBackend, AttentionMath, LayerPages, NewSlots
from quire.kv.flat_batch import WHOLE_STEP, FlatBatch, StepPart
from quire.kv.memory import KVMemory, MemoryListener
from quire.kv.slot_moves import SlotMoves
from quire.kv.tables import LaneTable, Rows
from quire.layout.layout import SLOTS, can_be_offloaded
from quire.layout.pages import LaneGroup
from quire.layout.sparse import SparseSpec
from quire.layout.statistics import OfWeights
from quire.models.layer_source import LayerSource
from quire.offload.kv.cpu_attention import CPUAttention, StepCPUAttention
from quire.offload.kv.hot_pages import (
    HotLayer,
    HotPages,
    HotReads,
    HotRow,
    OffloadedBounds,
    pages_read,
    whole_layers,
)
from quire.offload.kv.offloaded_prefixes import OffloadedPageGroup, OffloadedPrefixes
from quire.offload.kv.prefetch import PrefixPrefetch
from quire.offload.kv.prefix_splits import TRANSFERRED, OffloadedPrefix, PrefixSplits, Share
from quire.offload.recompute.activation_store import Writing, Written
from quire.offload.recompute.kv_recompute import KVRecompute, StepKVRecompute
from quire.offload.step_log import StepLog
from quire.offload.swap.transfer import TransferWorker


class KVOffload(MemoryListener):
    """KV offload of an engine.

    Args:
        memory: KV memory of the sequences.
        prefixes: offloaded prefixes of all sequences.
        transfer_worker: runs the copies.
        splits: splits offloaded prefixes; None if all KV is transferred.
        kv_recompute: recomputes keys and values; None if no KV is recomputed.
        attention: CPU attention; None if all attention is on the device.
        weights: offloaded weights of the model; None if all weights are on the device.
        bounds: bounds of offloaded pages; None: the layout has none.

    Attributes:
        hot_reads: pages that rows with sparse attention have read from offload memory.
    """

    def __init__(  # noqa: PLR0913 - parts that are built in one place
        self,
        memory: KVMemory,
        prefixes: OffloadedPrefixes,
        transfer_worker: TransferWorker,
        *,
        splits: PrefixSplits | None = None,
        kv_recompute: KVRecompute | None = None,
        attention: CPUAttention | None = None,
        weights: LayerSource | None = None,
        bounds: OffloadedBounds | None = None,
    ) -> None:
        self.bounds, self.hot_reads = bounds, HotReads()
        self.memory, self.prefixes, self.transfer_worker = memory, prefixes, transfer_worker
        self.splits, self.kv_recompute, self.attention = splits, kv_recompute, attention
        self.weights = weights
        groups = () if kv_recompute is None else kv_recompute.groups
        self.tables = [memory.tables[name] for name in groups]
        if kv_recompute is not None:
            memory.listeners.subscribe(self)
        self._log: StepLog | None = None
        self._learns = True  # the rates are those of layers whose whole prefix is read
        self._started: list[tuple[int, StepKVOffload]] = []

    @property
    def staging_bytes(self) -> int:
        """Bytes of X on the device, in addition to the arena."""
        return 0 if self.kv_recompute is None else self.kv_recompute.staging_bytes

    def step(
        self,
        batch: FlatBatch,
        part: StepPart = WHOLE_STEP,
        sparse: Sequence[SparseSpec | None] = (),
    ) -> "StepKVOffload | None":
        """Start the offload of a batch; None without offloaded prefixes and activations to store.

        All batches of a step are started before the first of them runs.
        """
        if not part.number:
            self._end()
        writing = self._store_activations(batch)
        rows = [row for row in batch.rows.tolist() if self.prefixes.page_groups(row)]
        if rows:
            caches = self._caches(batch, rows, sparse)
            sparse_rows = {row for row, _ in caches}
            whole = [row for row in rows if row not in sparse_rows]
            shares = dict.fromkeys(rows, TRANSFERRED)
            if self.splits is not None and whole:
                prefixes = self._prefixes_of(batch, whole)
                shares |= self.splits.divide(prefixes, len(batch.rows), part.count)
            self._log = self._log or StepLog(self.transfer_worker.marks())
            self._learns = self._learns and not caches
            started = StepKVOffload(self, batch, shares, self._log, writing, part.number, caches)
            self.prefixes.use.begin(started)
            self._started.append((part.number, started))
        elif writing is not None:
            marks = self.transfer_worker.marks()
            started = StepKVOffload(self, batch, {}, StepLog(marks), writing)
        else:
            started = None
        if part.number >= part.count - 1:
            self._begin()
        return started

    def _caches(
        self, batch: FlatBatch, rows: Sequence[int], sparse: Sequence[SparseSpec | None]
    ) -> dict[tuple[int, str], HotRow]:
        """Return the caches of the rows that fetch only selected pages, by row and lane group."""
        if self.bounds is None:
            return {}
        specs, use = dict(zip(batch.rows.tolist(), sparse, strict=False)), self.prefixes.use
        reads = {row: own for row in rows if (own := self._pages_read(row, specs.get(row)))}
        held = {row: self.prefixes.page_groups(row) for row in rows}
        holders: dict[OffloadedPageGroup, tuple[int, ...]] = {}
        for row, one in ((row, one) for row, own in held.items() for one in own):
            holders[one] = *holders.get(one, ()), row
        # of rows that share pages, all select pages in the same layers, or none does
        while beside := {
            row
            for one, by in holders.items()
            if len({reads[of][one.group][0] if of in reads else None for of in by}) > 1
            for row in by
            if row in reads
        }:
            reads = {row: own for row, own in reads.items() if row not in beside}
        for row in rows:
            if row not in reads:  # whole layers are loaded into the second slot
                use.drop_caches(held[row])
        found = dict[tuple[int, str], HotRow]()
        for row, name in ((row, name) for row, own in reads.items() for name in own):
            of_group = self.prefixes.page_groups(row, name)
            parts = []
            for by, part in groupby(of_group, lambda one: holders[one]):
                first, max_pages = reads[row][name][0], sum(reads[of][name][1] for of in by)
                parts.append(self._cache(self.memory.tables[name], list(part), first, max_pages))
            found[row, name] = HotRow(parts)
        return found

    def _pages_read(self, row: int, spec: SparseSpec | None) -> dict[str, tuple[int, int]]:
        """The first layer that selects pages and their largest number, by lane group.

        Empty if the row loads whole layers.
        """
        found = dict[str, tuple[int, int]]()
        page_groups = self.prefixes.page_groups(row)
        if spec is None or any(one.slots != SLOTS for one in page_groups):
            return found
        for name in dict.fromkeys(one.group for one in page_groups):
            table = self.memory.tables[name]
            max_pages = pages_read(table, row, spec) if self._selects(table.group) else 0
            if not max_pages:
                return {}
            found[name] = whole_layers(table.group, spec), max_pages
        return found

    def _cache(
        self, table: LaneTable, part: Sequence[OffloadedPageGroup], first: int, max_pages: int
    ) -> HotPages:
        """The cache of page groups; a new one replaces one that does not fit."""
        use, cache = self.prefixes.use, self.prefixes.use.caches.get(id(part[0]))
        needed = min(max_pages, sum(one.columns for one in part))
        if not isinstance(cache, HotPages) or not cache.fits(part, first, needed):
            use.drop_caches(part)
            for layer in table.group.first_staged(SLOTS)[1:]:  # into the slot of the cache
                for one in part:
                    for transfer in use.take(one, layer).values():
                        transfer.result()
            cache = HotPages(table, part, first, needed)
            use.caches[id(part[0])] = cache
        return cache

    def _selects(self, group: LaneGroup) -> bool:
        """Whether single pages of a group can be fetched: heads of them, without positions."""
        of_codec = (one for one in self.memory.layout.groups if one.of == group.name)
        exact = any(one.full_precision is not None for one in of_codec)
        return group.page_class.has_bounds and not (exact and group.page_class.positions)

    def _begin(self) -> None:
        """Start the copies of the first layers of all batches, layer by layer."""
        started, self._started = self._started, []
        copies = [
            (layer, number, index, name, batch)
            for number, batch in started
            for layer, index, name in batch.prefetch.first_layers
        ]
        copies.sort(key=lambda copy: copy[:2])
        for _, _, index, name, batch in copies:
            batch.prefetch.begin(name, index)

    def released(self, rows: Rows) -> None:
        """Free the activations of sequences."""
        if self.kv_recompute is not None:
            self.prefixes.use.forget_activations()
            self.kv_recompute.store.allocator.forget(rows.tolist())

    @property
    def reads_moves(self) -> bool:
        return self.kv_recompute is not None

    def compacted(self, row: int, group: str, moves: SlotMoves | None, slots: int) -> None:
        """Move stored activations along with the retained slots of a sequence after an eviction.

        Args:
            row: the sequence.
            group: name of the lane group.
            moves: slot moves; None if whole pages were freed.
            slots: least slots of each lane after the eviction.
        """
        table = self.memory.tables[group]
        if self.kv_recompute is None or table not in self.tables:
            return
        self.prefixes.use.forget_activations()
        store = self.kv_recompute.store
        known = store.allocator.known(row)
        if moves is None or known.start or (table.num_slots[row] != slots).any():
            store.allocator.forget([row])  # lanes differ, or the moves are unknown
            return
        unknown = moves.source >= known.stop  # slots without stored activations
        stop = int(min(slots, known.stop, moves.target[unknown].min(initial=slots)))
        some = ~unknown & (moves.target < stop)
        followed = SlotMoves(moves.lane[some], moves.source[some], moves.target[some])
        if len(known):
            store.move(row, followed, table.group.layers)
            store.allocator.cut(row, stop)

    def _end(self) -> None:
        """Learn from the last step, which is over."""
        log, self._log = self._log, None
        self._started.clear()  # of a step that failed before its last batch
        self.prefixes.use.end()
        held = map(self.prefixes.page_groups, self.prefixes.rows)
        self.prefixes.use.retain(list(chain.from_iterable(held)))
        if self.kv_recompute is not None:
            self.kv_recompute.store.finish()
        learns, self._learns = self._learns, True
        if log is not None and self.splits is not None and learns:
            self.splits.learn(log.read())

    def batch_key(self, row: int) -> int | None:
        return self.prefixes.batch_key(row)

    def _prefixes_of(self, batch: FlatBatch, rows: Sequence[int]) -> dict[int, OffloadedPrefix]:
        """Offloaded prefixes of a batch; pages that rows share count for the first of them.

        That is a row with stored activations, from which the pages of all are recomputed.
        """
        decodes = set(batch.rows[: batch.shape.num_decode].tolist())
        found: dict[int, OffloadedPrefix] = {}
        seen = dict[int | None, int]()
        for row in sorted(rows, key=lambda row: -self._num_known(row)):
            found[row] = self._prefix_of(row, decodes=row in decodes)
            first = seen.setdefault(self.batch_key(row), row)
            if first != row:
                shared = sum(
                    page_group.columns
                    for page_group in self.prefixes.page_groups(row)
                    if any(page_group is other for other in self.prefixes.page_groups(first))
                ) // max(1, len({group.group for group in self.prefixes.page_groups(row)}))
                found[row] = OffloadedPrefix(max(0, found[row].columns - shared))
                found[first] = replace(found[first], on_host=False)
        return found

    def _num_known(self, row: int) -> int:
        if self.kv_recompute is None:
            return 0
        return len(self.kv_recompute.store.allocator.known(row))

    def _prefix_of(self, row: int, *, decodes: bool) -> OffloadedPrefix:
        tables = self.memory.tables.values()  # groups may differ in their offloaded pages
        staged = min(int(t.staged[row]) for t in tables if can_be_offloaded(t.group))
        on_host = decodes and self.attention is not None and self._attends_in_parts(row)
        if self.kv_recompute is None or not self.tables:
            return OffloadedPrefix(staged, on_host=on_host)
        tokens = self.tables[0].group.page_class.tokens
        slots = self.kv_recompute.store.allocator.known(row)
        most = min(int(table.staged[row]) for table in self.tables)
        first = -(-slots.start // tokens)
        known = range(first, max(first, min(slots.stop // tokens, most)))
        return OffloadedPrefix(staged, known=known, on_host=on_host)

    def _attends_in_parts(self, row: int) -> bool:
        """Whether no record of a row needs its attention weights over all tokens."""
        groups = [self.memory.tables[name].group for name in self.memory.statistics_of(row)]
        return all(
            group.state is not None
            or (group.statistic is not None and not isinstance(group.statistic, OfWeights))
            for group in groups
        )

    def _store_activations(self, batch: FlatBatch) -> Writing | None:
        """Allocate activation blocks for the batch's new tokens; None if none are stored."""
        if self.kv_recompute is None:
            return None
        store, until = self.kv_recompute.store, self.kv_recompute.tokens.inputs_until
        starts = []
        for place, row in enumerate(batch.rows.tolist()):
            held = [table.num_slots[row] for table in self.tables]
            end, tokens = int(held[0][0]), int(batch.shape.tokens[place])
            if any((slots != end).any() for slots in held):
                store.allocator.forget([row])  # layers hold different tokens: slots would not match
                continue
            segments = store.allocator.note(row, end - tokens, tokens, until(row))
            if segments:
                starts.append((int(batch.shape.starts[place]), end - tokens, segments))
        return store.begin(Written.of(starts, store)) if starts else None


class StepKVOffload:
    """KV offload of one batch of a step.

    Args:
        kv_offload: KV offload of the engine.
        batch: the batch.
        shares: split of the rows with an offloaded prefix.
        log: times of the operations of all batches of the step.
        writing: new tokens whose activations are stored; None if none are.
        number: index of the batch in the step.
        caches: of the rows that fetch only selected pages, by row and lane group.

    Attributes:
        wants_inputs: whether activations are stored.
        prefetch: its copies.
    """

    def __init__(
        self,
        kv_offload: KVOffload,
        batch: FlatBatch,
        shares: Mapping[int, Share],
        log: StepLog,
        writing: Writing | None,
        number: int = 0,
        caches: Mapping[tuple[int, str], HotRow] = MappingProxyType({}),
    ) -> None:
        self._kv_offload, self._rows, self._caches = kv_offload, batch.rows, caches
        self._writing, self.wants_inputs = writing, writing is not None
        self._log, self._recomputed = log, set[tuple[str, int]]()
        self._kv_recompute, self._group_recomputes = (
            kv_offload.kv_recompute,
            dict[str, StepKVRecompute](),
        )
        for table in kv_offload.tables if kv_offload.kv_recompute is not None and shares else ():
            assert kv_offload.kv_recompute is not None, "checked above"
            group_recompute = StepKVRecompute(
                kv_offload.kv_recompute, kv_offload.prefixes, table, shares, log, number
            )
            if group_recompute.tokens:
                self._group_recomputes[table.group.name] = group_recompute
        self._host = None
        if kv_offload.attention is not None:
            self._host = StepCPUAttention(kv_offload.attention, batch, shares, log)
        self.prefetch = PrefixPrefetch(
            kv_offload.prefixes,
            kv_offload.memory.layout,
            kv_offload.transfer_worker,
            shares,
            log,
            self._group_recomputes,
            kv_offload.weights,
            {key: cache.first for key, cache in caches.items()},
        )

    def layer_pages(self, group: LaneGroup, index: int, pages: LayerPages) -> LayerPages:
        caches = {
            place: cache
            for place, row in enumerate(self._rows.tolist())
            if (cache := self._caches.get((row, group.name))) is not None and index >= cache.first
        }
        kv_offload = self._kv_offload
        if not caches or kv_offload.bounds is None:
            return pages
        found = HotLayer(
            kv_offload.memory.tables[group.name],
            index,
            self._rows,
            caches,
            kv_offload.bounds,
            kv_offload.prefixes.pool.copies,
            kv_offload.transfer_worker,
            kv_offload.hot_reads,
        )
        return replace(pages, offloaded=found)

    def slots(self, group: LaneGroup, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """Live slots [rows, lanes] for the backend: 1 for rows that CPU attention serves."""
        if self._host is None or not self._host.serves(group):
            return slots
        fewer = slots.copy()
        fewer[self._host.places] = 1
        return fewer

    def note_input(self, layer: int, inputs: Tensor) -> None:
        """Store the inputs of a layer's attention."""
        if self._kv_recompute is not None and self._writing is not None:
            self._kv_recompute.store.note(layer, inputs, self._writing)

    def wait_for_prefix(
        self,
        group: LaneGroup,
        index: int,
        backend: AttentionBackend,
        slots: NewSlots,
        positions: Tensor | None,
    ) -> None:
        """Wait until the offloaded prefix of a layer is in its staging slot.

        KV that `begin_layer` has not recomputed is recomputed.

        Args:
            group: lane group of the layer.
            index: index of the layer inside its group.
            backend: writes recomputed KV.
            slots: slots of the layer's new tokens.
            positions: positions of all pages of the class; None if pages store no positions.
        """
        self.prefetch.begin_wait(group, index)
        if (group.name, index) in self._recomputed:
            self._recomputed.discard((group.name, index))
        else:
            self._recompute(group, index, backend, slots, positions)
        self.prefetch.wait_for(group, index)

    def begin_layer(
        self,
        group: LaneGroup,
        index: int,
        backend: AttentionBackend,
        slots: NewSlots,
        positions: Tensor | None,
    ) -> None:
        """Recompute the offloaded KV of a layer as soon as W_K and W_V have arrived.

        For layers with offloaded weights: their other weights are in transfer meanwhile. Arguments
        as for `wait_for_prefix`.
        """
        if group.name not in self._group_recomputes or self._kv_recompute is None:
            return
        self._kv_recompute.model.arrive_kv(group.layers[index])
        start = self._log.marks.now()
        self._recompute(group, index, backend, slots, positions)
        self._recomputed.add((group.name, index))
        self._log.early = start, self._log.marks.now()

    def _recompute(
        self,
        group: LaneGroup,
        index: int,
        backend: AttentionBackend,
        slots: NewSlots,
        positions: Tensor | None,
    ) -> None:
        group_recompute = self._group_recomputes.get(group.name)
        if group_recompute is None:
            return

        def write(
            pages: Tensor, offsets: Tensor, at: Tensor, key: Tensor, value: Tensor, *index: Tensor
        ) -> None:
            target = replace(slots, pages=pages, offsets=offsets)
            backend.write(target, key, value)
            for keys in index:
                target.write_index(keys)
            if positions is not None:
                positions[pages, offsets] = at.int()[:, None].expand_as(pages)

        group_recompute.recompute(index, write)

    def start_cpu_attention(
        self, group: LaneGroup, index: int, query: Tensor, math: AttentionMath
    ) -> None:
        """Start CPU attention; see `StepCPUAttention.start`."""
        if self._host is not None:
            self._host.start(group, index, query, math)

    def merge_cpu_attention(
        self, out: Tensor, group: LaneGroup, pages: LayerPages, query: Tensor, math: AttentionMath
    ) -> None:
        """Merge the results of CPU attention; see `StepCPUAttention.merge_into`."""
        if self._host is not None:
            self._host.merge_into(out, group, pages, query, math)

    def release_staging(self, group: LaneGroup, index: int) -> None:
        """Free the staging slot of a layer after its attention."""
        self.prefetch.release_slot(group, index)

    def finalize(self) -> None:
        """Wait until no copy or CPU attention is in flight, also after a failed step."""
        self.prefetch.finalize()
        if self._host is not None:
            self._host.finalize()
