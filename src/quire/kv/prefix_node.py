"""What a prefix index is made of: published blocks, and leases on chains of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.kv.memory import KVMemory
from quire.kv.prefix_events import PrefixListener
from quire.kv.prefix_key import Block, PrefixIdentity
from quire.kv.sharing import CachedReference, reference_statistics


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
