"""Pages a request comes to hold, and which requests the pool can never hold."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from quire.kv.memory import KVMemory
from quire.layout.eviction import KEEP_ALL, PRESSURE, EvictionSpec
from quire.layout.layout import can_be_offloaded, statistics_used
from quire.layout.pages import LaneGroup, PageClass
from quire.layout.statistics import Statistic
from quire.scheduler.admission.lane_peaks import UNBOUNDED, evicting_pages
from quire.scheduler.admission.need import Alike, Need, StepShape, alike, need_of, step_shapes
from quire.scheduler.admission.offload_split import OffloadSplit
from quire.scheduler.group import num_rows
from quire.scheduler.request import Request

Counts = NDArray[np.int64]


class Peaks:
    """Arithmetic of pages by what sequences need, for many at once.

    Args:
        memory: the pool.
        chunk_tokens: largest prefill chunk of a request that evicts nothing.
        offloaded_tokens: of one sequence that offload memory holds; 0 without any.
        offload_bytes: of offload memory, activations included; 0 without any.
        arriving: pages of a request that are allocated and that its row does not name yet.

    Attributes:
        page_classes: what the last axis of every array of counts stands for.
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
        arriving: Callable[[Request], Mapping[PageClass, int]] | None = None,
    ) -> None:
        self.memory = memory
        self._shapes = step_shapes(chunk_tokens)
        self._windows = any(group.window is not None for group in memory.layout.groups)
        self.page_classes = memory.layout.page_classes
        self._place = {page_class: i for i, page_class in enumerate(self.page_classes)}
        self._bytes = np.array([c.page_bytes for c in self.page_classes], dtype=np.int64)
        self._used: dict[tuple[Statistic, ...], list[LaneGroup]] = {}
        self.offloaded_tokens, self.offload_bytes = offloaded_tokens, offload_bytes
        self._arriving = arriving or (lambda request: {})

    def counts(self, needs: Sequence[Need]) -> Counts:
        """Pages [sequences, page classes] that sequences hold at their peaks.

        A sequence that fits alone only where steps are smaller is counted with these.
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
        for sequences in alike(needs):
            for group in self._groups_of(sequences.eviction):
                place = self._place[group.page_class]
                counts[sequences.index, place] += self._group_pages(group, sequences, shape)
        return counts

    def _shrinkable(self, needs: Sequence[Need]) -> NDArray[np.bool_]:
        """Whether each of the sequences holds fewer pages where steps are smaller."""
        if self._windows:
            return np.ones(len(needs), dtype=bool)
        return np.array(
            [need.may_offload and self.offloaded_tokens > 0 for need in needs], dtype=bool
        )

    def _groups_of(self, eviction: EvictionSpec) -> list[LaneGroup]:
        """The groups that sequences use: all but the statistics they do without."""
        if eviction.statistics not in self._used:
            layout = self.memory.layout
            names = statistics_used(layout, eviction.statistics)
            self._used[eviction.statistics] = [
                g
                for g in layout.groups
                if g.name in names or (g.mirrors is None and g.fixed_slots is None)
            ]
        return self._used[eviction.statistics]

    def _group_pages(self, group: LaneGroup, sequences: Alike, shape: StepShape) -> Counts:
        placement, eviction = self.memory.placement, sequences.eviction
        if group.fixed_slots is None and not group.ordered:
            return evicting_pages(placement, group, sequences)
        slots, chunk = sequences.tokens, shape.chunk_tokens
        if group.fixed_slots is not None:
            slots = np.minimum(slots, 1) * group.fixed_slots
        if eviction.cap is not None:  # over it a prompt is read `every` tokens at once
            chunk = max(chunk, eviction.every)
        most = group.slots_at_most(UNBOUNDED, chunk)
        pages: Counts = placement.peak_pages(group, slots, most)
        if sequences.may_offload and self.offloaded_tokens and can_be_offloaded(group):
            return self._streamed_pages(group, pages, shape)
        return pages * group.num_lanes

    def _streamed_pages(self, group: LaneGroup, pages: Counts, shape: StepShape) -> Counts:
        """What is left in the arena of lanes whose first pages are in offload memory."""
        lane_offloaded = self._offloaded_pages(group, pages, shape)
        staged: Counts = lane_offloaded * shape.staging_slots * group.lanes_per_layer
        return staged + (pages - lane_offloaded) * group.num_lanes

    def _offloaded_pages(self, group: LaneGroup, pages: Counts, shape: StepShape) -> Counts:
        """First pages of each lane that are in offload memory, of so many."""
        page_tokens = group.page_class.tokens
        rest = group.page_class.pages_for(page_tokens - 1 + shape.chunk_tokens)
        return np.clip(pages - rest, 0, self.offloaded_tokens // page_tokens)

    def offload_split(self, need: Need) -> OffloadSplit:
        """Where the bytes of a sequence are in the smallest steps, its first pages offloaded."""
        shape, staging, rest, offloaded, tokens = self._shapes[-1], 0, 0, 0, 0
        [sequence] = alike([replace(need, may_offload=False)])
        for group in self._groups_of(need.eviction):
            page = group.page_class
            pages = self._group_pages(group, sequence, shape)
            rest += int(pages[0]) * page.page_bytes
            if need.may_offload and self.offloaded_tokens and can_be_offloaded(group):
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
        """Pages [page classes] of its first tokens that a sequence shares, and goes on sharing.

        Statistics are nobody else's, and lanes that lose tokens write into pages of their own.
        """
        counts = np.zeros(len(self.page_classes), dtype=np.int64)
        [cached] = alike([Need(cached_tokens)])
        for group in self.memory.layout.groups:
            if not group.private and (group.ordered or not need.evicts):
                place = self._place[group.page_class]
                counts[place] += int(self._group_pages(group, cached, self._shapes[0])[0])
        return counts

    def forked_counts(self, shared_tokens: int, needs: Sequence[Need]) -> Counts:
        """Pages [page classes] that sequences forked behind `shared_tokens` hold at their peak.

        Whole pages of what they share count once, all others for each: a bound for sequences that
        differ from there on. Lanes with a window or a cap may come to share nothing, statistics
        are copied.

        Args:
            shared_tokens: length of what all have in common.
            needs: of each; they evict alike.
        """
        counts = self._forked(shared_tokens, needs, self._shapes[0])
        for shape in self._shapes[1:] if self._windows else ():
            if self.fit_alone(counts):
                break
            counts = self._forked(shared_tokens, needs, shape)
        return counts

    def _forked(self, shared_tokens: int, needs: Sequence[Need], shape: StepShape) -> Counts:
        [sequences] = alike(needs)
        counts = np.zeros(len(self.page_classes), dtype=np.int64)
        for group in self._groups_of(sequences.eviction):
            alone = self._group_pages(group, replace(sequences, may_offload=False), shape)
            own, shared = alone, 0
            if group.window is not None:
                # decoding, a window lane holds less than while a prompt is read in chunks
                decoding = np.minimum(sequences.tokens, group.slots_at_most(UNBOUNDED, 1))
                own = -(-decoding // group.page_class.tokens) * group.num_lanes
            # behind a window they are freed once it decodes, whatever the chunks of the prompt
            decodes = group.slots_at_most(UNBOUNDED, 1)
            if not any(n.tokens > decodes or self._loses(group, n) for n in needs):
                shared = shared_tokens // group.page_class.tokens * group.num_lanes
            together = int((own - shared).sum()) + shared
            counts[self._place[group.page_class]] += max(together, int(alone.max()))
        return counts

    def _loses(self, group: LaneGroup, need: Need) -> bool:
        """Whether lanes of a sequence come to hold other tokens than all, or nobody shares them."""
        if group.private or (need.evicts and not group.ordered):
            return True
        return need.tokens > group.slots_at_most(UNBOUNDED, self._shapes[0].chunk_tokens)

    def shared_tokens(self, request: Request) -> int:
        """Tokens whose pages the members of a group will share to the end."""
        groups = [group for group in self.memory.layout.groups if not group.private]
        need = need_of(request, request.final_tokens)
        if any(self._loses(group, need) for group in groups):
            return 0
        page_tokens = max(group.page_class.tokens for group in groups)
        return len(request.prompt_token_ids) // page_tokens * page_tokens

    def held(self, requests: Sequence[Request]) -> Counts:
        """Pages [requests, page classes] that running requests refer to, or keep aside, now."""
        rows = np.array([request.memory.row for request in requests], dtype=np.int64)
        counts = np.zeros((len(rows), len(self.page_classes)), dtype=np.int64)
        for table in self.memory.tables.values():
            place = self._place[table.group.page_class]
            set_aside_pages = self.memory.placement.reserved_pages(table, rows)
            counts[:, place] += table.pages_held(rows) + set_aside_pages.sum(axis=1)
        for row, request in enumerate(requests):
            for page_class, pages in self._arriving(request).items():
                counts[row, self._place[page_class]] += pages
        return counts

    def owed(self, requests: Sequence[Request], tokens: Sequence[int]) -> Counts:
        """Pages [requests, page classes] they will still take to have had so many tokens each."""
        needs = [need_of(request, n) for request, n in zip(requests, tokens, strict=True)]
        owed: Counts = np.maximum(self.counts(needs) - self.held(requests), 0)
        return owed

    def by_class(self, counts: Counts) -> dict[PageClass, int]:
        """One row of counts under the names of its classes."""
        return {c: int(n) for c, n in zip(self.page_classes, counts, strict=True)}

    def num_bytes(self, counts: Counts) -> int:
        """Bytes of one row of counts."""
        return int(counts @ self._bytes)

    def peak_pages(self, need: Need) -> dict[PageClass, int]:
        """Pages of each class a sequence holds at its peak."""
        return self.by_class(self.counts([need])[0])

    def peak_bytes(self, need: Need) -> int:
        """Bytes of those pages."""
        return self.num_bytes(self.counts([need])[0])

    def fits_alone(self, need: Need) -> bool:
        """Whether the whole pool holds a sequence at its peak."""
        return self.fit_alone(self.counts([need])[0])

    def fit_alone(self, counts: Counts) -> bool:
        """Whether the whole pool holds so many pages of each class."""
        return bool(self._fit(counts))

    def _fit(self, counts: Counts) -> NDArray[np.bool_]:
        """The same for any number of counts."""
        return np.asarray(self._num_slabs(counts) <= self.memory.arena.num_slabs)

    def _num_slabs(self, counts: Counts) -> Counts:
        """Slabs that so many pages of each class lie in, wherever the classes end."""
        per_slab = np.array([self.memory.pools[c].pages_per_slab for c in self.page_classes])
        borders = self.memory.placement.border_slabs * (counts > 0)
        return np.asarray((-(-counts // per_slab) + borders).sum(axis=-1))

    def slab_bytes(self, counts: Counts) -> int:
        """Bytes of the slabs that so many pages of each class fill: what the pool must have."""
        return int(self._num_slabs(counts)) * self.memory.arena.slab_bytes

    def longest_sequence(self, max_positions: int, eviction: EvictionSpec) -> int:
        """Tokens of the longest prompt that fits alone, up to the model's context."""

        def too_long(tokens: int) -> bool:
            return not self.fits_alone(
                Need(tokens, eviction=eviction, may_offload=eviction.cap is None)
            )

        if not too_long(max_positions):
            return max_positions
        return bisect_left(range(max_positions), True, key=too_long) - 1

    def fit_whole(self, request: Request) -> bool:
        """Whether the whole pool holds a request and its group at their peak.

        The bound is the prompt once and, for each sequence, all that it may generate; of those that
        lose tokens under pressure only, nothing is counted as lost.
        """
        need = need_of(request, request.final_tokens)
        return self.fit_alone(self.whole_counts(need, num_rows(request)))

    def whole_counts(self, need: Need, width: int) -> Counts:
        """Pages [page classes] of so many sequences that share a prompt, at their peak.

        Args:
            need: of each, with the tokens of the prompt.
            width: sequences.
        """
        if width == 1:
            alone: Counts = self.counts([need])[0]
            return alone
        if need.eviction.when == PRESSURE:
            # lanes that members share are not relieved: that takes pages before it frees any
            need = replace(need, eviction=replace(need.eviction, cap=None, lane_caps=None))
        prompt_tokens = need.tokens if need.prompt_tokens is None else need.prompt_tokens
        return self.forked_counts(prompt_tokens, [need] * width)

    def capped_counts(self, tokens: int) -> Counts:
        """Fewest pages [page classes] of a sequence that evicts: window lanes, a page elsewhere."""
        counts = np.zeros(len(self.page_classes), dtype=np.int64)
        for group in self._groups_of(KEEP_ALL):
            [sequence] = alike([Need(1 if group.window is None else tokens)])
            pages = self._group_pages(group, sequence, self._shapes[-1])
            counts[self._place[group.page_class]] += int(pages[0])
        return counts
