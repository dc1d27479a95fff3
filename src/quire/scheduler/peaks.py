r"""Peak page counts of requests, and whether the KV memory can ever hold them.

What the page count of a sequence depends on is its `Need` (tokens and evictions) and the sizes of
its steps. Step shapes, the preferred ones first; a later one is used if the sequence does not fit
otherwise:

    2 staging slots   prefill chunks of 2048, 1024, ... 1 token, whose KV is completely in the arena
    1 staging slot    the same chunks; a layer's prefetch waits until the previous layer is computed

Evicting lanes have two peaks, at the end of prefill and at the end of decoding. Lanes peak at
different times, so the sum of the lanes' peaks would overestimate the pages.

    slots  |        ______  <- decoding: up to the cap, or as far as the eviction schedule allows
           |   /\__/
           |  /               prefill: the whole prompt, or chunk by chunk under the cap
           +----------------- tokens

A prompt that is computed layer by layer holds all its tokens in the lanes of one layer at a time,
and the retained tokens in all other lanes.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from quire.errors import NeverFits
from quire.kv.memory import KVMemory
from quire.layout.evicting import evicting_layers
from quire.layout.eviction import (
    DECODE,
    KEEP_ALL,
    PREFILL_AND_DECODE,
    PREFILL_END,
    PRESSURE,
    EvictionSpec,
)
from quire.layout.layout import (
    SLOTS,
    can_be_offloaded,
    classes_with_bounds,
    offloaded_bounds_bytes,
    offloaded_token_bytes,
    statistics_used,
    usable_offload_bytes,
)
from quire.layout.pages import CacheLayout, LaneGroup, PageClass
from quire.layout.sizes import option_size, rounded_size
from quire.layout.statistics import MIN_CHUNK_TOKENS, Statistic
from quire.plan.weights import MAX_CHUNKS
from quire.scheduler.request import Request, may_evict, num_rows

UNBOUNDED = 1 << 60
Tokens = NDArray[np.int64]  # [sequences]
Counts = NDArray[np.int64]  # [page classes] or [sequences, page classes]
Pages = Mapping[PageClass, int]


# ---- needs of sequences, and shapes of their steps -----------------------------------------------


@dataclass(frozen=True, slots=True)
class Need:
    """Length and eviction specification of a sequence, which determine its page count.

    Attributes:
        tokens: its length.
        prompt_tokens: length of its prompt; None: `tokens`.
        eviction: its eviction specification, including the statistics of its tokens.
        may_offload: whether its oldest pages may be offloaded, if the engine has offload memory.
        decodes: whether its prompt is computed, so that only its pages in decoding count.
        by_layer: whether its prompt may be computed layer by layer.
    """

    tokens: int
    prompt_tokens: int | None = None
    eviction: EvictionSpec = KEEP_ALL
    may_offload: bool = False
    decodes: bool = False
    by_layer: bool = True

    @property
    def evicts(self) -> bool:
        """Whether a lane may evict tokens before the sequence has this length."""
        spec = self.eviction
        if spec.cap is None:
            return False
        # a budget that reads the prompt reserves the maximum of each lane until it divides the cap
        return self.tokens > (min(spec.cap, spec.min_cap) if spec.from_prompt else spec.min_cap)


def need_of(request: Request, tokens: int) -> Need:
    """Return the need of a request at a length of `tokens`."""
    prompt_tokens = len(request.prompt_token_ids)
    return Need(
        tokens,
        prompt_tokens,
        request.eviction.spec,
        may_offload=not request.eviction.pending,
        decodes=request.is_running and prompt_tokens <= request.progress.num_computed < tokens,
        by_layer=request.params.prompt_logprobs is None,  # its logits are bounded by small steps
    )


def can_offload_request(request: Request, layout: CacheLayout) -> bool:
    """Whether the oldest pages of a request may be offloaded while it runs."""
    if not may_evict(request):
        return True
    return not request.eviction.pending and evicts_offloaded(layout)


@dataclass(frozen=True, slots=True)
class NeedGroup:
    """Needs with the same eviction specification, as arrays.

    Attributes:
        eviction: the common eviction specification.
        may_offload, decodes, by_layer: the common values of these attributes of `Need`.
        index: [n] positions in the original list.
        tokens, prompts: [n] lengths of sequences and of their prompts; prompt <= sequence.
    """

    eviction: EvictionSpec
    may_offload: bool
    decodes: bool
    by_layer: bool
    index: Tokens
    tokens: Tokens
    prompts: Tokens

    @property
    def prefills(self) -> Tokens:
        """[n] most tokens that a lane without eviction holds until the prompts are computed."""
        if self.eviction.scoring is None or self.decodes:
            return self.prompts
        slots = [self.eviction.scoring_slots(n) for n in self.prompts.tolist()]
        held: Tokens = self.prompts + np.array(slots, dtype=np.int64)
        return held


def group_needs(needs: Sequence[Need]) -> Iterator[NeedGroup]:
    """Group needs by eviction specification, to count the pages of many at once."""
    indices: dict[tuple[int, bool, bool, bool], list[int]] = {}
    for i, need in enumerate(needs):
        key = (id(need.eviction), need.may_offload, need.decodes, need.by_layer)
        indices.setdefault(key, []).append(i)
    for members in indices.values():
        tokens = np.array([needs[i].tokens for i in members], dtype=np.int64)
        given = [needs[i].prompt_tokens for i in members]
        prompts = np.array([t if p is None else p for t, p in zip(tokens, given, strict=True)])
        first = needs[members[0]]
        index, prompts = np.array(members), np.minimum(prompts, tokens)
        common = first.eviction, first.may_offload, first.decodes, first.by_layer
        yield NeedGroup(*common, index, tokens, prompts)


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes of a sequence's steps, on which its page count depends.

    Attributes:
        chunk_tokens: size of its largest prefill chunk.
        staging_slots: number of layers whose offloaded pages are staged in the arena at a time.
    """

    chunk_tokens: int
    staging_slots: int = SLOTS


