"""Executes evictions: the policy selects the slots to retain, then the lanes are compacted."""

import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import OutOfPages, PolicyError, RankFailed
from quire.eviction.decisions import (
    AllHeads,
    EvictedTokens,
    LayerPart,
    RetainedSlots,
    Selected,
    checked_mask,
    consecutive,
    evicted_positions,
    shaped_mask,
    stacked,
)
from quire.eviction.eviction_rules import EvictionRules
from quire.eviction.promotion import Promotion, promoted_entry
from quire.kernels import device_copies
from quire.kernels.backend import (
    AttentionMath,
    LaneSelector,
    SelectedSlots,
    SlotRanking,
    StoredNumbers,
)
from quire.kernels.device_copies import to_device
from quire.kv.compaction import (
    CompactionPlan,
    Kind,
    commit_compaction,
    commit_counts,
    copy_shared,
    plan_compaction,
    require_private_copies,
)
from quire.kv.lane_reader import JoinedReader, LaneReader, Moves, slot_moves
from quire.kv.paged_kv import PagedKV
from quire.kv.resealing import Resealing
from quire.kv.tables import LaneTable
from quire.layout.eviction import UNLIMITED
from quire.layout.pages import LaneGroup
from quire.parallel.group import ONE_RANK, TensorGroup
from quire.policies.base import LAYER, ScorePolicy
from quire.policies.eviction import Eviction
from quire.policies.view import KVView, Rotation
from quire.scheduler.eviction_trace import EvictionEntry
from quire.scheduler.lanes import Evicted, Evictor, Slots, evicting_lanes
from quire.scheduler.request import Request

logger = logging.getLogger(__name__)

FLOAT_BYTES = 4
_TENSORS_OF_A_VIEW = 4  # keys, values, and scratch tensors of a rule


