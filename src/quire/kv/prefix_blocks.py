"""What a prefix index is made of: published blocks, and leases on chains of them."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol, runtime_checkable

import numpy as np

from quire.kv.memory import KVMemory
from quire.kv.pages import PageNumbers
from quire.kv.prefix_key import Block, PrefixIdentity
from quire.kv.sharing import CachedReference, reference_statistics
from quire.layout.pages import PageClass

# ---- prefix events -------------------------------------------------------------------------------

# What a prefix index tells whoever follows it: which blocks can be shared from now on, or no more.
#
# A block is some whole pages of tokens, named by the hash of its chain: of all tokens up to its
# end, with salt and policy. Whoever hears of every block knows which prompts find their beginning
# here.

logger = logging.getLogger(__name__)


@runtime_checkable
class PrefixListener(Protocol):
    """Hears of blocks that enter and leave a prefix index. It must not take long."""

    def stored(
        self,
        block_hashes: Sequence[bytes],
        parent_hash: bytes | None,
        token_ids: Sequence[int],
        page_tokens: int,
    ) -> None:
        """Consecutive full blocks of one chain can be shared now.

        Args:
            block_hashes: of each block, in order.
            parent_hash: of the block before the first; None where the first begins the prompt.
            token_ids: of these blocks only, len(block_hashes) * page_tokens of them.
            page_tokens: tokens of a block.
        """

    def removed(self, block_hashes: Sequence[bytes]) -> None:
        """These blocks can be shared no more."""


class PrefixBroadcast:
    """Passes what one index tells to any number of listeners.

    A listener that raises is dropped, and the log says so: who watches must not stop who works.
    """

    def __init__(self) -> None:
        self._listeners: list[PrefixListener] = []

    def subscribe(self, listener: PrefixListener) -> None:
        """Tell `listener` everything from now on."""
        self._listeners.append(listener)

    def stored(
        self,
        block_hashes: Sequence[bytes],
        parent_hash: bytes | None,
        token_ids: Sequence[int],
        page_tokens: int,
    ) -> None:
        """See `PrefixListener.stored`."""
        self._tell(lambda who: who.stored(block_hashes, parent_hash, token_ids, page_tokens))

    def removed(self, block_hashes: Sequence[bytes]) -> None:
        """See `PrefixListener.removed`."""
        self._tell(lambda who: who.removed(block_hashes))

    def _tell(self, say: Callable[[PrefixListener], None]) -> None:
        for listener in tuple(self._listeners):
            try:
                say(listener)
            except Exception:
                self._listeners.remove(listener)
                logger.exception("%s hears of no more prefixes: it raised", type(listener).__name__)


# ---- prefix node ---------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class PrefixNode:
    """One published block.

    Attributes:
        block: key, tokens and end.
        parent: the node before it; None for the first block.
        cached_reference: its pages.
        statistics: copies of the private pages of rows that ended here, by the names of their
            groups: what was remembered of the chain's tokens.
        is_public: whether all tenants may use it.
        num_users: leases that hold it.
    """

    block: Block
    parent: "PrefixNode | None"
    cached_reference: CachedReference
    statistics: dict[frozenset[str], CachedReference] = field(default_factory=dict)
    is_public: bool = False
    num_users: int = 1

    def lacks(self, memory: KVMemory, row: int) -> bool:
        """Whether a row has statistics of a kind that is not kept here."""
        used = memory.statistics_of(row)
        return bool(used) and used not in self.statistics

    def remember(self, memory: KVMemory, row: int) -> None:
        """Keep the statistics of a row that has just read up to here, where there is room."""
        cached_reference = reference_statistics(memory, row) if self.lacks(memory, row) else None
        if cached_reference is not None:
            self.statistics[memory.statistics_of(row)] = cached_reference

    def statistics_bytes(self, memory: KVMemory) -> int:
        """Bytes of the copies kept here."""
        return sum(
            pages.size * memory.tables[name].group.page_class.page_bytes
            for cached_reference in self.statistics.values()
            for name, pages in cached_reference.pages.items()
        )

    def continues(self, parent: "PrefixNode | None", block: Block) -> bool:
        """Whether a node found by a key is really this block behind this parent."""
        return self.block.tokens == block.tokens and self.parent is parent


@dataclass(slots=True, eq=False)
class PrefixLease:
    """What one sequence uses and publishes.

    Attributes:
        identity: who may share it.
        nodes: the chain from the first block on.
        publishes: whether it may add to the chain.
        known_tokens: tokens of the chain that was found, those included of which nothing is
            remembered that the sequence needs.
    """

    identity: PrefixIdentity
    nodes: list[PrefixNode] = field(default_factory=list)
    publishes: bool = True
    known_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of the chain."""
        return self.nodes[-1].block.end if self.nodes else 0