def step_shapes(chunk_tokens: int) -> tuple[StepShape, ...]:
    """Return the step shapes, the preferred one first, the one with the fewest pages last.

    Args:
        chunk_tokens: largest prefill chunk of the schedule.
    """
    chunks = [chunk_tokens]
    while chunks[-1] > 1:
        chunks.append(-(-chunks[-1] // 2))
    return tuple(StepShape(chunk, slots) for slots in (SLOTS, 1) for chunk in chunks)


# ---- evicting lanes ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LaneOffload:
    """Offload of the oldest pages of lanes.

    Attributes:
        max_pages: most offloaded pages of a lane.
        rest_pages: newest pages of a lane that stay in the arena.
        staging_slots: layers whose offloaded pages are staged at a time.
    """

    max_pages: int
    rest_pages: int
    staging_slots: int

    def oldest_pages(self, lane_pages: Tokens) -> Tokens:
        """Offloaded pages of lanes that do not evict."""
        return np.clip(lane_pages - self.rest_pages, 0, self.max_pages)

    def saved_pages(self, group: LaneGroup, lane_pages: Tokens, retained_pages: int) -> Tokens:
        """Pages of a sequence that are not in the arena.

        Args:
            group: the lane group.
            lane_pages: pages of the shortest lane, resident and offloaded.
            retained_pages: pages of a lane that an eviction leaves in the arena.
        """
        rest = max(self.rest_pages, retained_pages)
        offloaded = np.clip(lane_pages - (0 if retained_pages else rest), 0, self.max_pages)
        resident = np.minimum(lane_pages, np.maximum(rest, lane_pages - offloaded))
        staged = offloaded * self.staging_slots * group.lanes_per_layer
        saved: Tokens = np.maximum(0, (lane_pages - resident) * group.num_lanes - staged)
        return saved


def evicting_pages(
    group: LaneGroup,
    sequences: NeedGroup,
    layers: tuple[int, ...],
    offload: LaneOffload | None = None,
    by_layer: NDArray[np.bool_] | None = None,
) -> Tokens:
    """Peak pages [n] of a group of evicting lanes, or of the statistics of such lanes.

    If a budget moves slots between lanes, each lane may need one more, partly filled page.

    Args:
        group: the lane group.
        sequences: the sequences.
        layers: layers of all evicting lanes.
        offload: offload of their oldest pages; None if all pages are in the arena.
        by_layer: [n] whether the prompt is computed layer by layer; None: no prompt is.
    """
    pages: Tokens | int = 0
    least: Tokens | None = None  # pages of the shortest lane
    ragged = sequences.eviction.ragged or sequences.eviction.divided
    caps = lanes_by_cap(group, sequences.eviction, layers)
    for cap, num_lanes in caps:
        slots = np.stack(list(_peak_slots(sequences, cap, by_layer)))
        of_lane = -(-slots // group.page_class.tokens)
        least = of_lane if least is None else np.minimum(least, of_lane)
        pages = pages + (of_lane + (ragged & (slots < sequences.tokens))) * num_lanes
    if by_layer is not None and least is not None and not sequences.decodes:
        whole = -(-sequences.prefills // group.page_class.tokens)
        one_layer = by_layer * (whole - least[0]) * group.lanes_per_layer
        pages = pages + np.stack([one_layer, np.zeros_like(one_layer)])
    if offload is not None and least is not None:
        # lanes of different caps retain one page more after those that all of them retain
        offload = replace(offload, rest_pages=offload.rest_pages + (len(caps) > 1))
        pages = pages - offload.saved_pages(group, least, _retained_pages(group, sequences, caps))
    most: Tokens = np.max(pages, axis=0)
    return most


def _retained_pages(
    group: LaneGroup, sequences: NeedGroup, caps: Sequence[tuple[int | None, int]]
) -> int:
    """Pages of the longest lane that an eviction leaves in the arena; 0 without evictions.

    The first pages that all lanes retain stay offloaded. If a budget moves slots between lanes, a
    lane may retain none.
    """
    kept = [cap for cap, _ in caps if cap is not None]
    if not kept:
        return 0
    if sequences.eviction.ragged or sequences.eviction.divided:
        return group.page_class.pages_for(max(kept)) + sequences.eviction.ragged
    return 0


def _peak_slots(
    sequences: NeedGroup, cap: int | None, by_layer: NDArray[np.bool_] | None
) -> Iterator[Tokens]:
    """Yield the maximum slots of a lane in prefill, unless it is over, then in decoding.

    Of a prompt that is computed layer by layer: the slots of a lane that has been cut.
    """
    tokens, prompts, when = sequences.tokens, sequences.prompts, sequences.eviction.when
    if cap is None:
        yield prompts
        yield tokens
        return
    if not sequences.decodes:
        cut = np.minimum(prompts, cap)
        prompts = sequences.prefills
        whole = prompts if by_layer is None else np.where(by_layer, cut, prompts)
        yield whole if when in (PREFILL_END, DECODE) else cut
    if when == PREFILL_END:
        yield np.minimum(sequences.prompts, cap) + tokens - sequences.prompts
    else:
        yield np.minimum(tokens, cap)


@lru_cache(maxsize=1024)
def lanes_by_cap(
    group: LaneGroup, eviction: EvictionSpec, layers: tuple[int, ...]
) -> tuple[tuple[int | None, int], ...]:
    """Return the distinct caps of a group's lanes and the number of lanes with each cap.

    The cap of a lane with several heads is the lowest cap of its heads. Caps that are divided again
    are counted as equal: their sum does not change.

    Args:
        group: the lane group.
        eviction: the eviction specification; its caps are those of all evicting lanes.
        layers: layers of all evicting lanes.
    """
    if eviction.cap is None or eviction.lane_capacities is None or eviction.divided:
        return ((eviction.cap, group.num_lanes),)
    by_layer = np.array(eviction.lane_capacities, dtype=np.int64).reshape(len(layers), -1)
    own = by_layer[[layers.index(layer) for layer in group.layers]]
    caps = own.reshape(group.num_lanes, -1).min(axis=1)
    distinct, lanes = np.unique(caps, return_counts=True)
    return tuple(zip(distinct.tolist(), lanes.tolist(), strict=True))


# ---- all lanes -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Classes:
    """The page classes of a layout.

    Attributes:
        layout: the layout.
        page_classes: its page classes.
        index: their indices.
        page_bytes: [page classes] bytes of a page.
        evicting_layers: layers whose lanes evict tokens.
        evicts_offloaded: see `evicts_offloaded`.
        used: lane groups that sequences with given statistics use; filled on demand.
    """

    layout: CacheLayout
    page_classes: tuple[PageClass, ...]
    index: Mapping[PageClass, int]
    page_bytes: NDArray[np.int64]
    evicting_layers: tuple[int, ...]
    evicts_offloaded: bool
    used: dict[tuple[Statistic, ...], list[LaneGroup]]

    @classmethod
    def of(cls, layout: CacheLayout) -> "_Classes":
        classes = layout.page_classes
        page_bytes = np.array([c.page_bytes for c in classes], dtype=np.int64)
        index = {c: i for i, c in enumerate(classes)}
        layers, by_layer = evicting_layers(layout), evicts_offloaded(layout)
        return cls(layout, classes, index, page_bytes, layers, by_layer, {})


def evicts_offloaded(layout: CacheLayout) -> bool:
    """Whether an eviction can cut lanes one layer after the other, as those that are offloaded.

    Promoted tokens are written, and pages with common scales encoded again, for all layers
    together.
    """
    groups = (g for g in layout.groups if g.records is None and g.follows is None)
    if any(group.promoted is not None for group in layout.groups):
        return False
    return not any(group.page_class.per_page for group in groups if not group.ordered)


@dataclass(frozen=True, slots=True)
class OffloadSplit:
    """Bytes of one sequence at its peak, with the smallest steps.

    Attributes:
        staging_bytes: KV memory for one layer of the offloaded pages.
        rest_bytes: KV memory for pages that are not offloaded.
        offloaded_bytes: offload memory.
        offloaded_tokens: tokens of the offloaded pages.
    """

    staging_bytes: int
    rest_bytes: int
    offloaded_bytes: int
    offloaded_tokens: int


class Peaks:
    """Page arithmetic: peak pages of sequences, computed for many at once.

    Args:
        memory: the KV memory.
        chunk_tokens: largest prefill chunk of a request that evicts no tokens.
        by_layer: whether prompts can be computed layer by layer.
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
        by_layer: bool = True,
        offloaded_tokens: int = 0,
        offload_bytes: int = 0,
        pages_in_flight: Callable[[Request], Mapping[PageClass, int]] | None = None,
    ) -> None:
        self.memory = memory
        self._shapes = step_shapes(chunk_tokens)
        self._may_run_by_layer = by_layer and memory.layout.ends_by_layer
        self._windows = any(group.bounded for group in memory.layout.groups)
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

    def fit_offloaded(self, needs: Sequence[Need], num_bytes: float) -> bool:
        """Whether sequences fit together at their peaks with as many offloaded pages as possible.

        Counted are the pages that must be in the KV memory at a time, staging included, in steps of
        one token. Pages that sequences share count for each of them.

        Args:
            needs: needs of the sequences.
            num_bytes: bytes of the KV memory that they may use.
        """
        whole = self.counts([replace(need, may_offload=False) for need in needs])
        counts = self._counts(needs, StepShape(1))
        fixed = [i for i, need in enumerate(needs) if not self.offloads(need)]
        counts[fixed] = whole[fixed]
        offloaded = [g for g in self.memory.layout.groups if can_be_offloaded(g)]
        token_bytes = offloaded_token_bytes(self.memory.layout)
        staged = max((SLOTS / (len(g.layers) - SLOTS) for g in offloaded), default=0.0)
        saved_bytes = self.num_bytes(np.maximum(whole - counts, 0).sum(axis=0))
        total = counts.sum(axis=0)
        return (
            saved_bytes * (1 + staged) <= self.offloaded_tokens * token_bytes
            and self.num_bytes(total) <= num_bytes
            and self.fit_alone(total)
        )

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
                if g.name in names or (g.follows is None and g.records is None)
            ]
        return used[eviction.statistics]

    def _group_pages(self, group: LaneGroup, sequences: NeedGroup, shape: StepShape) -> Counts:
        eviction = sequences.eviction
        if group.records is None and not group.ordered:
            offload = self._offload(sequences, group, shape)
            layers = self._now.evicting_layers
            return evicting_pages(group, sequences, layers, offload, self._by_layer(sequences))
        slots = np.maximum(sequences.tokens, sequences.prefills)
        chunk = shape.chunk_tokens + int((sequences.prefills - sequences.prompts).max())
        if group.records is not None:
            slots = np.minimum(slots, 1) * group.records
        if eviction.cap is not None:  # above the cap a prompt is computed `every` tokens at once
            chunk = max(chunk, eviction.every)
        most = group.slots_at_most(UNBOUNDED, chunk)
        pages: Counts = -(-np.minimum(slots, most) // group.page_class.tokens)
        offload = self._offload(sequences, group, shape)
        if offload is None:
            by_layer, whole = self._by_layer(sequences), pages
            if by_layer is not None and group.records is None:  # until its window lanes are cut
                prompts = -(-sequences.prefills // group.page_class.tokens)
                whole = np.where(by_layer, np.maximum(pages, prompts), pages)
            return pages * group.num_lanes + (whole - pages) * group.lanes_per_layer
        offloaded = offload.oldest_pages(pages)
        staged: Counts = offloaded * shape.staging_slots * group.lanes_per_layer
        return staged + (pages - offloaded) * group.num_lanes

    def is_by_layer(self, need: Need) -> bool:
        """Whether the prompt of a sequence is computed layer by layer."""
        [sequence] = group_needs([need])
        by_layer = self._by_layer(sequence)
        return by_layer is not None and bool(by_layer[0])

    def _by_layer(self, sequences: NeedGroup) -> NDArray[np.bool_] | None:
        """Which prompts [n] are computed layer by layer; None: no prompt is."""
        classes, eviction = self._now, sequences.eviction
        possible = self._may_run_by_layer and sequences.by_layer and eviction.cuts_by_layer
        several = classes.evicts_offloaded and len(classes.evicting_layers) > 1
        if not (possible and several) or self.offloaded_tokens:
            return None
        max_tokens = MAX_CHUNKS * self._shapes[0].chunk_tokens
        found: NDArray[np.bool_] = sequences.prompts > eviction.min_cap
        # the hidden states of a scoring pass are held too
        most = [n + eviction.scoring_tokens(n) for n in sequences.prompts.tolist()]
        found &= np.array(most) <= max_tokens
        return found

    def offloads(self, need: Need | NeedGroup) -> bool:
        """Whether the oldest pages of sequences can be in offload memory at their peak."""
        is_movable = need.eviction.cap is None or self._now.evicts_offloaded
        return bool(need.may_offload and self.offloaded_tokens and is_movable)

    def _offload(
        self, sequences: NeedGroup, group: LaneGroup, shape: StepShape
    ) -> LaneOffload | None:
        """Offload of the oldest pages of a group's lanes; None if they stay in the arena."""
        if not (self.offloads(sequences) and can_be_offloaded(group)):
            return None
        page_tokens = group.page_class.tokens
        chunk = shape.chunk_tokens
        if sequences.eviction.cap is not None and not sequences.decodes:
            chunk = max(chunk, sequences.eviction.every)
        # a lane with a cap counts its last page as resident when the page is full, too
        last = page_tokens if sequences.eviction.cap is not None else page_tokens - 1
        rest = group.page_class.pages_for(last + chunk)
        return LaneOffload(self.offloaded_tokens // page_tokens, rest, shape.staging_slots)

    def offload_split(self, need: Need) -> OffloadSplit:
        """Split the bytes of a sequence at its peak, with the smallest steps and KV offload."""
        shape, staging, rest, offloaded, tokens = self._shapes[-1], 0, 0, 0, 0
        [sequence] = group_needs([need])
        for group in self._groups_of(need.eviction):
            page, offload = group.page_class, self._offload(sequence, group, shape)
            pages = self._group_pages(group, replace(sequence, may_offload=False), shape)
            rest += int(pages[0]) * page.page_bytes
            if offload is not None:
                lane_pages = int(offload.oldest_pages(pages // group.num_lanes)[0])
                tokens = max(tokens, lane_pages * page.tokens)
                staging += (
                    lane_pages * shape.staging_slots * group.lanes_per_layer * page.page_bytes
                )
                offloaded += lane_pages * group.num_lanes * page.page_bytes
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
            if group.bounded:
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
        if group.private or group.records is not None or group.ordered:
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
        if not groups or any(self._loses(group, need) for group in groups):
            return 0  # states are private
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
        """Whether each row of counts fits in the whole KV memory, in slabs."""
        per_slab = np.array([self.memory.pools[c].pages_per_slab for c in self.page_classes])
        return np.asarray((-(-counts // per_slab)).sum(axis=-1) <= self.memory.arena.num_slabs)

    def longest_sequence(self, max_positions: int, eviction: EvictionSpec) -> int:
        """Tokens of the longest prompt that fits alone, up to `max_positions`."""

        def too_long(tokens: int) -> bool:
            return not self.fits_alone(Need(tokens, eviction=eviction, may_offload=True))

        if not too_long(max_positions):
            return max_positions
        return bisect_left(range(max_positions), True, key=too_long) - 1

    def longest_request(self, max_positions: int, eviction: EvictionSpec) -> int:
        """Prompt and output tokens of the longest request that fits alone."""
        # the KV of the last output token is never computed
        return 1 + self.longest_sequence(max_positions - 1, eviction)

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

    def fitting_option(self, need: Need, width: int = 1) -> str:
        """The value of the option for the KV memory that fits a request."""
        unpaged_bytes = self.memory.arena.unpaged_bytes
        return option_size(rounded_size(self.fitting_bytes(need, width) + unpaged_bytes))

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
            # several sequences do not evict under pressure: see `LaneCapacities`
            need = replace(need, eviction=replace(need.eviction, cap=None, lane_capacities=None))
        prompt_tokens = need.tokens if need.prompt_tokens is None else need.prompt_tokens
        return self.forked_counts(prompt_tokens, [need] * width)

    def capped_counts(self, tokens: int) -> Counts:
        """Fewest pages [page classes] of an evicting sequence: window lanes, one page elsewhere."""
        counts = np.zeros(len(self.page_classes), dtype=np.int64)
        for group in self._groups_of(KEEP_ALL):
            [sequence] = group_needs([Need(tokens if group.bounded else 1)])
            pages = self._group_pages(group, sequence, self._shapes[-1])
            counts[self._index[group.page_class]] += int(pages[0])
        return counts


# ---- requests that never fit ---------------------------------------------------------------------


def offload_text(peaks: Peaks, need: Need) -> str:
    """Describe the memory that a request with KV offload needs, for an error message.

    Args:
        peaks: page arithmetic of the KV memory.
        need: need of the request's single sequence.

    Returns:
        A clause that ends in "; "; empty if no page is offloaded.
    """
    if not peaks.offloads(need):
        return ""
    split, unlimited = peaks.offload_split(need), copy(peaks)
    unlimited.offloaded_tokens = UNBOUNDED
    is_full = split.offloaded_bytes < unlimited.offload_split(need).offloaded_bytes
    rest = "tokens that do not fit in the offload memory" if is_full else "the last chunk"
    return (
        f"with KV offload the KV memory must hold {split.staging_bytes:,} B of staging (one layer "
        f"of {split.offloaded_tokens:,} offloaded tokens) and {split.rest_bytes:,} B of pages that "
        f"are not offloaded ({rest}), and the offload memory {split.offloaded_bytes:,} B of its "
        f"{peaks.offload_bytes:,} B; "
    )


def refuse_if_never(peaks: Peaks, request: Request) -> None:
    """Refuse a request that does not fit in the KV memory even alone.

    Raises:
        NeverFits: states the bytes needed and the bytes of the KV memory.
    """
    if not peaks.fit_whole(request):
        raise NeverFits(_why_never(peaks, request), param=_field_at_fault(peaks, request))


def _field_at_fault(peaks: Peaks, request: Request) -> str:
    """The option to lower first."""
    if not peaks.fits_alone(need_of(request, len(request.prompt_token_ids))):
        return "prompt"
    if num_rows(request) > 1 and peaks.fits_alone(need_of(request, request.final_tokens)):
        return "beam_width"
    return "max_tokens"


def _why_never(peaks: Peaks, request: Request) -> str:
    need, width = need_of(request, request.final_tokens), num_rows(request)
    beams, arena = f" in {width} beams" if width > 1 else "", peaks.memory.arena
    return (
        f"{len(request.prompt_token_ids)} prompt tokens and "
        f"{request.params.max_tokens} to generate{beams} "
        f"need {peaks.fitting_bytes(need, width):,} B of KV, the whole KV memory "
        f"has {arena.num_slabs * arena.slab_bytes:,} B; {offload_text(peaks, need)}"
        f"{possible_changes(peaks, need, width)}"
    )


def possible_changes(peaks: Peaks, need: Need, width: int) -> str:
    """List the changes that would each make the request fit, for an error message.

    Args:
        peaks: page arithmetic of the KV memory.
        need: need of each sequence of the request, with its prompt length.
        width: number of sequences that share the prompt.
    """
    changes = [
        *_smaller_requests(peaks, need, width),
        f"raise {peaks.memory.arena.size_option} to {peaks.fitting_option(need, width)}",
        *_offload(peaks, need, width),
        *_evictions(peaks, need, width),
    ]
    return " or ".join(filter(None, (", ".join(changes[:-1]), changes[-1])))


def _fits(peaks: Peaks, need: Need, width: int) -> bool:
    return peaks.fit_alone(peaks.whole_counts(need, width))


def _smaller_requests(peaks: Peaks, need: Need, width: int) -> Iterator[str]:
    prompt = need.tokens if need.prompt_tokens is None else need.prompt_tokens
    if width > 1 and _fits(peaks, need, 1):
        yield "use fewer beams"
    shorter = replace(need, tokens=1 + need.tokens - prompt, prompt_tokens=1)
    fewer = replace(need, tokens=prompt)
    helps = [_fits(peaks, shorter, width), _fits(peaks, fewer, width)]
    if helps[0]:
        yield "shorten the prompt"
    if helps[1]:
        yield "lower max_tokens"
    if not any(helps) and _fits(peaks, replace(need, tokens=1, prompt_tokens=1), width):
        yield "shorten the prompt and lower max_tokens"


def _offload(peaks: Peaks, need: Need, width: int) -> Iterator[str]:
    """The offload memory size that fits the request, if any does.

    Some pages of every sequence always remain in the KV memory.
    """
    larger, layout, arena = copy(peaks), peaks.memory.layout, peaks.memory.arena

    def bytes_of(tokens: int) -> int:
        if peaks.offloaded_tokens:
            return rounded_size(-(-tokens * peaks.offload_bytes // peaks.offloaded_tokens))
        # activation checkpoints may use a fraction of it, by rates that are measured later
        return rounded_size(tokens * offloaded_token_bytes(layout))

    def fits(tokens: int) -> bool:
        larger.offloaded_tokens = tokens
        if not classes_with_bounds(layout):
            return _fits(larger, need, width)
        # the bounds of more offloaded pages take KV memory, which limits the offload memory
        kv_bytes, num_bytes = arena.total_bytes + arena.unpaged_bytes, bytes_of(tokens)
        bounds_bytes = offloaded_bounds_bytes(layout, num_bytes)
        return larger.fitting_bytes(
            need, width
        ) + bounds_bytes <= kv_bytes and num_bytes <= usable_offload_bytes(layout, kv_bytes)

    tokens = bisect_left(range(need.tokens), True, key=fits)
    if fits(tokens):
        verb = "raise" if peaks.offloaded_tokens else "set"
        yield f"{verb} --kv-offload-memory to {option_size(bytes_of(tokens))}"


def _evictions(peaks: Peaks, need: Need, width: int) -> Iterator[str]:
    if need.eviction.cap is None:
        if peaks.fit_alone(width * peaks.capped_counts(need.tokens)):
            yield "evict tokens with --evict RULE:cap=TOKENS"
        return
    smaller = replace(need.eviction, cap=2, every=1, lane_capacities=None)
    if _fits(peaks, replace(need, eviction=smaller), width):
        yield "lower cap= of its eviction rule"
    scoring = need.eviction.scoring
    if scoring is not None:  # its rule has one schedule
        least = replace(scoring, chunk_tokens=min(scoring.chunk_tokens, MIN_CHUNK_TOKENS))
        if _fits(peaks, replace(need, eviction=need.eviction.with_chunk(least)), width):
            yield f"lower chunk= of its eviction rule to {least.chunk_tokens}"
        return
    blocks = replace(need.eviction, when=PREFILL_AND_DECODE)
    if need.eviction.when == PRESSURE and _fits(peaks, replace(need, eviction=blocks), width):
        yield "set when=prefill_and_decode in its eviction rule"
    elif need.eviction.when != PREFILL_AND_DECODE and _fits(
        peaks, replace(need, eviction=replace(smaller, when=PREFILL_AND_DECODE)), width
    ):
        yield "set when=prefill_and_decode and a lower cap= in its eviction rule"


# ---- equal requests at once ----------------------------------------------------------------------


def rows_at_once(memory: KVMemory, need: Need, *, first_tokens: int, chunk_tokens: int) -> int:
    """Return the number of equal requests that run to completion at the same time.

    Args:
        memory: an empty KV memory with any number of rows; it is not changed.
        need: need of each request at its end.
        first_tokens: prompt tokens that a request computes in its first step.
        chunk_tokens: maximum prefill chunk of a request that evicts no tokens.
    """
    peaks = Peaks(memory, chunk_tokens)
    if not peaks.fits_alone(need):
        return 0
    peak = peaks.peak_pages(need)
    first = peaks.peak_pages(Need(first_tokens, first_tokens, need.eviction))
    slabs = _Slabs(memory)
    rows = 0
    while not rows or slabs.fit({c: peak[c] + rows * max(0, peak[c] - first[c]) for c in peak}):
        for page_class in memory.layout.page_classes:
            slabs.take(page_class, first[page_class])
        rows += 1
    return rows


class _Slabs:
    """Simulated slabs of an empty arena, in the order in which its pools would take them.

    Args:
        memory: the KV memory with the arena.
    """

    def __init__(self, memory: KVMemory) -> None:
        self._slab_bytes, self._num_slabs = memory.arena.slab_bytes, memory.arena.num_slabs
        self._guaranteed = {c: pool.pages_per_slab for c, pool in memory.pools.items()}
        self._free_pages = dict.fromkeys(memory.pools, 0)
        self._next_slab = 0

    def fit(self, pages: Pages) -> bool:
        """Whether this many more pages of each class are sure to fit."""
        missing = ((n - self._free_pages[c], self._guaranteed[c]) for c, n in pages.items())
        slabs = sum(max(0, -(-n // per_slab)) for n, per_slab in missing)
        return slabs <= self._num_slabs - self._next_slab

    def take(self, page_class: PageClass, pages: int) -> None:
        """Take pages; they must fit."""
        while self._free_pages[page_class] < pages:
            self._free_pages[page_class] += self._pages_in(page_class, self._next_slab)
            self._next_slab += 1
        self._free_pages[page_class] -= pages

    def _pages_in(self, page_class: PageClass, slab: int) -> int:
        page_bytes = page_class.page_bytes
        first = -(-slab * self._slab_bytes // page_bytes)
        return (slab + 1) * self._slab_bytes // page_bytes - first