class PolicyEvictor(Evictor):
    """Applies the policies of requests to the lanes of a KV memory.

    How many slots each lane retains is known on the CPU, and with it the pages that an eviction
    frees. Which slots matters to the device only. `evict_together` therefore evicts from all
    requests with the same rule in one pass and reads nothing from the device; the evicted positions
    and breaches of a rule's contract are read after the step. `evict` reads the selection: for
    pieces, rules that may retain fewer slots, budgets that move slots between lanes, offloaded
    pages and codecs of whole pages.

    Args:
        kv: page tables and pages.
        rules: rules that requests may use.
        scratch_bytes: bound on the keys and values that are gathered for a policy at a time; sets
            how many layers a view holds, at least one.
        math: operations of each layer of the model on its logits.
        rotations: RoPE of queries by RoPE scaling variant; None if the model does not provide it.
        ranks: the ranks that share the model.
    """

    def __init__(
        self,
        kv: PagedKV,
        rules: EvictionRules,
        scratch_bytes: int,
        math: Sequence[AttentionMath],
        rotations: Callable[[int], Rotation | None],
        ranks: TensorGroup = ONE_RANK,
    ) -> None:
        lanes = evicting_lanes(kv.memory)
        assert lanes is not None, "only built for pools whose lanes evict"
        self._kv, self._rules, self._lanes = kv, rules, lanes
        self._scratch_bytes, self._math, self._rotations = scratch_bytes, math, rotations
        self._ranks = ranks
        groups = [table.group for table in lanes.tables]
        self._promotions = {group.name: _promotion_of(kv, group.name) for group in groups}
        self._movers = {
            group.name: Resealing(kv, group.name, scratch_bytes)
            for group in groups
            if group.page_class.per_page
        }
        self._unread: list[EvictedTokens] = []  # of the last call, and of the calls before
        self._settling: list[EvictedTokens] = []

    def evict(
        self, request: Request, keep: Slots, *, min_gain: int | None = None
    ) -> Evicted | None:
        """Evict tokens from a request's lanes; see `quire.scheduler.lanes.Evictor`.

        Raises:
            PolicyError: the policy broke its contract.
            OutOfPages: no free pages for private copies of shared pages; nothing was changed.
        """
        eviction, done = _eviction_of(request), self._computed(request)
        chosen = self._parts(request, keep=keep)
        parts = [self._select(request, eviction, keep, part) for part in chosen]
        masks = {
            table.group.name: self._mask(request, table, parts) for table in self._lanes.tables
        }
        plans = self._plans(request, masks)
        if min_gain is not None and sum(plan.gain_bytes for plan in plans) < min_gain:
            return None
        entry = self._entry(eviction, keep, done, parts)
        records = [RetainedSlots(p.part.group, p.reader, p.kept, p.promoted) for p in parts]
        self._commit(plans, records)
        return Evicted(entry.num_slots, self._lanes.num_lanes, entry)

    def evict_together(self, due: Sequence[tuple[Request, Slots]]) -> list[Evicted | None]:
        found: list[Evicted | None] = [None] * len(due)
        alike: dict[object, list[int]] = {}
        for index, (request, _) in enumerate(due):
            if not self.reads_selection(request):
                held = self._lanes.held(request).tobytes()
                key = _eviction_of(request).text, request.spec.rope_variant, held
                alike.setdefault(key, []).append(index)
        for indices in alike.values():
            at_once = self._rows_at_once(due[indices[0]][0])
            for start in range(0, len(indices), at_once):
                some = indices[start : start + at_once]
                try:
                    evicted = self._evict_alike(
                        [due[i][0] for i in some], [due[i][1] for i in some]
                    )
                except (PolicyError, OutOfPages):  # each alone: the error names its request
                    logger.debug("%d requests evict alone", len(some), exc_info=True)
                    continue
                for index, one in zip(some, evicted, strict=True):
                    found[index] = one
        return found

    def reads_selection(self, request: Request) -> bool:
        eviction = _eviction_of(request)
        policy = eviction.policy
        return (
            policy is None
            or eviction.retains_fewer
            or eviction.budget.ragged
            or (self._ranks.size > 1 and not policy.lanes_apart)
            or bool(self._movers)
            or any(self._promotions.values())
            or self._kv.memory.listeners.reads_moves
            or any(self._is_offloaded(request, table.group) for table in self._lanes.tables)
        )

    def breaches(self) -> list[tuple[Request, PolicyError]]:
        found = []
        for evicted in self._settling:
            if evicted.settle():
                for request in evicted.requests:
                    text = f"{_eviction_of(request).text!r}: the policy broke its contract"
                    found.append((request, PolicyError(f"{text}; run it on a CPU for the reason")))
            evicted.requests = ()
        self._settling, self._unread = self._unread, []
        return found

    def _evict_alike(self, requests: Sequence[Request], keeps: Sequence[Slots]) -> list[Evicted]:
        """Evict from requests with the same rule and the same number of slots in each lane.

        Raises:
            PolicyError: the rule broke its contract, or it cannot score several requests; nothing
                was changed.
            OutOfPages: no pages for private copies of shared pages.
        """
        memory = self._kv.memory
        rows, keep = np.array([request.memory.row for request in requests]), np.stack(keeps)
        on_host = device_copies.reads_freely(self._kv.store.device)
        breaches: list[Tensor] | None = None if on_host else []
        cuts = []
        for part in self._parts(requests[0], rows=len(requests)):
            reader = LaneReader(self._kv, part.group.name, rows.tolist(), part.layers)
            of_part = keep[:, self._lanes_of(part)].reshape(-1)
            with _named(_eviction_of(requests[0])):
                cut = self._cut_by_kernels(requests, reader, of_part, breaches)
                cuts.append(cut or self._cut_in_torch(requests, reader, of_part, breaches))
        groups = list(zip(self._lanes.tables, self._lanes.places, strict=True))
        copied_bytes, freed_bytes = np.zeros((2, len(rows)), dtype=np.int64)
        for table, places in groups:
            if not memory.pools[table.group.page_class].num_shared:
                continue  # no page to copy
            columns = -(-keep[:, places] // table.group.page_class.tokens)
            held_after = np.arange(int(columns.max(initial=0))) < columns[:, :, None]
            # without reading the moves, every page that is kept may be written
            written = np.zeros_like(held_after) if on_host else held_after
            for cut in cuts:
                if on_host and cut.reader.table is table:
                    cut.reader.mark_pages(written, *cut.targets())
            copied_bytes += copy_shared(memory, table.group.name, rows, written)
        held = self._lanes.held(requests[0])
        for cut in cuts:
            cut.move(copied=bool(copied_bytes.any()))
        for table, places in groups:
            counts = keep[:, places].astype(np.int32)
            freed_bytes += commit_counts(memory, table.group.name, rows, counts)
        counts = (held - keep).astype(np.int32)
        positions = [(cut.gone, cut.evicted) for cut in cuts]
        evicted = EvictedTokens(requests, counts, positions, breaches or ())
        self._unread.append(evicted)
        slots, lanes = counts.sum(axis=1).tolist(), self._lanes.num_lanes
        changed = zip(freed_bytes.tolist(), copied_bytes.tolist(), strict=True)
        return [
            Evicted(slots[i], lanes, evicted.entry(i), freed - copied, copied)
            for i, (freed, copied) in enumerate(changed)
        ]

    def _cut_in_torch(
        self,
        requests: Sequence[Request],
        reader: LaneReader,
        keep: NDArray[np.int64],
        breaches: list[Tensor] | None,
    ) -> "_Cut":
        """Select the slots to retain by torch operations: the reference of `_cut_by_kernels`."""
        eviction = _eviction_of(requests[0])
        view = replace(self._view(requests, reader), breaches=breaches)
        wanted = reader.of_heads(keep)
        mask = checked_mask(eviction.select(view, wanted), eviction, view, wanted)
        kept, gone = _of_lanes(reader, view, mask), reader.held - keep
        moves = slot_moves(reader.by_slot(kept), keep, reader.held)
        return _Cut(reader, gone, evicted_positions(reader, kept, gone), moves)

    def _cut_by_kernels(
        self,
        requests: Sequence[Request],
        reader: LaneReader,
        keep: NDArray[np.int64],
        breaches: list[Tensor] | None,
    ) -> "_Cut | None":
        """Select the slots to retain in one call, after the scores that kernels do not read.

        Returns:
            None if the backend cannot.

        Raises:
            PolicyError: the rule broke its contract.
        """
        backend, eviction = self._kv.backend, _eviction_of(requests[0])
        if not isinstance(backend, LaneSelector):
            return None
        rule, page_class, gone = eviction.policy, reader.group.page_class, reader.held - keep
        ranks = rule if isinstance(rule, ScorePolicy) and rule.only_ranks else None
        if ranks is not None and page_class.heads > 1 and ranks.scope != LAYER:
            ranks = None  # whether its heads retain the same tokens is seen in its mask
        stored = None if ranks is None else ranks.read_by_kernels
        place = None
        if ranks is not None and stored is not None and stored.statistic is not None:
            place = reader.numbers_of(stored.statistic)
            if place is None or (ranks.scope == LAYER and reader.heads_per_layer > 1):
                stored = None  # the mean over the heads of a layer decides
            elif stored.per_query and place.readers > 1:
                stored = None  # kernels count one query a token
        sinks, newest = (0, 0) if ranks is None else ranks.protected_ends(keep)
        each = len(keep) // len(requests)
        next_position = np.repeat([self._computed(one) for one in requests], each)
        numbers = [keep, np.broadcast_to(newest, keep.shape), next_position]
        (wanted, newest_of, after), pages = reader.upload(numbers)
        ranking = SlotRanking(
            wanted,
            int(np.minimum(keep, gone).max(initial=0)),
            int(gone.max(initial=0)),
            sinks=sinks,
            newest=newest_of,
        )
        if stored is None:
            view = replace(self._view(requests, reader), breaches=breaches)
            ranking = _ranked(ranking, ranks, eviction, view, reader, keep)
        elif place is not None:
            own = pages[reader.tables.index(place.table)]
            of_queries = after if stored.per_query else None
            ranking = replace(ranking, numbers=StoredNumbers(place.numbers, own, of_queries))
        selected = backend.select_lanes(reader.held_lanes, ranking)
        if selected is None:
            return None
        if breaches is None and selected.evicted.numpy()[:, 0].any():
            raise PolicyError("the rule broke its contract")  # alone, it says how
        return _Cut(reader, gone, selected.evicted, selected, pages)

    def repeat(self, request: Request, entry: EvictionEntry) -> None:
        """Evict the tokens of a recorded entry again."""
        if any(self._is_offloaded(request, table.group) for table in self._lanes.tables):
            masks = self._repeated_by_layer(request, entry)
            self._commit(self._plans(request, masks), [])
            return
        repeated = [
            self._repeated(request, table.group, entry.of_lanes(places))
            for table, places in zip(self._lanes.tables, self._lanes.places, strict=True)
        ]
        masks = {}
        for one in repeated:
            heads = one.group.page_class.heads
            by_head = torch.from_numpy(one.retained).repeat_interleave(heads, dim=0)
            masks[one.group.name] = one.reader.unsort(by_head)
        self._commit(self._plans(request, masks), repeated)

    def _mask(
        self, request: Request, table: LaneTable, parts: Sequence[Selected]
    ) -> NDArray[np.bool_]:
        """The retained slots [lanes, slots] of a group: all slots of layers that are in no part."""
        own = [part for part in parts if part.is_of(table.group)]
        if sum(len(part.part.layers) for part in own) == len(table.group.layers):
            return stacked([part.stored_mask for part in own])
        slots = int(table.num_slots[request.memory.row].max())
        mask = np.ones((table.group.num_lanes, slots), dtype=bool)
        for part in own:
            layers, per_layer = part.part.layers, table.group.lanes_per_layer
            of_part = mask[layers.start * per_layer : layers.stop * per_layer]
            of_part[:] = False
            of_part[:, : part.stored_mask.shape[1]] = part.stored_mask[:, :slots]
        return mask

    def _plans(
        self, request: Request, masks: Mapping[str, NDArray[np.bool_]]
    ) -> list[CompactionPlan]:
        """Plan the compaction of each lane group.

        Args:
            request: a running request.
            masks: retained slots of each group, in storage order.
        """
        kind, row = _kind_of(_eviction_of(request)), request.memory.row
        return [
            plan_compaction(self._kv.memory, name, row, masks[name], kind)
            for name in (table.group.name for table in self._lanes.tables)
        ]

    def _commit(self, plans: Sequence[CompactionPlan], records: Sequence[RetainedSlots]) -> None:
        """Store records, then compact the lanes."""
        require_private_copies(self._kv.memory, *plans)
        for one in records:
            promotion = self._promotions[one.group.name]
            if promotion is not None and one.promoted is not None:
                promotion.put(one.reader, one.retained, one.promoted)
        commit_compaction(self._kv.memory, *plans, movers=self._movers)

    def _repeated(self, request: Request, group: LaneGroup, entry: EvictionEntry) -> RetainedSlots:
        """Return the slots of a lane group that a recorded entry retains and promotes."""
        reader = self._reader(request, LayerPart(group, range(len(group.layers))))
        positions = reader.lane_positions
        retained, promoted = entry.retained(positions), None
        if entry.promoted is not None:
            promoted = (positions >= 0) & ~entry.promoted.retained(positions)
        return RetainedSlots(group, reader, retained, promoted)

    def finalize(self, request: Request) -> None:
        """Divide the cap of a request after its prefill."""
        eviction = _eviction_of(request)
        parts = self._parts(request, UNLIMITED)
        view = self._view([request], JoinedReader([self._reader(request, part) for part in parts]))
        view = AllHeads(self._ranks, len(view.layers)).view(view)
        rule = self._rules.rule(request.spec.evict)
        with _named(eviction):
            final = rule.finalize(eviction, view, self._rules.lanes_of(rule))
        if final is not eviction:
            final = self._rules.of_rank(final)
        request.eviction.selection, request.eviction.spec = final, final.spec

    def _entry(
        self, eviction: Eviction, keep: Slots, done: int, parts: Sequence[Selected]
    ) -> EvictionEntry:
        entry = EvictionEntry.joined(done, [part.entry for part in parts])
        if (keep < 0).any():
            counts = np.zeros(len(keep), dtype=np.int32)
            counts[keep >= 0] = entry.counts
            entry = replace(entry, counts=counts)
        return entry

    # ---- offloaded lanes -----------------------------------------------------------------------

    def _is_offloaded(self, request: Request, group: LaneGroup) -> bool:
        return bool(self._kv.memory.tables[group.name].staged[request.memory.row])

    def _repeated_by_layer(
        self, request: Request, entry: EvictionEntry
    ) -> dict[str, NDArray[np.bool_]]:
        """Slots [lanes, slots] that a recorded entry retains by group, in storage order.

        The positions of a layer are in its staging pages until the next layer is read.
        """
        masks = {}
        for table, places in zip(self._lanes.tables, self._lanes.places, strict=True):
            name, of_group = table.group.name, entry.of_lanes(places)
            parts = [part for part in self._parts(request) if part.group.name == name]
            readers, positions = list[LaneReader](), list[NDArray[np.int32]]()
            for part in parts:
                readers.append(self._reader(request, part))
                positions.append(readers[-1].lane_positions)
            width = max(found.shape[1] for found in positions)
            padded = [
                np.pad(p, ((0, 0), (0, width - p.shape[1])), constant_values=-1) for p in positions
            ]
            retained, found = of_group.retained(np.concatenate(padded)), []
            for reader, own in zip(readers, positions, strict=True):
                by_lane = torch.from_numpy(retained[reader.lanes, : own.shape[1]])
                by_head = by_lane.repeat_interleave(table.group.page_class.heads, dim=0)
                found.append(reader.unsort(by_head))
            masks[name] = stacked(found)
        return masks

    # ---- views ---------------------------------------------------------------------------------

    def _parts(
        self,
        request: Request,
        scratch_bytes: int | None = None,
        keep: Slots | None = None,
        *,
        rows: int = 1,
    ) -> list[LayerPart]:
        """Return the layers to process together, in the order of the model's layers.

        Args:
            request: a running request.
            scratch_bytes: bound on the bytes of a part; None for the evictor's bound.
            keep: see `evict`; layers whose lanes remain as they are are left out. None: none are.
            rows: number of requests with as many slots that are processed together.
        """
        bounded = scratch_bytes is None
        scratch_bytes = self._scratch_bytes if scratch_bytes is None else scratch_bytes
        found = []
        for table in self._lanes.tables:
            group = table.group
            layer_bytes = rows * self._layer_bytes(request, table)
            together = max(1, scratch_bytes // max(1, layer_bytes))
            if bounded and self._is_offloaded(request, group):
                together = 1
            for run in consecutive(group, self._lanes.layers):
                if keep is not None:
                    run = self._changing(group, run, keep)
                found += [
                    LayerPart(group, range(start, min(start + together, run.stop)))
                    for start in range(run.start, run.stop, together)
                ]
        return sorted(found, key=lambda part: part.first_layer)

    def _changing(self, group: LaneGroup, run: range, keep: Slots) -> range:
        """The layers of a run whose lanes do not remain as they are; they are consecutive."""
        first = [self._lanes.of_layer(group.layers[index]).start for index in run]
        changing = [index for index, lane in zip(run, first, strict=True) if keep[lane] >= 0]
        return range(changing[0], changing[-1] + 1) if changing else range(0)

    def _computed(self, request: Request) -> int:
        """Computed tokens; in a step that computes layer by layer, all those of the step."""
        return int(self._kv.memory.lengths[request.memory.row])

    def _layer_bytes(self, request: Request, table: LaneTable) -> int:
        """Scratch bytes of a view of one layer of a request."""
        page_class, policy = table.group.page_class, _eviction_of(request).policy
        slots = int(table.num_slots[request.memory.row].max())
        width = max(page_class.query_dim, page_class.value_dim)
        width = width if policy is None or policy.reads_vectors else 1
        biased = self._math[table.group.layers[0]].alibi is not None
        if policy is not None and policy.scores_in_pages and not biased:
            scored = self._kv.scoring(table.group, policy.scores_in_pages)
            width = width if scored is None else self._rules.query_group(table.group)
        numbers = _TENSORS_OF_A_VIEW * width * page_class.heads * slots
        return FLOAT_BYTES * numbers * table.group.lanes_per_layer * self._ranks.size

    def _rows_at_once(self, request: Request) -> int:
        """Requests like this one that are processed together."""
        layer_bytes = max(self._layer_bytes(request, table) for table in self._lanes.tables)
        return max(1, self._scratch_bytes // max(1, layer_bytes))

    def _lanes_of(self, part: LayerPart) -> slice:
        """The part's lanes among the lanes of all layers."""
        first = self._lanes.layers.index(part.first_layer) * part.group.lanes_per_layer
        return slice(first, first + len(part.layers) * part.group.lanes_per_layer)

    def _reader(self, request: Request, part: LayerPart) -> LaneReader:
        if self._kv.memory.offloaded is not None:
            self._kv.memory.offloaded.read(request.memory.row, part.group.name, part.layers)
        reader = LaneReader(self._kv, part.group.name, request.memory.row, part.layers)
        _ = reader.order  # before staging pages get the next layer
        return reader

    def _view(self, requests: Sequence[Request], reader: LaneReader | JoinedReader) -> KVView:
        request, positions = requests[0], reader.positions

        def of_lanes(numbers: list[int]) -> int | Tensor:
            if len(set(numbers)) == 1:
                return numbers[0]
            each = np.repeat(np.array(numbers), len(positions) // len(numbers))
            return to_device(each[:, None], positions.device)

        return KVView(
            positions,
            of_lanes([self._computed(one) for one in requests]),
            heads_per_layer=reader.heads_per_layer,
            layers=reader.layers,
            prompt_tokens=of_lanes([len(one.prompt_token_ids) for one in requests]),
            statistics=reader.statistics,
            slots=reader,
            head_dim=reader.group.page_class.query_dim,
            layer_scales=tuple(self._math[layer].scale for layer in reader.layers),
            alibi=self._math[reader.layers[0]].alibi,
            rotation=self._rotations(request.spec.rope_variant),
            projection=self._rules.projection,
            group=self._rules.query_group(reader.group),
            readers=reader.readers,
        )

    # ---- selection -----------------------------------------------------------------------------

    def _select(
        self, request: Request, eviction: Eviction, keep: Slots, part: LayerPart
    ) -> Selected:
        """Select the slots to retain in some layers."""
        reader, group = self._reader(request, part), part.group
        view, heads = self._view([request], reader), group.page_class.heads
        wanted = reader.of_heads(keep[self._lanes_of(part)])
        apart = eviction.policy is not None and eviction.policy.lanes_apart
        all_heads = AllHeads(ONE_RANK if apart else self._ranks, len(part.layers))
        with _named(eviction):
            seen, wanted = all_heads.view(view), all_heads.joined(wanted)
            selected = eviction.select(seen, wanted)
            mask = all_heads.own_part(checked_mask(selected, eviction, seen, wanted))
        stored_mask = reader.unsort(mask)
        kept = mask[::heads].cpu().numpy()
        # not the view's positions, which a rule may have overwritten
        done, positions = self._computed(request), reader.lane_positions
        entry = EvictionEntry.of(done, positions, kept)
        promotion, promoted = self._promotions[group.name], None
        if promotion is not None:
            with _named(eviction):
                promoted = promotion.choose(eviction, view, reader, kept, done)
        if any(self._promotions.values()):  # the entry of a part without records has no tokens
            chosen = np.zeros_like(kept) if promoted is None else promoted
            entry = replace(entry, promoted=promoted_entry(done, positions, chosen))
        return Selected(part, stored_mask, entry, reader, kept, promoted)


@dataclass(frozen=True, slots=True)
class _Cut:
    """What an eviction from several requests does to some layers.

    Attributes:
        reader: reader of the layers.
        gone: [lane] number of evicted slots.
        evicted: their positions; see `EvictedTokens`.
        moves: of the slots that stay.
        pages: page tables of the lanes on the device, of the KV and of each statistic; none if
            torch makes the moves.
    """

    reader: LaneReader
    gone: NDArray[np.int64]
    evicted: Tensor
    moves: Moves | SelectedSlots
    pages: Sequence[Tensor] = ()

    def targets(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Lanes and target slots of the moves, on a CPU."""
        if not isinstance(self.moves, SelectedSlots):
            return self.moves[0].numpy(), self.moves[2].numpy()
        targets, counts = self.moves.moves[:, 1].numpy(), self.evicted[:, 1].numpy()
        lane, move = np.nonzero(np.arange(targets.shape[1]) < counts[:, None])
        return lane, targets[lane, move].astype(np.int64)

    def move(self, *, copied: bool) -> None:
        """Move the slots.

        Args:
            copied: whether shared pages were copied since the selection.
        """
        if not isinstance(self.moves, SelectedSlots):
            self.reader.move(self.moves)
            return
        pages = self.reader.upload([])[1] if copied else self.pages
        self.reader.move_selected(self.moves, pages)


def _ranked(
    ranking: SlotRanking,
    ranks: ScorePolicy | None,
    eviction: Eviction,
    view: KVView,
    reader: LaneReader,
    keep: NDArray[np.int64],
) -> SlotRanking:
    """Add what a rule computes from a view: its scores, or the slots that it retains.

    Args:
        ranking: without scores.
        ranks: the rule if it only ranks slots.
        eviction: the rule of the requests.
        view: the lanes of the reader.
        reader: reader of the layers.
        keep: [lane] slots to retain.
    """
    wanted = reader.of_heads(keep)
    if ranks is None:
        mask = shaped_mask(eviction.select(view, wanted), eviction, view)
        return replace(ranking, score=_of_lanes(reader, view, mask))
    ranking = replace(ranking, score=ranks.mean_score(view))
    if ranks.protects_ends:
        return ranking
    protected = ranks.shaped_protected(view, wanted)
    return replace(ranking, protected=_of_lanes(reader, view, protected))


def _of_lanes(reader: LaneReader, view: KVView, marks: Tensor) -> Bool[Tensor, "lane slot"]:
    """Marks of the table's lanes, whose heads must have the same ones."""
    if reader.group.page_class.heads == 1:
        return marks.contiguous()
    by_lane = reader.by_table_lane(marks)
    if view.breaks_contract(by_lane != by_lane[:, :1]):
        raise PolicyError(reader.heads_differ)
    return by_lane[:, 0].contiguous()


def _promotion_of(kv: PagedKV, group: str) -> Promotion | None:
    buffer = kv.promoted.get(group)
    return None if buffer is None else Promotion(buffer, kv.full_precision[group])


def _eviction_of(request: Request) -> Eviction:
    eviction = request.eviction.selection
    assert isinstance(eviction, Eviction), "only called for requests that evict"
    return eviction


def _kind_of(eviction: Eviction) -> Kind:
    if eviction.by_page:
        return Kind.DROP_PAGES
    return Kind.KEEP_ORDER if eviction.keeps_order else Kind.FILL_HOLES


@contextmanager
def _named(eviction: Eviction) -> Iterator[None]:
    """Convert any error of a policy to a PolicyError that names the request's rule."""
    try:
        yield
    except RankFailed:
        raise
    except PolicyError as error:
        raise PolicyError(f"{eviction.text!r}: {error}") from error
    except Exception as error:
        name = type(eviction.policy).__name__
        said = f"policy {name} raised {type(error).__name__}: {error} ({_place(eviction, error)})"
        logger.debug("%r: policy %s raised an error", eviction.text, name, exc_info=True)
        raise PolicyError(f"{eviction.text!r}: {said}") from error


def _place(eviction: Eviction, error: Exception) -> str:
    """File and line of the error: of the innermost frame in the file of the rule if it has one."""
    own = getattr(sys.modules.get(type(eviction.policy).__module__), "__file__", None)
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if frame.filename == own), frames[-1])
    return f"{Path(frame.filename).name}, line {frame.lineno}"