def _chains(nodes: Sequence[PrefixNode]) -> list[list[PrefixNode]]:
    """Nodes in their order, cut where one does not follow the one before it."""
    chains: list[list[PrefixNode]] = []
    for node in nodes:
        if chains and node.parent is chains[-1][-1]:
            chains[-1].append(node)
        else:
            chains.append([node])
    return chains


def tell_stored(listener: PrefixListener, nodes: Sequence[PrefixNode], block_tokens: int) -> None:
    """Tell of new nodes, chain by chain."""
    for chain in _chains(nodes):
        parent = None if chain[0].parent is None else chain[0].parent.block.key
        keys = [node.block.key for node in chain]
        tokens = [token for node in chain for token in node.block.token_ids]
        listener.stored(keys, parent, tokens, block_tokens)


# ---- prefix idle ---------------------------------------------------------------------------------

# Published blocks that nobody uses: the cache, longest unused first.


class IdleNodes:
    """What can be dropped at no cost to anybody who runs, and how many bytes that is.

    Args:
        memory: whose pages they hold.
        block_pages: of each class in a block.

    Attributes:
        block_bytes: of a block's pages.
        num_bytes: of these blocks, copies of statistics among it. Copies are made of blocks in use
            only, so the sum changes where blocks come and go and nowhere else.
    """

    def __init__(self, memory: KVMemory, block_pages: Mapping[PageClass, int]) -> None:
        self._memory, self._block_pages = memory, block_pages
        self.block_bytes = sum(c.page_bytes * n for c, n in block_pages.items())
        self._nodes: OrderedDict[PrefixNode, None] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[PrefixNode]:
        return iter(self._nodes)

    def add(self, node: PrefixNode) -> None:
        """Nobody uses this one any more."""
        self._nodes[node] = None
        self.num_bytes += self._bytes_of(node)

    def discard(self, node: PrefixNode) -> None:
        """This one is used again, or gone."""
        if node in self._nodes:
            del self._nodes[node]
            self.num_bytes -= self._bytes_of(node)

    def oldest(self, number: int) -> list[PrefixNode]:
        """The longest unused, or all there are."""
        return list(islice(self._nodes, number))

    def blocks_short(self, pages: Mapping[PageClass, int]) -> int:
        """Blocks that must go at least before so many pages fit: one pass instead of many."""
        short, slabs = 1, self._memory.arena.num_free_slabs
        for page_class, of_block in self._block_pages.items():
            pool = self._memory.pools[page_class]
            missing = pages.get(page_class, 0) - pool.num_free - slabs * pool.pages_per_slab
            short = max(short, -(-missing // of_block))
        return short

    def _bytes_of(self, node: PrefixNode) -> int:
        return self.block_bytes + node.statistics_bytes(self._memory)


# ---- prefix pages --------------------------------------------------------------------------------

# Whose pages they are: the published blocks that hold some pages, with all that follows them.


def holders(
    memory: KVMemory, nodes: Iterable[PrefixNode], page_class: PageClass, pages: PageNumbers
) -> list[PrefixNode]:
    """Nodes that hold one of these pages beside one other holder, and all nodes behind those.

    A chain without its middle is never found again, and would stand in the way of a new one.

    Args:
        memory: whose pages they are.
        nodes: to look at.
        page_class: of the pages.
        pages: their numbers.
    """
    counts = memory.pools[page_class].ref_counts
    wanted = np.zeros(len(counts), dtype=bool)
    wanted[pages[counts[pages] == 2]] = True
    groups = [g.name for g in memory.layout.groups if not g.private and g.page_class == page_class]
    found: set[PrefixNode] = set()
    for node in sorted(nodes, key=lambda node: node.block.end):
        named = (wanted[node.cached_reference.pages[name]] for name in groups)
        if node.parent in found or any(part.any() for part in named):
            found.add(node)
    return sorted(found, key=lambda node: -node.block.end)
