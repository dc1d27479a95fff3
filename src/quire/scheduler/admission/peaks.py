"""Peak page counts of requests, and whether the KV memory can ever hold them."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from quire.kv.memory import KVMemory
from quire.layout.evicting import evicting_layers
from quire.layout.eviction import KEEP_ALL, PRESSURE, EvictionSpec
from quire.layout.layout import can_be_offloaded, statistics_used
from quire.layout.pages import CacheLayout, LaneGroup, PageClass
from quire.layout.statistics import Statistic
from quire.scheduler.admission.lane_peaks import UNBOUNDED, LaneOffload, evicting_pages
from quire.scheduler.admission.need import (
    Need,
    NeedGroup,
    StepShape,
    group_needs,
    need_of,
    step_shapes,
)
from quire.scheduler.admission.offload_split import OffloadSplit
from quire.scheduler.group import num_rows
from quire.scheduler.request import Request

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Classes:
    """The page classes of a layout.

    Attributes:
        layout: the layout.
        page_classes: its page classes.
        index: their indices.
        page_bytes: [page classes] bytes of a page.
        evicting_layers: layers whose lanes evict tokens.
        cuts_by_layer: whether offloaded lanes are loaded and cut layer by layer for an eviction;
            else all pages must be in the arena.
        used: lane groups that sequences with given statistics use; filled on demand.
    """

    layout: CacheLayout
    page_classes: tuple[PageClass, ...]
    index: Mapping[PageClass, int]
    page_bytes: NDArray[np.int64]
    evicting_layers: tuple[int, ...]
    cuts_by_layer: bool
    used: dict[tuple[Statistic, ...], list[LaneGroup]]

    @classmethod
    def of(cls, layout: CacheLayout) -> "_Classes":
        classes = layout.page_classes
        page_bytes = np.array([c.page_bytes for c in classes], dtype=np.int64)
        index = {c: i for i, c in enumerate(classes)}
        layers, by_layer = evicting_layers(layout), _cuts_by_layer(layout)
        return cls(layout, classes, index, page_bytes, layers, by_layer, {})


def _cuts_by_layer(layout: CacheLayout) -> bool:
    """Whether an eviction can cut one layer after the other.

    Promoted tokens are written, and pages with common scales encoded again, for all layers
    together; so are the lanes of several groups.
    """
    movable = [g for g in layout.groups if g.fixed_slots is None and g.mirrors is None]
    movable = [group for group in movable if not group.ordered]
    if any(group.promoted is not None for group in layout.groups) or len(movable) > 1:
        return False
    return not any(group.page_class.per_page for group in movable)


class Peaks:
    """Page arithmetic: peak pages of sequences, computed for many at once.

    Args:
        memory: the KV memory.
        chunk_tokens: largest prefill chunk of a request that evicts no tokens.
        offloaded_tokens: most tokens of one sequence in offload memory; 0 without KV offload.
        offload_bytes: size of the offload memory, activations included; 0 without KV offload.
        pages_in_flight: pages that are allocated for a request but not in its page table yet.

    Attributes:
        memory: see above.
        offloaded_tokens: see above.
        offload_bytes: see above.
    """

    def __init__(
        self,
        memory: KVMemory,
        chunk_tokens: int,
        *,
        offloaded_tokens: int = 0,
        offload_bytes: int = 0,
        pages_in_flight: Callable[[Request], Mapping[PageClass, int]] | None = None,
    ) -> None:
        self.memory = memory
        self._shapes = step_shapes(chunk_tokens)
        self._windows = any(group.window is not None for group in memory.layout.groups)
        self._classes = _Classes.of(memory.layout)
        self.offloaded_tokens, self.offload_bytes = offloaded_tokens, offload_bytes
        self._pages_in_flight = pages_in_flight or (lambda request: {})

    @property
    def page_classes(self) -> tuple[PageClass, ...]:
        """The last axis of every array of counts."""
        return self._now.page_classes

    @property
    def _index(self) -> Mapping[PageClass, int]:
        return self._now.index

    @property
    def _now(self) -> "_Classes":
        """The page classes of the layout, which requests with other statistics extend."""
        if self._classes.layout is not self.memory.layout:
            self._classes = _Classes.of(self.memory.layout)
        return self._classes

    def counts(self, needs: Sequence[Need]) -> Counts:
        """Pages [sequences, page classes] that sequences hold at their peaks.

        A sequence that fits only with a smaller step shape is counted with that shape.
        """
        counts = self._counts(needs, self._shapes[0])
        for shape in self._shapes[1:]:
            too_large = np.flatnonzero(self._shrinkable(needs) & ~self._fit(counts)).tolist()
            if not too_large:
                break
            counts[too_large] = self._counts([needs[i] for i in too_large], shape)
        return counts

    def _counts(self, needs: Sequence[Need], shape: StepShape) -> Counts:
        counts = np.zeros((len(needs), len(self.page_classes)), dtype=np.int64)
        for sequences in group_needs(needs):
            for group in self._groups_of(sequences.eviction):
                column = self._index[group.page_class]
                counts[sequences.index, column] += self._group_pages(group, sequences, shape)
        return counts

    def _shrinkable(self, needs: Sequence[Need]) -> NDArray[np.bool_]:
        """Whether each sequence holds fewer pages with smaller steps."""
        if self._windows:
            return np.ones(len(needs), dtype=bool)
        return np.array(
            [need.may_offload and self.offloaded_tokens > 0 for need in needs], dtype=bool
        )

    def _groups_of(self, eviction: EvictionSpec) -> list[LaneGroup]:
        """The lane groups that sequences use: all except statistics that they do not record."""
        used = self._now.used
        if eviction.statistics not in used:
            layout = self.memory.layout
            names = statistics_used(layout, eviction.statistics)
            used[eviction.statistics] = [
                g
                for g in layout.groups
                if g.name in names or (g.mirrors is None and g.fixed_slots is None)
            ]
        return used[eviction.statistics]

    def _group_pages(self, group: LaneGroup, sequences: NeedGroup, shape: StepShape) -> Counts:
        eviction = sequences.eviction
        if group.fixed_slots is None and not group.ordered:
            offload = self._offload(sequences, group, shape)
            layers = self._now.evicting_layers
            return evicting_pages(group, sequences, layers, offload)
        slots, chunk = sequences.tokens, shape.chunk_tokens
        if group.fixed_slots is not None:
            slots = np.minimum(slots, 1) * group.fixed_slots
        if eviction.cap is not None:  # above the cap a prompt is computed `every` tokens at once
            chunk = max(chunk, eviction.every)
        most = group.slots_at_most(UNBOUNDED, chunk)
        pages: Counts = -(-np.minimum(slots, most) // group.page_class.tokens)
        if self._offload(sequences, group, shape) is not None:
            return self._resident_pages(group, pages, shape)
        return pages * group.num_lanes

    def offloads(self, need: Need | NeedGroup) -> bool:
        """Whether the oldest pages of sequences can be in offload memory at their peak."""
        evicts_by_layer = need.eviction.cap is None or self._now.cuts_by_layer
        return bool(need.may_offload and self.offloaded_tokens and evicts_by_layer)

    def _offload(
        self, sequences: NeedGroup, group: LaneGroup, shape: StepShape
    ) -> LaneOffload | None:
        """Offload of the oldest pages of a group's lanes; None if they stay in the arena."""
        if not (self.offloads(sequences) and can_be_offloaded(group)):
            return None
        page_tokens = group.page_class.tokens
        rest = group.page_class.pages_for(page_tokens - 1 + shape.chunk_tokens)
        return LaneOffload(self.offloaded_tokens // page_tokens, rest, shape.staging_slots)

    def _resident_pages(self, group: LaneGroup, pages: Counts, shape: StepShape) -> Counts:
        """Pages in the arena, staging included, when the oldest pages are offloaded."""
        lane_offloaded = self._offloaded_pages(group, pages, shape)
        staged: Counts = lane_offloaded * shape.staging_slots * group.lanes_per_layer
        return staged + (pages - lane_offloaded) * group.num_lanes

    def _offloaded_pages(self, group: LaneGroup, pages: Counts, shape: StepShape) -> Counts:
        """Pages of each lane, of `pages`, that are in offload memory."""
        page_tokens = group.page_class.tokens
        rest = group.page_class.pages_for(page_tokens - 1 + shape.chunk_tokens)
        return np.clip(pages - rest, 0, self.offloaded_tokens // page_tokens)

    def offload_split(self, need: Need) -> OffloadSplit:
        """Split the bytes of a sequence at its peak, with the smallest steps and KV offload."""
        shape, staging, rest, offloaded, tokens = self._shapes[-1], 0, 0, 0, 0
        [sequence] = group_needs([replace(need, may_offload=False)])
        for group in self._groups_of(need.eviction):
            page = group.page_class
            pages = self._group_pages(group, sequence, shape)
            rest += int(pages[0]) * page.page_bytes
            if self.offloads(need) and can_be_offloaded(group):
                lane_offloaded = int(
                    self._offloaded_pages(group, pages // group.num_lanes, shape)[0]
                )
                tokens = max(tokens, lane_offloaded * page.tokens)
                staging += (
                    lane_offloaded * shape.staging_slots * group.lanes_per_layer * page.page_bytes
                )
                offloaded += lane_offloaded * group.num_lanes * page.page_bytes
        return OffloadSplit(staging, rest - offloaded, offloaded, tokens)

    def shared_counts(self, need: Need, cached_tokens: int) -> Counts:
        """Pages [page classes] of its first tokens that a sequence shares until its end.

        Statistics are not shared, and evicting lanes write into private pages.
        """
        counts = np.zeros(len(self.page_classes), dtype=np.int64)
        [cached] = group_needs([Need(cached_tokens)])
        for group in self.memory.layout.groups:
            if not group.private and (group.ordered or not need.evicts):
                column = self._index[group.page_class]
                counts[column] += int(self._group_pages(group, cached, self._shapes[0])[0])
        return counts

    def forked_counts(self, shared_tokens: int, needs: Sequence[Need]) -> Counts:
        """Pages [page classes] that sequences forked after `shared_tokens` hold at their peak.

        Whole pages of the shared tokens count once, all other pages once per sequence, offloaded
        pages with their staging. This is an upper bound. Lanes with a window or a cap may share no
        pages; statistics are copied.

        Args:
            shared_tokens: number of first tokens that all sequences have in common.
            needs: need of each sequence; all have the same eviction specification.
        """
        counts = self._forked(shared_tokens, needs, self._shapes[0])
        shrinks = self._windows or bool(self._shrinkable(needs[:1])[0])
        for shape in self._shapes[1:] if shrinks else ():
            if self.fit_alone(counts):
                break
            counts = self._forked(shared_tokens, needs, shape)
        return counts

    def _forked(self, shared_tokens: int, needs: Sequence[Need], shape: StepShape) -> Counts:
        [sequences] = group_needs(needs)
        counts = np.zeros(len(self.page_classes), dtype=np.int64)
        for group in self._groups_of(sequences.eviction):
            alone = self._group_pages(group, replace(sequences, may_offload=False), shape)
            own, shared = alone, 0
            if group.window is not None:
                # a window lane holds fewer slots in decoding than in prefill
                decoding = np.minimum(sequences.tokens, group.slots_at_most(UNBOUNDED, 1))
                own = -(-decoding // group.page_class.tokens) * group.num_lanes
            # shared pages outside of the window are freed in decoding
            decodes = group.slots_at_most(UNBOUNDED, 1)
            if not any(n.tokens > decodes or self._loses(group, n) for n in needs):
                shared = shared_tokens // group.page_class.tokens * group.num_lanes
            together = int((own - shared).sum()) + shared
            if any(n.evicts for n in needs):
                together = min(together, self._forked_evicting(group, sequences, shape))
            else:
                together -= self._forked_saved(group, sequences, alone, shared, shape)
            prefill = self._group_pages(group, sequences, shape)
            counts[self._index[group.page_class]] += max(together, int(prefill.max()))
        return counts

    def _forked_saved(
        self, group: LaneGroup, sequences: NeedGroup, alone: Counts, shared: int, shape: StepShape
    ) -> int:
        """Pages of forked sequences that are not in the arena, of `shared` ones and their own."""
        offload = self._offload(sequences, group, shape)
        if offload is None:
            return 0
        of_lane, lane_shared = alone // group.num_lanes, shared // group.num_lanes
        movable = of_lane - offload.rest_pages
        together = min(max(0, int(movable.min())), lane_shared, offload.max_pages)
        own = int(np.maximum(movable - lane_shared, 0).sum())
        offloaded = together + min(own, offload.max_pages - together)
        layers = max(0, len(group.layers) - shape.staging_slots)
        return offloaded * layers * group.lanes_per_layer

    def _forked_evicting(self, group: LaneGroup, sequences: NeedGroup, shape: StepShape) -> int:
        """Pages of forked sequences that evict: the prompt's once, then those that each retains.

        An eviction gives a sequence private copies of shared pages. The others still share the
        prompt, whose first pages may be offloaded.
        """
        if group.private or group.fixed_slots is not None or group.ordered:
            return int(self._group_pages(group, sequences, shape).sum())
        prompt = replace(sequences, tokens=sequences.prompts)
        own = replace(sequences, may_offload=False, decodes=True)
        shared = int(self._group_pages(group, prompt, shape).max())
        return shared + int(self._group_pages(group, own, shape).sum())

    def _loses(self, group: LaneGroup, need: Need) -> bool:
        """Whether a sequence's lanes are private, or do not retain all of its tokens."""
        if group.private or (need.evicts and not group.ordered):
            return True
        return need.tokens > group.slots_at_most(UNBOUNDED, self._shapes[0].chunk_tokens)

    def shared_tokens(self, request: Request) -> int:
        """Tokens whose pages the members of a group share until their end."""
        groups = [group for group in self.memory.layout.groups if not group.private]
        need = need_of(request, request.final_tokens)
        if any(self._loses(group, need) for group in groups):
            return 0
        page_tokens = max(group.page_class.tokens for group in groups)
        return len(request.prompt_token_ids) // page_tokens * page_tokens

    def held(self, requests: Sequence[Request]) -> Counts:
        """Pages [requests, page classes] that running requests refer to now."""
        rows = np.array([request.memory.row for request in requests], dtype=np.int64)
        counts = np.zeros((len(rows), len(self.page_classes)), dtype=np.int64)
        for table in self.memory.tables.values():
            column = self._index[table.group.page_class]
            counts[:, column] += table.pages_held(rows)
        for row, request in enumerate(requests):
            for page_class, pages in self._pages_in_flight(request).items():
                counts[row, self._index[page_class]] += pages
        return counts

    def further_pages(self, requests: Sequence[Request], tokens: Sequence[int]) -> Counts:
        """Further pages [requests, page classes] until each request has `tokens` tokens."""
        needs = [need_of(request, n) for request, n in zip(requests, tokens, strict=True)]
        further: Counts = np.maximum(self.counts(needs) - self.held(requests), 0)
        return further

    def by_class(self, counts: Counts) -> dict[PageClass, int]:
        """Convert one row of counts to a dictionary by page class."""
        return {c: int(n) for c, n in zip(self.page_classes, counts, strict=True)}

    def num_bytes(self, counts: Counts) -> int:
        """Bytes of one row of counts."""
        return int(counts @ self._now.page_bytes)

    def peak_pages(self, need: Need) -> dict[PageClass, int]:
        """Pages of each class that a sequence holds at its peak."""
        return self.by_class(self.counts([need])[0])

    def peak_bytes(self, need: Need) -> int:
        """Bytes of the pages that a sequence holds at its peak."""
        return self.num_bytes(self.counts([need])[0])

    def fits_alone(self, need: Need) -> bool:
        """Whether a sequence at its peak fits in the whole KV memory."""
        return self.fit_alone(self.counts([need])[0])

    def fit_alone(self, counts: Counts) -> bool:
        """Whether these pages fit in the whole KV memory."""
        return bool(self._fit(counts))

    def _fit(self, counts: Counts) -> NDArray[np.bool_]:
        """Whether each row of counts fits in the whole KV memory."""
        return np.asarray(self._num_slabs(counts) <= self.memory.arena.num_slabs)

    def _num_slabs(self, counts: Counts) -> Counts:
        """Maximum number of slabs that these pages occupy."""
        per_slab = np.array([self.memory.pools[c].pages_per_slab for c in self.page_classes])
        return np.asarray((-(-counts // per_slab)).sum(axis=-1))

    def longest_sequence(self, max_positions: int, eviction: EvictionSpec) -> int:
        """Tokens of the longest prompt that fits alone, up to `max_positions`."""

        def too_long(tokens: int) -> bool:
            return not self.fits_alone(Need(tokens, eviction=eviction, may_offload=True))

        if not too_long(max_positions):
            return max_positions
        return bisect_left(range(max_positions), True, key=too_long) - 1

    def fit_whole(self, request: Request) -> bool:
        """Whether a request and its group at their peak fit in the whole KV memory.

        The bound counts the prompt once and `max_tokens` for each sequence. Evictions under memory
        pressure are not subtracted.
        """
        need = need_of(request, request.final_tokens)
        return self.fit_alone(self.whole_counts(need, num_rows(request)))

    def fitting_bytes(self, need: Need, width: int = 1) -> int:
        """The KV memory size that fits a request, with unchanged offload memory."""
        sizes = [page_class.page_bytes for page_class in self.page_classes]
        counts = self.whole_counts(need, width).tolist()
        return self.memory.arena.fitting_bytes(list(zip(sizes, counts, strict=True)))

    def whole_counts(self, need: Need, width: int) -> Counts:
        """Pages [page classes] of sequences that share a prompt, at their peak.

        Args:
            need: need of each sequence, with its prompt length.
            width: number of sequences.
        """
        if width == 1:
            alone: Counts = self.counts([need])[0]
            return alone
        if need.eviction.when == PRESSURE:
            # shared lanes do not evict under pressure: private copies would need pages first
            need = replace(need, eviction=replace(need.eviction, cap=None, lane_capacities=None))
        prompt_tokens = need.tokens if need.prompt_tokens is None else need.prompt_tokens
        return self.forked_counts(prompt_tokens, [need] * width)

    def capped_counts(self, tokens: int) -> Counts:
        """Fewest pages [page classes] of an evicting sequence: window lanes, one page elsewhere."""
        counts = np.zeros(len(self.page_classes), dtype=np.int64)
        for group in self._groups_of(KEEP_ALL):
            [sequence] = group_needs([Need(1 if group.window is None else tokens)])
            pages = self._group_pages(group, sequence, self._shapes[-1])
            counts[self._index[group.page_class]] += int(pages[0])
        return counts
