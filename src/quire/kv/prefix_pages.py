"""Whose pages they are: the published blocks that hold some pages, with all that follows them."""

from collections.abc import Iterable

import numpy as np

from quire.kv.memory import KVMemory
from quire.kv.pages import PageNumbers
from quire.kv.prefix_node import PrefixNode
from quire.layout.pages import PageClass


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
