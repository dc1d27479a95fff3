"""The start of a prefix load: finds the stored blocks of a request and allocates their pages."""

from collections.abc import Callable, Sequence

from quire.errors import OutOfPages
from quire.kv.prefix_blocks import PrefixLease
from quire.kv.prefix_key import Block, BlockChain
from quire.offload.kv.in_flight_pages import InFlightPages, pages_needed
from quire.offload.kv.in_flight_snapshot import InFlightSnapshot, snapshot_pages_needed
from quire.offload.prefix_store.entries import Place
from quire.offload.prefix_store.prefix_load import PrefixLoad, SnapshotLoad
from quire.offload.prefix_store.prefix_tier import PrefixTier
from quire.scheduler.group import prefillable_tokens
from quire.scheduler.prefix_sharing import PrefixSharing
from quire.scheduler.request import Request


class LoadStarts:
    """Finds stored prefixes and allocates the pages of their loads.

    Args:
        tier: holds the prefixes.
        sharing: the prefix cache, which frees pages.
        clock: seconds.
    """

    def __init__(
        self, tier: PrefixTier, sharing: PrefixSharing, clock: Callable[[], float]
    ) -> None:
        assert sharing.prefix is not None, "a prefix load needs the prefix cache"
        self._tier, self._memory, self._sharing = tier, tier.memory, sharing
        self._block_tokens, self._clock = sharing.prefix.block_tokens, clock

    def find(self, request: Request, chain: BlockChain | None) -> list[tuple[Block, Place]]:
        """The stored blocks after a request's cached prefix, up to one with its statistics."""
        used = request.memory.statistics
        if chain is None or not self.can_load(request):
            return []
        at, most = request.progress.num_computed, self._most_tokens(request)
        found = self._tier.levels.find(block for block in chain.blocks(most) if block.end > at)
        while used and found and not self._has_snapshot(found[-1][0], used):
            found.pop()
        return found

    def can_load(self, request: Request) -> bool:
        """Whether the prefix of a request may be loaded."""
        shares = isinstance(request.memory.lease, PrefixLease)
        if not shares or request.computes_whole_prompt or self._tier.is_closed:
            return False
        return request.memory.swapped is None  # a swapped tail follows the recomputed head

    def lacks_blocks(self, request: Request, found: Sequence[tuple[Block, Place]]) -> bool:
        """Whether a request that may load has whole blocks beside those that were found."""
        end = found[-1][0].end if found else request.progress.num_computed
        return self.can_load(request) and self._most_tokens(request) - end >= self._block_tokens

    def _most_tokens(self, request: Request) -> int:
        """Tokens up to which a prefix is loaded; at least one is computed."""
        at = request.progress.num_computed
        return min(at + prefillable_tokens(request), request.exact_tokens + 1) - 1

    def _has_snapshot(self, block: Block, used: frozenset[str]) -> bool:
        return self._tier.levels.place_of(self._tier.snapshots.key(block, used)) is not None

    def allocate(
        self, request: Request, first: int, found: Sequence[tuple[Block, Place]]
    ) -> PrefixLoad | None:
        """Allocate the pages of a load; None if there are too few.

        Args:
            request: a request that has just been admitted.
            first: first token to load.
            found: the blocks that `find` returned.
        """
        end = found[-1][0].end
        used = request.memory.statistics
        needed = pages_needed(self._memory, end - request.progress.num_computed)
        for page_class, count in snapshot_pages_needed(self._memory, used, end).items():
            needed[page_class] = needed.get(page_class, 0) + count
        if not self._sharing.free_pages(needed):
            return None
        try:
            pages = InFlightPages(self._memory, first, end, self._block_tokens)
        except OutOfPages:
            return None
        try:
            snapshot = self._snapshot_load(found[-1][0], used)
        except OutOfPages:
            pages.release()
            return None
        return PrefixLoad(self._tier, pages, found, snapshot, self._clock)

    def _snapshot_load(self, block: Block, used: frozenset[str]) -> SnapshotLoad | None:
        """Load of the statistics at the end of a block; None without statistics."""
        if not used:
            return None
        key = self._tier.snapshots.key(block, used)
        place = self._tier.levels.place_of(key)
        if place is None:
            raise OutOfPages("the statistics were evicted meanwhile")
        pages = InFlightSnapshot(self._memory, used, block.end)
        return SnapshotLoad(pages, key, place, self._tier.snapshots.num_bytes(block.end, used))
