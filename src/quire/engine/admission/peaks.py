"""Pages a request comes to hold, and which requests the pool can never hold."""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.engine.group import num_rows
from quire.engine.request import Request
from quire.errors import NeverFits
from quire.kv.memory import KVMemory
from quire.spec.eviction import EvictionSpec
from quire.spec.pages import LaneGroup, PageClass

Counts = NDArray[np.int64]
UNBOUNDED = 1 << 60


class Peaks:
    """Arithmetic of pages by number of tokens, for many sequences at once.

    Args:
        memory: the pool.
        eviction: how many tokens a lane may hold.
        chunk_tokens: largest prefill chunk.

    Attributes:
        page_classes: what the last axis of every array of counts stands for.
    """

    def __init__(self, memory: KVMemory, eviction: EvictionSpec, chunk_tokens: int) -> None:
        self.memory = memory
        self.page_classes = memory.layout.page_classes
        self._place = {page_class: i for i, page_class in enumerate(self.page_classes)}
        self._bytes = np.array([c.page_bytes for c in self.page_classes], dtype=np.int64)
        self._groups = [
            (group, self._place[group.page_class], _most_slots(group, eviction, chunk_tokens))
            for group in memory.layout.groups
        ]

    def counts(self, tokens: Sequence[int] | Counts) -> Counts:
        """Pages [sequences, page classes] that sequences of `tokens` tokens hold at their peaks."""
        lengths = np.asarray(tokens, dtype=np.int64)
        counts = np.zeros((len(lengths), len(self.page_classes)), dtype=np.int64)
        for group, place, most in self._groups:
            pages = self.memory.placement.peak_pages(group, lengths, most)
            counts[:, place] += pages * group.num_lanes
        return counts

    def forked_counts(self, shared_tokens: int, tokens: Sequence[int]) -> Counts:
        """Pages [page classes] that sequences forked behind `shared_tokens` hold at their peak.

        Whole pages of what they share count once, all others for each: a bound for sequences that
        differ from there on. Lanes with a window or a cap may come to share nothing.

        Args:
            shared_tokens: length of what all have in common.
            tokens: length of each.
        """
        lengths = np.asarray(tokens, dtype=np.int64)
        counts = np.zeros(len(self.page_classes), dtype=np.int64)
        for group, place, most in self._groups:
            per_page = group.page_class.tokens
            shared = shared_tokens // per_page if lengths.max() <= most else 0
            # decoding, a window lane holds less than while a prompt is read in chunks
            decoding = group.slots_at_most(UNBOUNDED, 1) if group.ordered else most
            private = -(-np.minimum(lengths, decoding) // per_page) - shared
            alone = -(-min(int(lengths.max()), most) // per_page)
            counts[place] += max(int(private.sum()) + shared, alone) * group.num_lanes
        return counts

    def shared_tokens(self, request: Request) -> int:
        """Tokens whose pages the members of a group will share to the end."""
        if any(request.final_tokens > most for _, _, most in self._groups):
            return 0
        page_tokens = max(group.page_class.tokens for group, _, _ in self._groups)
        return len(request.prompt_token_ids) // page_tokens * page_tokens

    def held(self, requests: Sequence[Request]) -> Counts:
        """Pages [requests, page classes] that running requests refer to, or keep aside, now."""
        rows = np.array([request.row for request in requests], dtype=np.int64)
        counts = np.zeros((len(rows), len(self.page_classes)), dtype=np.int64)
        for table in self.memory.tables.values():
            place = self._place[table.group.page_class]
            kept_aside = self.memory.placement.reserved_pages(table, rows)
            counts[:, place] += (table.num_pages[rows] + kept_aside).sum(axis=1)
        return counts

    def owed(self, requests: Sequence[Request], tokens: Sequence[int] | Counts) -> Counts:
        """Pages [requests, page classes] they will still take to hold so many tokens each."""
        owed: Counts = np.maximum(self.counts(tokens) - self.held(requests), 0)
        return owed

    def by_class(self, counts: Counts) -> dict[PageClass, int]:
        """One row of counts under the names of its classes."""
        return {c: int(n) for c, n in zip(self.page_classes, counts, strict=True)}

    def num_bytes(self, counts: Counts) -> int:
        """Bytes of one row of counts."""
        return int(counts @ self._bytes)

    def peak_pages(self, tokens: int) -> dict[PageClass, int]:
        """Pages of each class a sequence of `tokens` tokens holds at its peak."""
        return self.by_class(self.counts([tokens])[0])

    def peak_bytes(self, tokens: int) -> int:
        """Bytes of those pages."""
        return self.num_bytes(self.counts([tokens])[0])

    def fits_alone(self, tokens: int) -> bool:
        """Whether the whole pool holds a sequence of `tokens` tokens at its peak."""
        return self.fit_alone(self.counts([tokens])[0])

    def fit_alone(self, counts: Counts) -> bool:
        """Whether the whole pool holds so many pages of each class."""
        per_slab = (self.memory.pools[c].pages_per_slab for c in self.page_classes)
        slabs = sum(-(-int(n) // pages) for n, pages in zip(counts, per_slab, strict=True))
        return slabs <= self.memory.arena.num_slabs

    def longest_sequence(self, max_positions: int) -> int:
        """Tokens of the longest sequence that fits alone, up to the model's context."""
        if self.fits_alone(max_positions):
            return max_positions
        return bisect_left(range(max_positions), True, key=lambda n: not self.fits_alone(n)) - 1

    def fit_whole(self, request: Request) -> bool:
        """Whether the whole pool holds a request and its group at their peak.

        The bound is the prompt once and, for each sequence, all that it may generate.
        """
        return self.fit_alone(self._whole_counts(request))

    def _whole_counts(self, request: Request) -> Counts:
        width = num_rows(request)
        if width == 1:
            alone: Counts = self.counts([request.final_tokens])[0]
            return alone
        return self.forked_counts(len(request.prompt_token_ids), [request.final_tokens] * width)

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
            raise NeverFits(
                f"{len(request.prompt_token_ids)} prompt tokens and "
                f"{request.params.max_tokens} to generate{times} "
                f"need {self.num_bytes(counts):,} B of KV, the whole pool has "
                f"{self.memory.total_bytes:,} B; {fewer}shorten the prompt, lower max_tokens, "
                "raise --kv-memory or cap it with --evict"
            )


def _most_slots(group: LaneGroup, eviction: EvictionSpec, chunk_tokens: int) -> int:
    """Slots a lane of any sequence can come to hold."""
    if group.ordered:
        return group.slots_at_most(UNBOUNDED, chunk_tokens)
    return eviction.peak_tokens(UNBOUNDED)
