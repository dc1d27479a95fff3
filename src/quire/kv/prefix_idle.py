"""Published blocks that nobody uses: the cache, longest unused first."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from itertools import islice

from quire.kv.memory import KVMemory
from quire.kv.prefix_node import PrefixNode
from quire.layout.pages import PageClass


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
