"""Pages a request comes to hold, and which requests the pool can never hold."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from quire.engine.admission.lane_peaks import UNBOUNDED, evicting_pages
from quire.engine.admission.need import Alike, Need, alike, need_of
from quire.engine.group import num_rows
from quire.engine.request import Request
from quire.errors import NeverFits
from quire.kv.hosted import can_have_front
from quire.kv.memory import KVMemory
from quire.kv.tables import SLOTS
from quire.spec.eviction import PRESSURE, EvictionSpec
from quire.spec.layout import statistics_used
from quire.spec.pages import LaneGroup, PageClass
from quire.spec.statistics import Statistic

Counts = NDArray[np.int64]


class Peaks:
    """Arithmetic of pages by what sequences need, for many at once.

    Args:
        memory: the pool.
        chunk_tokens: largest prefill chunk of a request that evicts nothing.

    Attributes:
        page_classes: what the last axis of every array of counts stands for.
    """

    def __init__(self, memory: KVMemory, chunk_tokens: int) -> None:
        self.memory = memory
        self._chunk_tokens = chunk_tokens
        self.page_classes = memory.layout.page_classes
        self._place = {page_class: i for i, page_class in enumerate(self.page_classes)}
        self._bytes = np.array([c.page_bytes for c in self.page_classes], dtype=np.int64)
        self._used: dict[tuple[Statistic, ...], list[LaneGroup]] = {}
        self.front_tokens = 0  # of one sequence that can be on the host while it runs
        self.arriving: Callable[[Request], Mapping[PageClass, int]] = lambda request: {}

    def counts(self, needs: Sequence[Need]) -> Counts:
        """Pages [sequences, page classes] that sequences hold at their peaks."""
        counts = np.zeros((len(needs), len(self.page_classes)), dtype=np.int64)
        for sequences in alike(needs):
            for group in self._groups_of(sequences.eviction):
                place = self._place[group.page_class]
                counts[sequences.index, place] += self._group_pages(group, sequences)
        return counts

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

    def _group_pages(self, group: LaneGroup, sequences: Alike) -> Counts:
        placement, eviction = self.memory.placement, sequences.eviction
        if group.fixed_slots is None and not group.ordered:
            return evicting_pages(placement, group, sequences)
        slots, chunk = sequences.tokens, self._chunk_tokens
        if group.fixed_slots is not None:
            slots = np.minimum(slots, 1) * group.fixed_slots
        if eviction.cap is not None:  # over it a prompt is read `every` tokens at once
            chunk = max(chunk, eviction.every)
        most = group.slots_at_most(UNBOUNDED, chunk)
        pages: Counts = placement.peak_pages(group, slots, most)
        if sequences.streams and self.front_tokens and can_have_front(group):
            return self._streamed_pages(group, pages)
        return pages * group.num_lanes

    def _streamed_pages(self, group: LaneGroup, pages: Counts) -> Counts:
        """What is left in the arena of lanes whose first pages are on the host."""
        page_tokens = group.page_class.tokens
        rest = 1 + -(-self._chunk_tokens // page_tokens)
        front = np.clip(pages - rest, 0, self.front_tokens // page_tokens)
        staged: Counts = front * SLOTS * group.lanes_per_layer
        return staged + (pages - front) * group.num_lanes

    def shared_counts(self, need: Need, cached_tokens: int) -> Counts:
        """Pages [page classes] of its first tokens that a sequence shares, and goes on sharing.

        Statistics are nobody else's, and lanes that lose tokens write into pages of their own.
        """
        counts = np.zeros(len(self.page_classes), dtype=np.int64)
        [cached] = alike([Need(cached_tokens)])
        for group in self.memory.layout.groups:
            if not group.private and (group.ordered or not need.evicts):
                place = self._place[group.page_class]
                counts[place] += int(self._group_pages(group, cached)[0])
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
        [sequences] = alike(needs)
        counts = np.zeros(len(self.page_classes), dtype=np.int64)
        for group in self._groups_of(sequences.eviction):
            alone = self._group_pages(group, replace(sequences, streams=False))
            own, shared = alone, 0
            if group.window is not None:
                # decoding, a window lane holds less than while a prompt is read in chunks
                decoding = np.minimum(sequences.tokens, group.slots_at_most(UNBOUNDED, 1))
                own = -(-decoding // group.page_class.tokens) * group.num_lanes
            if not any(self._loses(group, need) for need in needs):
                shared = shared_tokens // group.page_class.tokens * group.num_lanes
            together = int((own - shared).sum()) + shared
            counts[self._place[group.page_class]] += max(together, int(alone.max()))
        return counts

    def _loses(self, group: LaneGroup, need: Need) -> bool:
        """Whether lanes of a sequence come to hold other tokens than all, or nobody shares them."""
        if group.private or (need.evicts and not group.ordered):
            return True
        return need.tokens > group.slots_at_most(UNBOUNDED, self._chunk_tokens)

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
        rows = np.array([request.row for request in requests], dtype=np.int64)
        counts = np.zeros((len(rows), len(self.page_classes)), dtype=np.int64)
        for table in self.memory.tables.values():
            place = self._place[table.group.page_class]
            kept_aside = self.memory.placement.reserved_pages(table, rows)
            counts[:, place] += table.pages_held(rows) + kept_aside.sum(axis=1)
        for row, request in enumerate(requests):
            for page_class, pages in self.arriving(request).items():
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
        per_slab = (self.memory.pools[c].pages_per_slab for c in self.page_classes)
        slabs = sum(-(-int(n) // pages) for n, pages in zip(counts, per_slab, strict=True))
        return slabs <= self.memory.arena.num_slabs

    def longest_sequence(self, max_positions: int, eviction: EvictionSpec) -> int:
        """Tokens of the longest prompt that fits alone, up to the model's context."""

        def too_long(tokens: int) -> bool:
            return not self.fits_alone(
                Need(tokens, eviction=eviction, streams=eviction.cap is None)
            )

        if not too_long(max_positions):
            return max_positions
        return bisect_left(range(max_positions), True, key=too_long) - 1

    def fit_whole(self, request: Request) -> bool:
        """Whether the whole pool holds a request and its group at their peak.

        The bound is the prompt once and, for each sequence, all that it may generate; of those that
        lose tokens under pressure only, nothing is counted as lost.
        """
        return self.fit_alone(self._whole_counts(request))

    def _whole_counts(self, request: Request) -> Counts:
        width = num_rows(request)
        if width == 1:
            alone: Counts = self.counts([need_of(request, request.final_tokens)])[0]
            return alone
        need = need_of(request, request.final_tokens)
        if request.eviction.when == PRESSURE:
            # lanes that members share are not relieved: that takes pages before it frees any
            need = replace(need, eviction=replace(need.eviction, cap=None, lane_caps=None))
        return self.forked_counts(len(request.prompt_token_ids), [need] * width)

    def refuse_if_never(self, request: Request) -> None:
        """Refuse a request that could not run even alone.

        Raises:
            NeverFits: with the bytes needed and the bytes there.
        """
        longest = self.memory.placement.longest_tokens
        if longest is not None and request.final_tokens > longest:
            raise NeverFits(
                f"{request.final_tokens} tokens: more than the {longest} the store reserves "
                "for a sequence; lower max_tokens, raise --kv-store-tokens or use --kv-store paged"
            )
        if not self.fit_whole(request):
            width, counts = num_rows(request), self._whole_counts(request)
            times, fewer = (f" in {width} beams", "ask for fewer beams, ") * (width > 1) or ("", "")
            if width > 1 and request.eviction.when == PRESSURE:
                fewer += "let them evict with when=prefill_and_decode, "
            raise NeverFits(
                f"{len(request.prompt_token_ids)} prompt tokens and "
                f"{request.params.max_tokens} to generate{times} "
                f"need {self.num_bytes(counts):,} B of KV, the whole pool has "
                f"{self.memory.total_bytes:,} B; {fewer}shorten the prompt, lower max_tokens, "
                "raise --kv-memory or --stream-kv-memory, or cap it with --evict"
            )
