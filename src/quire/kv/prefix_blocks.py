"""Parts of the prefix index: published blocks, leases on chains of blocks, and block events."""

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

# Events of a prefix index: blocks stored and blocks removed.
#
# A block is a number of whole pages. Its name is the hash of its chain: of all tokens up to its
# end, with salt and policy. A listener that receives every event knows which prefixes are cached.

logger = logging.getLogger(__name__)


@runtime_checkable
class PrefixListener(Protocol):
    """Receives the events of a prefix index. Its methods must return quickly."""

    def stored(
        self,
        block_hashes: Sequence[bytes],
        parent_hash: bytes | None,
        token_ids: Sequence[int],
        page_tokens: int,
    ) -> None:
        """Consecutive full blocks of one chain can be shared now; None: it starts the prompt."""

    def removed(self, block_hashes: Sequence[bytes]) -> None:
        """Handle removed blocks: they can no longer be shared."""


class PrefixBroadcast:
    """Forwards the events of one index to any number of listeners.

    A listener that raises is removed and the error is logged: a listener must not stop the engine.
    """

    def __init__(self) -> None:
        self._listeners: list[PrefixListener] = []

    def subscribe(self, listener: PrefixListener) -> None:
        self._listeners.append(listener)

    def stored(
        self,
        block_hashes: Sequence[bytes],
        parent_hash: bytes | None,
        token_ids: Sequence[int],
        page_tokens: int,
    ) -> None:
        self._notify(
            lambda listener: listener.stored(block_hashes, parent_hash, token_ids, page_tokens)
        )

    def removed(self, block_hashes: Sequence[bytes]) -> None:
        self._notify(lambda listener: listener.removed(block_hashes))

    def _notify(self, call: Callable[[PrefixListener], None]) -> None:
        for listener in tuple(self._listeners):
            try:
                call(listener)
            except Exception:
                self._listeners.remove(listener)
                logger.exception(
                    "prefix listener %s raised and was removed", type(listener).__name__
                )


@dataclass(slots=True, eq=False)
class PrefixNode:
    """One published block."""

    block: Block
    parent: "PrefixNode | None"  # None for the first block
    cached_reference: CachedReference
    # snapshots by the names of their private groups, of rows that ended at this block
    statistics: dict[frozenset[str], CachedReference] = field(default_factory=dict)
    is_public: bool = False
    num_users: int = 1  # leases that hold the block
    owner: str = ""  # tenant; "" if all may use it
    idle_since_s: float = 0.0  # when the last lease was returned, on the index's clock

    def lacks(self, memory: KVMemory, row: int) -> bool:
        used = memory.statistics_of(row)
        return bool(used) and used not in self.statistics

    def snapshot(self, memory: KVMemory, row: int) -> None:
        """Copy the statistics of a row that ends at this block, if free pages suffice."""
        cached_reference = reference_statistics(memory, row) if self.lacks(memory, row) else None
        if cached_reference is not None:
            self.statistics[memory.statistics_of(row)] = cached_reference

    def statistics_bytes(self, memory: KVMemory) -> int:
        return sum(
            pages.size * memory.tables[name].group.page_class.page_bytes
            for cached_reference in self.statistics.values()
            for name, pages in cached_reference.pages.items()
        )

    def continues(self, parent: "PrefixNode | None", block: Block) -> bool:
        return self.block.tokens == block.tokens and self.parent is parent


@dataclass(slots=True, eq=False)
class PrefixLease:
    """The chain of blocks that one sequence uses and publishes."""

    identity: PrefixIdentity
    nodes: list[PrefixNode] = field(default_factory=list)  # from the first block on
    publishes: bool = True  # whether the sequence may extend the chain
    known_tokens: int = 0  # of the longest chain found, also without the needed statistics

    @property
    def tokens(self) -> int:
        return self.nodes[-1].block.end if self.nodes else 0


def _chains(nodes: Sequence[PrefixNode]) -> list[list[PrefixNode]]:
    """Split nodes into chains; each node of a chain is the child of the node before it."""
    chains: list[list[PrefixNode]] = []
    for node in nodes:
        if chains and node.parent is chains[-1][-1]:
            chains[-1].append(node)
        else:
            chains.append([node])
    return chains


def notify_stored(listener: PrefixListener, nodes: Sequence[PrefixNode], block_tokens: int) -> None:
    """Notify a listener of new nodes, chain by chain."""
    for chain in _chains(nodes):
        parent = None if chain[0].parent is None else chain[0].parent.block.key
        keys = [node.block.key for node in chain]
        tokens = [token for node in chain for token in node.block.token_ids]
        listener.stored(keys, parent, tokens, block_tokens)


# Published blocks that no running request uses: the prefix cache, least recently used first.


class IdleNodes:
    """Unused blocks, which can be evicted without affecting a running request, and their bytes."""

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
        self._nodes[node] = None
        self.num_bytes += self._bytes_of(node)

    def discard(self, node: PrefixNode) -> None:
        """Remove a node that is used again or was evicted; ignore nodes that are not here."""
        if node in self._nodes:
            del self._nodes[node]
            self.num_bytes -= self._bytes_of(node)

    def oldest(self, number: int) -> list[PrefixNode]:
        """Return the `number` least recently used nodes, or all if there are fewer."""
        return list(islice(self._nodes, number))

    def blocks_short(self, pages: Mapping[PageClass, int]) -> int:
        """Return a lower bound on the blocks to evict so that these pages fit."""
        short, slabs = 1, self._memory.arena.num_free_slabs
        for page_class, of_block in self._block_pages.items():
            pool = self._memory.pools[page_class]
            missing = pages.get(page_class, 0) - pool.num_free - slabs * pool.pages_per_slab
            short = max(short, -(-missing // of_block))
        return short

    def _bytes_of(self, node: PrefixNode) -> int:
        return self.block_bytes + node.statistics_bytes(self._memory)


# The published blocks that reference some pages, with all blocks that follow them.


def blocks_of_pages(
    memory: KVMemory, nodes: Iterable[PrefixNode], page_class: PageClass, pages: PageNumbers
) -> list[PrefixNode]:
    """Return the nodes that reference one of these pages, and all their descendants.

    Only pages with exactly one other reference count. The descendants are included because a chain
    with a missing block can neither be found nor published again.
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
