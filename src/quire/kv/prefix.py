r"""The prefix index: pages of tokens that were read before, found again by a chain of hashes.

    request A   [b0][b1][b2]            nodes  b0 - b1 - b2
    request B   [b0][b1][c2]                         \- c2

A node is one block of tokens: a page of every lane, lent by the row that computed it. Nodes in use
stay; those that nobody uses any more are the cache, and go when room is needed: the longest unused
first, and of one chain its tail before its head, so that what remains can always be found.

A node is published when its tokens are scheduled, so that requests of the same step can share it:
in each layer a step writes all its keys and values before anybody attends. If the step fails, the
nodes it published are withdrawn. Only exact KV is published: a row that has evicted tokens
publishes nothing more. What a policy remembers is kept beside a node's pages, for each set of
statistics apart; a sequence whose policy needs some begins behind a node that has them.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError
from quire.kv.listeners import MemoryListener
from quire.kv.memory import KVMemory
from quire.kv.pages import PageNumbers
from quire.kv.prefix_blocks import (
    IdleNodes,
    PrefixLease,
    PrefixListener,
    PrefixNode,
    holders,
    tell_stored,
)
from quire.kv.prefix_key import Block, PrefixIdentity, blocks_of
from quire.kv.sharing import (
    borrow,
    reference_blocks,
    referenced_statistics_pages,
    release_references,
)
from quire.layout.pages import PageClass


class PrefixIndex(MemoryListener):
    """Finds, keeps and drops cached prefixes of one KV memory.

    Args:
        memory: whose pages are shared.
        listener: hears of blocks that come and go.

    Attributes:
        block_tokens: tokens of a block: whole pages in every lane.
        queried_tokens, hit_tokens: of all prompts that looked for a prefix so far.
    """

    def __init__(self, memory: KVMemory, listener: PrefixListener | None = None) -> None:
        shared = [group for group in memory.layout.groups if not group.private]
        self.memory = memory
        self.block_tokens = math.lcm(*(group.page_class.tokens for group in shared))
        pages: Counter[PageClass] = Counter()
        for group in shared:
            columns = self.block_tokens // group.page_class.tokens
            pages[group.page_class] += columns * group.num_lanes
        self.queried_tokens = self.hit_tokens = 0
        self._keepers: list[Callable[[Sequence[PrefixNode]], None]] = []
        self._listener = listener
        self._nodes: dict[bytes, PrefixNode] = {}
        self._idle = IdleNodes(memory, pages)
        self._public: dict[PrefixNode, None] = {}  # counted every step, so kept apart
        self._pending: list[PrefixNode] = []  # published in the step that is being planned
        self.block_bytes = self._idle.block_bytes
        memory.listeners.subscribe(self)

    # ---- numbers -------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def num_idle(self) -> int:
        """Blocks that nobody uses."""
        return len(self._idle)

    @property
    def idle_bytes(self) -> int:
        """Bytes that can be had by dropping what nobody uses, copies of statistics among it."""
        return self._idle.num_bytes

    def public_references(self) -> list[Mapping[str, PageNumbers]]:
        """Pages of blocks that all tenants share, by lane group."""
        return [node.cached_reference.pages for node in self._public]

    # ---- looking up ----------------------------------------------------------------------------

    def match(
        self,
        identity: PrefixIdentity,
        token_ids: Sequence[int],
        *,
        statistics: frozenset[str] = frozenset(),
    ) -> PrefixLease:
        """Hold the longest published prefix of some tokens.

        Args:
            identity: who asks.
            token_ids: what is known of the sequence. At least one token is left to compute.
            statistics: names of private groups; only up to a block that has a snapshot of them.

        Returns:
            A lease, to be given back with `release`; without nodes where nothing was found.
        """
        blocks = blocks_of(identity, token_ids[: len(token_ids) - 1], self.block_tokens)
        return self.match_blocks(identity, blocks, statistics=statistics)

    def match_blocks(
        self,
        identity: PrefixIdentity,
        blocks: Iterable[Block],
        *,
        statistics: frozenset[str] = frozenset(),
    ) -> PrefixLease:
        """Hold the longest published prefix of some blocks; see `match`."""
        nodes: list[PrefixNode] = []
        for block in blocks:
            node = self._nodes.get(block.key)
            if node is None or not node.continues(nodes[-1] if nodes else None, block):
                break
            nodes.append(node)
        known_tokens = nodes[-1].block.end if nodes else 0
        while statistics and nodes and statistics not in nodes[-1].statistics:
            nodes.pop()
        self._use(nodes)
        return PrefixLease(identity, nodes, known_tokens=known_tokens)

    def count(self, queried_tokens: int, lease: PrefixLease) -> None:
        """Note that a prompt has entered with what it found."""
        self.queried_tokens += queried_tokens
        self.hit_tokens += lease.tokens

    def start(self, lease: PrefixLease, *, statistics: frozenset[str] = frozenset()) -> int:
        """Start a sequence from a lease that has nodes; return its row.

        Args:
            lease: was matched for these statistics.
            statistics: names of the private groups that the sequence uses.

        Raises:
            OutOfPages: no row, or no pages for private groups; nothing was changed.
        """
        snapshot = lease.nodes[-1].statistics[statistics] if statistics else None
        cached_references = [node.cached_reference for node in lease.nodes]
        return borrow(self.memory, cached_references, snapshot, used=statistics)

    def share(self, lease: PrefixLease) -> PrefixLease:
        """A second lease on the same nodes, for a sequence forked from the first's."""
        self._use(lease.nodes)
        return PrefixLease(lease.identity, list(lease.nodes), lease.publishes, lease.known_tokens)

    def _use(self, nodes: Sequence[PrefixNode]) -> None:
        for node in nodes:
            node.num_users += 1
            self._idle.discard(node)

    def release(self, lease: PrefixLease) -> None:
        """Give a lease back: its sequence is gone, or its pages are no longer the chain's."""
        for node in reversed(lease.nodes):  # the tail is the first to be dropped later
            node.num_users -= 1
            if not node.num_users and self._nodes.get(node.block.key) is node:
                self._idle.add(node)
        lease.nodes.clear()
        lease.publishes = False

    # ---- publishing ----------------------------------------------------------------------------

    def publish(self, lease: PrefixLease, row: int, token_ids: Sequence[int]) -> None:
        """Publish the blocks that a row has filled since the last time.

        Args:
            lease: of the row.
            row: has grown to hold its tokens; they are written in this step.
            token_ids: from the lease's end on, up to the row's length.
        """
        parent = lease.nodes[-1] if lease.nodes else None
        key = parent.block.key if parent else None
        size, start = self.block_tokens, lease.tokens
        blocks = blocks_of(lease.identity, token_ids, size, start=start, parent_key=key)
        for block in blocks:
            node = self._nodes.get(block.key)
            if node is None:  # then nothing behind it is known either
                lease.publishes = self._add([block, *blocks], lease, row)
            elif node.continues(parent, block):
                self._use([node])  # somebody else was first: both hold pages of these tokens
                lease.nodes.append(node)
                parent = node
            else:  # two texts with one key: this one stays unpublished
                lease.publishes = False
                return

    def _add(self, blocks: list[Block], lease: PrefixLease, row: int) -> bool:
        """Publish blocks behind a lease's; False where one of them could not be.

        Its key may be another text's, or a window lane has let go of a part of it already.
        """
        distinct = {block.key for block in blocks}
        # `isdisjoint` would walk over all nodes there are: they are no set
        if len(distinct) < len(blocks) or any(key in self._nodes for key in distinct):
            return False
        try:
            cached_references = reference_blocks(
                self.memory, row, lease.tokens, blocks[-1].end, self.block_tokens
            )
        except ConfigError:
            return False
        for block, cached_reference in zip(blocks, cached_references, strict=True):
            is_public = block.end <= lease.identity.public_tokens
            parent = lease.nodes[-1] if lease.nodes else None
            node = PrefixNode(block, parent, cached_reference, is_public=is_public)
            self._nodes[block.key] = node
            if is_public:
                self._public[node] = None
            self._pending.append(node)
            lease.nodes.append(node)
        return True

    def confirm(self) -> None:
        """The step has run: what it published is there."""
        if self._listener is not None:
            tell_stored(self._listener, self._pending, self.block_tokens)
        self._pending.clear()

    def withdraw(self) -> None:
        """The step has failed: what it published is not there."""
        self._forget(self._pending)
        self._pending.clear()

    def is_pending(self, lease: PrefixLease) -> bool:
        """Whether a lease holds blocks that the step being planned has yet to write."""
        return bool(self._pending and lease.nodes and lease.nodes[-1] in self._pending)

    def snapshot(self, lease: PrefixLease, row: int) -> None:
        """Keep the statistics of a row that has just read up to the end of its chain's last block.

        Blocks that nobody uses make way for the copy. Does nothing where there is still no room.
        """
        if not lease.nodes or lease.tokens != int(self.memory.lengths[row]):
            return
        node = lease.nodes[-1]
        pages = referenced_statistics_pages(self.memory, row)
        if node.lacks(self.memory, row) and self._make_room(pages):
            node.remember(self.memory, row)

    def _make_room(self, pages: Mapping[PageClass, int]) -> bool:
        """Drop idle blocks where that is sure to give enough bytes; say whether pages fit."""
        wanted_bytes = sum(page_class.page_bytes * n for page_class, n in pages.items())
        if self.memory.fits(pages):
            return True
        return wanted_bytes <= self.memory.free_bytes + self.idle_bytes and self.reclaim(pages)

    # ---- making room ---------------------------------------------------------------------------

    def reclaim(self, pages: Mapping[PageClass, int]) -> bool:
        """Drop idle blocks until so many more pages of each class fit; say whether they do."""
        dropped: list[bytes] = []
        while self._idle and not self.memory.fits(pages):
            dropped += self._drop(self._idle.oldest(self._idle.blocks_short(pages)))
        self._tell_removed(dropped)
        return self.memory.fits(pages)

    def unpublish(self, page_class: PageClass, pages: PageNumbers) -> NDArray[np.bool_]:
        """Let go of idle blocks whose pages are about to be written, if they cannot be copied.

        Returns:
            [pages] which of these, shared so far, only their row still names.
        """
        if not self.memory.fits({page_class: len(pages)}):
            self._tell_removed(self._drop(holders(self.memory, self._idle, page_class, pages)))
        alone: NDArray[np.bool_] = self.memory.pools[page_class].ref_counts[pages] == 1
        return alone

    def clear(self) -> None:
        """Drop every idle block."""
        self._tell_removed(self._drop(self._idle.oldest(len(self._idle))))

    def keep_all(self) -> None:
        """Have every idle block kept elsewhere too; none is dropped."""
        self._keep(self._idle.oldest(len(self._idle)))

    def on_drop(self, keep: Callable[[Sequence[PrefixNode]], None]) -> None:
        """Call `keep` with idle blocks before they are dropped, if they have been written."""
        self._keepers.append(keep)

    def _keep(self, nodes: Sequence[PrefixNode]) -> None:
        for keep in self._keepers:
            keep(nodes)

    def _drop(self, nodes: Sequence[PrefixNode]) -> list[bytes]:
        """Drop idle blocks; return the keys of those that somebody was told of."""
        written = [node for node in nodes if node not in self._pending]
        self._pending = [node for node in self._pending if node not in nodes]
        self._keep(written)
        self._forget(nodes)
        return [node.block.key for node in written]

    def _tell_removed(self, keys: list[bytes]) -> None:
        if keys and self._listener is not None:
            self._listener.removed(keys)

    def _forget(self, nodes: Sequence[PrefixNode]) -> None:
        cached_references = []
        for node in nodes:
            if self._nodes.get(node.block.key) is node:
                del self._nodes[node.block.key]
            self._idle.discard(node)
            self._public.pop(node, None)
            cached_references += [node.cached_reference, *node.statistics.values()]
        release_references(self.memory, cached_references)
