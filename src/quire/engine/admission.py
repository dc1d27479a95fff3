"""Who may enter the KV memory: what can never fit is refused, what cannot fit yet waits."""

from bisect import bisect_left
from dataclasses import dataclass

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
            needed = group.page_class.pages_for(self._peak_slots(group, tokens)) * group.num_lanes
            pages[group.page_class] = pages.get(group.page_class, 0) + needed
        return pages

    def _peak_slots(self, group: LaneGroup, tokens: int) -> int:
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
        if not self.fits_alone(request.final_tokens):
            raise NeverFits(
                f"request {request.request_id}: {len(request.prompt_token_ids)} prompt tokens and "
                f"{request.params.max_tokens} to generate need "
                f"{self.peak_bytes(request.final_tokens):,} B of KV, the whole pool has "
                f"{self.memory.total_bytes:,} B; shorten the prompt, lower max_tokens, raise "
                "--kv-memory or cap it with --evict"
            )

    def may_enter(self, request: Request, *, alone: bool) -> bool:
        """Whether a waiting request may start now.

        Args:
            request: not yet in the memory.
            alone: nothing else is running: the reserve does not count.
        """
        if not self.memory.num_free_rows:
            return False
        if alone:
            return True
        pages = self.peak_pages(request.num_tokens)
        reserve = int(self.reserve_share * self.memory.arena.num_slabs)
        slabs = sum(self.memory.pools[c].slabs_needed(n) for c, n in pages.items())
        return slabs + reserve <= self.memory.arena.num_free_slabs
