"""Executes evictions: the policy selects the slots to retain, then the lanes are compacted."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import OutOfPages, PolicyError
from quire.eviction.eviction_rules import EvictionRules
from quire.eviction.promotion import Promotion, promoted_entry
from quire.kv.compaction import (
    CompactionPlan,
    Kind,
    commit_compaction,
    plan_compaction,
    require_private_copies,
)
from quire.kv.lane_reader import LaneReader
from quire.kv.layer_loads import LayerLoads
from quire.kv.step import PagedKV
from quire.layout.statistics import Statistic
from quire.policies.base import MergedValues
from quire.policies.eviction import Eviction
from quire.policies.view import KVView, Rotation
from quire.scheduler.eviction_trace import EvictionEntry
from quire.scheduler.lane_capacities import Evicted
from quire.scheduler.lane_slots import Slots, evicting_table
from quire.scheduler.request import Request

FLOAT_BYTES = 4
_TENSORS_OF_A_VIEW = 4  # keys, values, and scratch tensors of a rule


class PolicyEvictor:
    """Applies the policies of requests to the lanes of a KV memory.

    Args:
        kv: page tables and pages.
        rules: rules that requests may use.
        scratch_bytes: bound on the keys and values that are gathered for a policy at a time; sets
            how many layers a view holds, at least one.
        rotations: RoPE of queries by RoPE scaling variant; None if the model does not provide it.
        offloaded: loads offloaded pages layer by layer; None without KV offload.
    """

    def __init__(
        self,
        kv: PagedKV,
        rules: EvictionRules,
        scratch_bytes: int,
        rotations: Callable[[int], Rotation | None],
        offloaded: LayerLoads | None = None,
    ) -> None:
        table = evicting_table(kv.memory)
        assert table is not None, "only built for pools whose lanes evict"
        self._kv, self._rules, self._table = kv, rules, table
        self._scratch_bytes, self._rotations = scratch_bytes, rotations
        self._promotion = _promotion_of(kv, table.group.name)
        self._offloaded = offloaded

    def evict(
        self, request: Request, keep: Slots, *, least_gain: int | None = None
    ) -> Evicted | None:
        """Evict tokens from a request's lanes; see `quire.scheduler.lane_capacities.Evictor`.

        Raises:
            PolicyError: the policy broke its contract.
            OutOfPages: no free pages for private copies of shared pages; nothing was changed.
        """
        eviction, done = _eviction_of(request), request.progress.num_computed
        layers = self._offloaded_layers(request)
        parts = [self._select(request, eviction, keep, part) for part in self._parts(request)]
        mask = _stacked([part.stored_mask for part in parts])
        if layers is not None:
            self._require_layers(layers, request, mask, parts)
            self._compact_by_layer(layers, request, mask, parts)
            return Evicted(
                (entry := self._entry(eviction, keep, done, parts)).num_slots,
                self._table.group.num_lanes,
                entry,
            )
        plan = self._plan(request, mask, parts)
        if least_gain is not None and plan.gain_bytes < least_gain:
            return None
        entry = self._entry(eviction, keep, done, parts)
        self._commit(request, plan, parts)
        self._store_promoted(request.memory.row, parts)
        return Evicted(entry.num_slots, self._table.group.num_lanes, entry)

    def repeat(self, request: Request, entry: EvictionEntry) -> None:
        """Evict the tokens of a recorded entry again."""
        layers = self._offloaded_layers(request)
        if layers is not None:
            mask, retained = self._repeated_mask(request, entry)
            parts = self._select_again(request, entry, retained)
            self._require_layers(layers, request, mask, parts)
            self._compact_by_layer(layers, request, mask, parts)
            return
        reader = self._reader(request, range(len(self._table.group.layers)))
        heads = self._table.group.page_class.heads
        retained = entry.retained(reader.lane_positions)
        mask = reader.unsort(torch.from_numpy(retained).repeat_interleave(heads, dim=0))
        parts = self._select_again(request, entry, retained)
        self._commit(request, self._plan(request, mask, parts), parts)
        if entry.promoted is not None:
            assert self._promotion is not None, "promoted in a memory with records"
            positions = reader.lane_positions
            promoted = (positions >= 0) & ~entry.promoted.retained(positions)
            self._promotion.put(reader, request.memory.row, retained, promoted)

    def _plan(
        self, request: Request, mask: NDArray[np.bool_], parts: "Sequence[_Selected]"
    ) -> CompactionPlan:
        merged = [part.stored_merged for part in parts]
        return plan_compaction(
            self._kv.memory,
            self._table.group.name,
            request.memory.row,
            mask,
            _kind_of(_eviction_of(request)),
            written=_stacked(merged) if any(marks.any() for marks in merged) else None,
        )

    def _commit(self, request: Request, plan: CompactionPlan, parts: "Sequence[_Selected]") -> None:
        """Store statistics, compact the lanes, then overwrite merged values."""
        require_private_copies(self._kv.memory, plan)
        for part in parts:
            part.store_statistics()
        commit_compaction(self._kv.memory, plan)
        for part in parts:
            if part.merged is not None:
                part.overwrite(self._reader(request, part.layers))

    def _select_again(
        self, request: Request, entry: EvictionEntry, retained: NDArray[np.bool_]
    ) -> "list[_Selected]":
        """Run the rule of a recorded eviction again, for the data that it returns."""
        if entry.wanted is None:
            return []
        eviction, keep = _eviction_of(request), entry.wanted.astype(np.int64)
        found, first = [], 0
        for layers in self._parts(request):
            part = self._select(request, eviction, keep, layers)
            of_part = retained[first : first + len(part.kept), : part.kept.shape[1]]
            found.append(replace(part, kept=of_part))
            first += len(part.kept)
        return found

    def finalize(self, request: Request) -> None:
        """Divide the cap of a request after its prefill."""
        eviction = _eviction_of(request)
        reader = self._reader(request, range(len(self._table.group.layers)))
        view = self._view(request, reader)
        rule = self._rules.rule(request.spec.evict)
        with _named(eviction):
            final = rule.finalize(eviction, view, self._rules.lanes_of(rule))
        request.eviction.selection, request.eviction.spec = final, final.spec

    def _entry(
        self, eviction: Eviction, keep: Slots, done: int, parts: "Sequence[_Selected]"
    ) -> EvictionEntry:
        entry = EvictionEntry.joined(done, [part.entry for part in parts])
        return replace(entry, wanted=keep.astype(np.int32)) if _selects_again(eviction) else entry

    # ---- offloaded lanes -----------------------------------------------------------------------

    def _offloaded_layers(self, request: Request) -> LayerLoads | None:
        """Loads the offloaded pages of a request layer by layer; None if all are in the arena.

        Raises:
            OutOfPages: promoted tokens are written for all layers together.
        """
        name = self._table.group.name
        if self._offloaded is None or not self._offloaded.is_offloaded(request.memory.row, name):
            return None
        if self._promotion is not None:
            raise OutOfPages("promoted tokens need all pages of a request in the arena")
        return self._offloaded

    def _retained_pages(self, mask: NDArray[np.bool_], eviction: Eviction) -> NDArray[np.bool_]:
        """Pages [lanes, columns] that hold retained slots after a compaction."""
        tokens = self._table.group.page_class.tokens
        columns = -(-mask.shape[1] // tokens)
        if _kind_of(eviction) is Kind.DROP_PAGES:
            padded = np.zeros((len(mask), columns * tokens), dtype=bool)
            padded[:, : mask.shape[1]] = mask
            return np.asarray(padded.reshape(len(mask), columns, tokens).any(axis=2))
        return np.asarray(np.arange(columns) < -(-mask.sum(axis=1) // tokens)[:, None])

    def _require_layers(
        self,
        layers: LayerLoads,
        request: Request,
        mask: NDArray[np.bool_],
        parts: "Sequence[_Selected]",
    ) -> None:
        """Refuse an eviction layer by layer that lacks pages, before anything is changed.

        Raises:
            OutOfPages: too few free pages, or values are merged, which needs all layers.
        """
        if any(part.merged is not None for part in parts):
            raise OutOfPages("merged values need all pages of a request in the arena")
        kept = self._retained_pages(mask, _eviction_of(request))
        layers.require_pages(request.memory.row, self._table.group.name, kept)

    def _compact_by_layer(
        self,
        layers: LayerLoads,
        request: Request,
        mask: NDArray[np.bool_],
        parts: "Sequence[_Selected]",
    ) -> None:
        """Store statistics, then settle each layer and cut it before the next one is settled."""
        memory, group, row = self._kv.memory, self._table.group, request.memory.row
        eviction, per_layer = _eviction_of(request), group.lanes_per_layer
        kept, kind = self._retained_pages(mask, eviction), _kind_of(eviction)
        for part in parts:
            part.store_statistics()
        for index in range(len(group.layers)):
            lanes = slice(index * per_layer, (index + 1) * per_layer)
            layers.settle(row, group.name, index, kept)
            slots = int(self._table.num_slots[row].max())
            keep = np.ones((group.num_lanes, slots), dtype=bool)
            keep[lanes] = False
            keep[lanes, : mask.shape[1]] = mask[lanes, :slots]
            plan = plan_compaction(memory, group.name, row, keep, kind, in_place=False)
            commit_compaction(memory, plan)
        layers.forget(row, group.name)

    def _repeated_mask(
        self, request: Request, entry: EvictionEntry
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Slots [lanes, slots] that a recorded entry retains, in storage order and by position."""
        readers = [self._reader(request, part) for part in self._parts(request)]
        widest = max(reader.lane_positions.shape[1] for reader in readers)
        positions = np.concatenate(
            [
                np.pad(
                    p := reader.lane_positions,
                    ((0, 0), (0, widest - p.shape[1])),
                    constant_values=-1,
                )
                for reader in readers
            ]
        )
        retained, heads = entry.retained(positions), self._table.group.page_class.heads
        mask = _stacked(
            [
                reader.unsort(
                    torch.from_numpy(
                        retained[reader.lanes, : reader.lane_positions.shape[1]]
                    ).repeat_interleave(heads, dim=0)
                )
                for reader in readers
            ]
        )
        return mask, retained

    # ---- views ---------------------------------------------------------------------------------

    def _parts(self, request: Request) -> Iterator[range]:
        """Yield ranges of layers to process together."""
        group, page_class = self._table.group, self._table.group.page_class
        slots = int(self._table.num_slots[request.memory.row].max())
        numbers = _TENSORS_OF_A_VIEW * page_class.head_dim * page_class.heads * slots
        layer_bytes = FLOAT_BYTES * numbers * group.lanes_per_layer
        together = max(1, self._scratch_bytes // max(1, layer_bytes))
        if self._offloaded is not None and self._offloaded.is_offloaded(
            request.memory.row, group.name
        ):
            together = 1
        for start in range(0, len(group.layers), together):
            yield range(start, min(start + together, len(group.layers)))

    def _reader(self, request: Request, layers: range) -> LaneReader:
        if self._offloaded is not None:
            self._offloaded.read(request.memory.row, self._table.group.name, layers)
        return LaneReader(self._kv, self._table.group.name, request.memory.row, layers)

    def _view(self, request: Request, reader: LaneReader) -> KVView:
        return KVView(
            reader.positions,
            request.progress.num_computed,
            heads_per_layer=reader.heads_per_layer,
            layers=reader.layers,
            prompt_tokens=len(request.prompt_token_ids),
            statistics=reader.statistics,
            slots=reader,
            head_dim=self._table.group.page_class.head_dim,
            scale=self._kv.scale,
            rotation=self._rotations(request.spec.rope_variant),
            group=self._rules.query_group,
        )

    # ---- selection -----------------------------------------------------------------------------

    def _select(
        self, request: Request, eviction: Eviction, keep: Slots, layers: range
    ) -> "_Selected":
        """Select the slots to retain in some layers."""
        reader = self._reader(request, layers)
        view, group = self._view(request, reader), self._table.group
        per_layer, heads = group.lanes_per_layer, group.page_class.heads
        of_part = keep[layers.start * per_layer : layers.stop * per_layer]
        wanted = torch.from_numpy(np.repeat(of_part, heads)).to(view.positions.device)
        with _named(eviction):
            decision = eviction.decide(view, wanted)
            mask = _checked(decision.retained, eviction, view, wanted) & view.live
        stored_mask = reader.unsort(mask)
        kept = mask[::heads].cpu().numpy()
        # not the view's positions, which a rule may have overwritten
        done, positions = request.progress.num_computed, reader.lane_positions
        entry = EvictionEntry.of(done, positions, kept)
        promoted = None
        if self._promotion is not None:
            with _named(eviction):
                promoted = self._promotion.choose(eviction, view, reader, kept, done)
            entry = replace(entry, promoted=promoted_entry(done, positions, promoted))
        merged = decision.merged
        if merged is not None:  # a rule may only change what it retains
            merged = MergedValues(merged.slots & mask, merged.values[mask[merged.slots]])
        return _Selected(
            layers, stored_mask, entry, reader, decision.statistics, kept, promoted, merged
        )

    def _store_promoted(self, row: int, parts: "Sequence[_Selected]") -> None:
        """Write the promoted tokens to records of a finer codec."""
        for part in parts:
            if self._promotion is not None and part.promoted is not None:
                self._promotion.put(part.reader, row, part.kept, part.promoted)


@dataclass(frozen=True, slots=True)
class _Selected:
    """Result of an eviction decision for some layers.

    Attributes:
        layers: indices of the layers in the lane group.
        stored_mask: [lanes, slots] True for each retained slot, in storage order.
        entry: the evicted tokens.
        reader: reader of the layers.
        statistics: values to store before slots move.
        kept: [lanes, slots] retained slots, in the order of positions.
        promoted: [lanes, slots] slots that get a record in a finer codec, in the order of
            positions; None without promotion.
        merged: new values of retained slots; None for none.
    """

    layers: range
    stored_mask: NDArray[np.bool_]
    entry: EvictionEntry
    reader: LaneReader
    statistics: Mapping[Statistic, Tensor]
    kept: NDArray[np.bool_]
    promoted: NDArray[np.bool_] | None
    merged: MergedValues | None

    @property
    def stored_merged(self) -> NDArray[np.bool_]:
        """[lanes, slots] True for each slot with a new value, in storage order."""
        if self.merged is None:
            return np.zeros_like(self.stored_mask)
        return self.reader.unsort(self.merged.slots)

    def overwrite(self, compacted: LaneReader) -> None:
        """Write the merged values into slots that are still retained.

        Args:
            compacted: reader of the same layers, built after the eviction.
        """
        assert self.merged is not None, "only called for a rule that merges"
        heads = len(self.merged.slots) // len(self.kept)
        kept = torch.from_numpy(self.kept).to(self.merged.slots.device)
        kept = kept.repeat_interleave(heads, dim=0)
        lane, slot = (self.merged.slots & kept).nonzero(as_tuple=True)
        place = (kept.cumsum(dim=1) - 1)[lane, slot]  # its slot after the eviction, by position
        slots = torch.zeros_like(compacted.positions, dtype=torch.bool)
        slots[lane, place] = True
        compacted.overwrite_values(slots, self.merged.values[kept[self.merged.slots]])

    def store_statistics(self) -> None:
        """Store the statistics that the policy returned."""
        for statistic, numbers in self.statistics.items():
            self.reader.note(statistic, numbers)


def _promotion_of(kv: PagedKV, group: str) -> Promotion | None:
    buffer = kv.promoted.get(group)
    return None if buffer is None else Promotion(buffer, kv.full_precision[group])


def _eviction_of(request: Request) -> Eviction:
    eviction = request.eviction.selection
    assert isinstance(eviction, Eviction), "only called for requests that evict"
    return eviction


def _selects_again(eviction: Eviction) -> bool:
    """Whether a repeated eviction runs the rule again: the rule returns data to store."""
    policy = eviction.policy
    return policy is not None and (policy.writes_statistics or policy.merges_values)


def _kind_of(eviction: Eviction) -> Kind:
    if eviction.by_page:
        return Kind.DROP_PAGES
    return Kind.KEEP_ORDER if eviction.keeps_order else Kind.FILL_HOLES


@contextmanager
def _named(eviction: Eviction) -> Iterator[None]:
    """Convert any error of a policy to a PolicyError that names the request's rule."""
    try:
        yield
    except PolicyError as error:
        raise PolicyError(f"{eviction.text!r}: {error}") from error
    except Exception as error:
        name = type(eviction.policy).__name__
        said = f"policy {name} raised {type(error).__name__}: {error}"
        raise PolicyError(f"{eviction.text!r}: {said}") from error


def _checked(mask: object, eviction: Eviction, view: KVView, keep: Tensor) -> Tensor:
    """Return the mask after checking it.

    Raises:
        PolicyError: wrong type or shape, or a wrong number of slots.
    """
    name, shape = type(eviction.policy).__name__, list(view.positions.shape)
    if not isinstance(mask, Tensor):
        raise PolicyError(
            f"policy {name} must return a mask, a tensor of type torch.bool {shape}, got a "
            f"{type(mask).__name__}"
        )
    if mask.dtype != torch.bool or list(mask.shape) != shape:
        raise PolicyError(
            f"policy {name} must return a mask of type torch.bool {shape}, got {mask.dtype} "
            f"{list(mask.shape)}"
        )
    kept = (mask & view.live).sum(dim=1)
    if eviction.spec.ragged:  # heads of a layer share the number of retained slots
        kept, keep = view.by_layer(kept).sum(dim=1), view.by_layer(keep).sum(dim=1)
    wrong = kept > keep if eviction.piece_tokens > 1 else kept != keep
    if bool(wrong.any()):
        lane = int(wrong.int().argmax())
        what = "layer" if eviction.spec.ragged else "lane"
        most = "at most " if eviction.piece_tokens > 1 else ""
        raise PolicyError(
            f"policy {name} must retain {most}{int(keep[lane])} live slots in {what} {lane}, but "
            f"retained {int(kept[lane])}"
        )
    return mask


def _stacked(parts: list[NDArray[np.bool_]]) -> NDArray[np.bool_]:
    """Stack the masks of all parts' lanes, padded to the widest."""
    slots = max(part.shape[1] for part in parts)
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([np.pad(part, ((0, 0), (0, slots - part.shape[1]))) for part in parts])
