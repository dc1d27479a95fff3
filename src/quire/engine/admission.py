"""Who may enter the KV memory: what can never fit is refused, what cannot fit yet waits."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.engine.request import Request
from quire.errors import NeverFits
from quire.kv.memory import KVMemory
from quire.spec.eviction import EvictionSpec
from quire.spec.pages import LaneGroup, PageClass


@dataclass(frozen=True, slots=True)
class Admission:
    """Optimistic admission: a request enters when its known tokens fit, and a reserve stays free.

    Memory for tokens still to be generated is found as they come; when it runs out the scheduler
    preempts. The reserve keeps that from happening at once.

    Attributes:
        memory: the pool.
        eviction: how many tokens a lane may hold.
        chunk_tokens: largest prefill chunk.
        reserve_share: part of the arena kept free while anything is running, 0 to 1.
    """

    memory: KVMemory
    eviction: EvictionSpec
    chunk_tokens: int
    reserve_share: float

    def peak_pages(self, tokens: int) -> dict[PageClass, int]:
        """Pages of each class a sequence of `tokens` tokens holds at its peak."""
        pages: dict[PageClass, int] = {}
        for group in self.memory.layout.groups:
            most_slots = self._most_slots(group, tokens)
            lane = self.memory.placement.peak_pages(group, np.array([tokens]), most_slots)
            needed = int(lane[0]) * group.num_lanes
            pages[group.page_class] = pages.get(group.page_class, 0) + needed
        return pages

    def _most_slots(self, group: LaneGroup, tokens: int) -> int:
        if group.ordered:
            return group.slots_at_most(tokens, self.chunk_tokens)
        return self.eviction.peak_tokens(tokens)

    def peak_bytes(self, tokens: int) -> int:
        """Bytes of those pages."""
        return sum(c.page_bytes * n for c, n in self.peak_pages(tokens).items())

    def fits_alone(self, tokens: int) -> bool:
        """Whether the whole pool holds a sequence of `tokens` tokens at its peak."""
        pages = self.peak_pages(tokens)
        slabs = sum(-(-n // self.memory.pools[c].pages_per_slab) for c, n in pages.items())
        return slabs <= self.memory.arena.num_slabs

    def longest_sequence(self, max_positions: int) -> int:
        """Tokens of the longest sequence that fits alone, up to the model's context."""
        if self.fits_alone(max_positions):
            return max_positions
        return bisect_left(range(max_positions), True, key=lambda n: not self.fits_alone(n)) - 1

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
        if not self.fits_alone(request.final_tokens):
            raise NeverFits(
                f"{len(request.prompt_token_ids)} prompt tokens and "
                f"{request.params.max_tokens} to generate need "
                f"{self.peak_bytes(request.final_tokens):,} B of KV, the whole pool has "
                f"{self.memory.total_bytes:,} B; shorten the prompt, lower max_tokens, raise "
                "--kv-memory or cap it with --evict"
            )

    def may_enter(self, request: Request, running: Sequence[Request]) -> bool:
        """Whether a waiting request may start now.

        Its known tokens must fit beside what running requests still have to read; a reserve stays
        free unless nothing is running.
        """
        if not self.memory.num_free_rows:
            return False
        if not running:
            return True
        pages = self.peak_pages(request.num_tokens)
        for reader in running:
            if reader.num_uncomputed > 1:
                for page_class, owed in self._owed_pages(reader).items():
                    pages[page_class] += owed
        page_bytes = sum(c.page_bytes * n for c, n in pages.items())
        left_bytes = self.memory.free_bytes - page_bytes
        return (
            self.memory.fits(pages) and left_bytes >= self.reserve_share * self.memory.total_bytes
        )

    def _owed_pages(self, reader: Request) -> dict[PageClass, int]:
        """Pages a running request will still take to hold the tokens it knows."""
        owed = self.peak_pages(reader.num_tokens)
        for table in self.memory.tables.values():
            row = np.array([reader.row])
            held = table.num_pages[row] + self.memory.placement.reserved_pages(table, row)
            owed[table.group.page_class] -= int(held.sum())
        return {page_class: max(0, pages) for page_class, pages in owed.items()}
