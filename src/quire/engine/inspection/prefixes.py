"""The prefix cache as a tree of chains: blocks without a branch between them are one chain.

prompt A   b0 b1 b2 b3          chain 0: b0 b1       (parent: none)
prompt B   b0 b1 c2             chain 1: b2 b3, chain 2: c2   (parent: chain 0)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from quire.kv.prefix import PrefixNode

if TYPE_CHECKING:
    from quire.engine.core import Engine

MAX_BLOCKS = 20_000
"""Blocks that are read for a tree; of a larger cache, the ones that were published first."""
FIRST_TOKENS = 48
"""Tokens of a chain whose text is shown."""


@dataclass(slots=True)
class PrefixChain:
    """Consecutive blocks of one prefix."""

    owner: str  # tenant that published it; "" if all may use it
    parent: int  # index of the chain before it; -1 for none
    start: int  # position of its first token
    blocks: int = 0
    users: int = 0  # leases on its first block
    idle_since_s: float = 0.0  # on the engine's clock; infinity while a request uses it
    token_ids: list[int] = field(default_factory=list)  # its first tokens


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Chains of the prefix cache, parents before their children."""

    enabled: bool
    block_tokens: int = 0
    block_bytes: int = 0
    num_blocks: int = 0  # blocks that were read
    num_left_out: int = 0  # blocks that were not read
    chains: Sequence[PrefixChain] = ()


@dataclass(frozen=True, slots=True)
class _Block:
    """A copy of a block, for use after the engine has continued."""

    node: PrefixNode
    users: int
    idle_since_s: float


@dataclass(frozen=True, slots=True)
class Blocks:
    """A copy of the blocks of the prefix cache."""

    tree: PrefixTree  # without its chains
    blocks: Sequence[_Block] = ()  # parents before their children

    def chains(self) -> list[PrefixChain]:
        """Join blocks to chains; can run in another thread, because blocks never change."""
        children: dict[PrefixNode, int] = {}
        for block in self.blocks:
            if block.node.parent is not None:
                children[block.node.parent] = children.get(block.node.parent, 0) + 1
        chains: list[PrefixChain] = []
        of_node: dict[PrefixNode, int] = {}
        for block in self.blocks:
            number = self._chain_of(block, children, chains, of_node)
            of_node[block.node] = number
            self._extend(chains[number], block)
        return chains

    def _chain_of(
        self,
        block: _Block,
        children: dict[PrefixNode, int],
        chains: list[PrefixChain],
        of_node: dict[PrefixNode, int],
    ) -> int:
        node = block.node
        before = -1 if node.parent is None else of_node.get(node.parent, -1)
        if before >= 0 and node.parent is not None:
            chain = chains[before]
            alone = children[node.parent] == 1
            if alone and chain.owner == node.owner and chain.users == block.users:
                return before
        start = node.block.end - self.tree.block_tokens
        chains.append(PrefixChain(node.owner, before, start, users=block.users))
        return len(chains) - 1

    @staticmethod
    def _extend(chain: PrefixChain, block: _Block) -> None:
        chain.blocks += 1
        used_s = math.inf if block.users else block.idle_since_s
        chain.idle_since_s = max(chain.idle_since_s, used_s)
        if len(chain.token_ids) < FIRST_TOKENS:
            left = FIRST_TOKENS - len(chain.token_ids)
            chain.token_ids += block.node.block.token_ids[:left]


def read_prefixes(engine: "Engine", tenant: str | None) -> Blocks:
    """Copy the blocks; of a tenant only its own and public ones, without the uses of others."""
    index = engine.scheduler.sequence_memory.prefix
    if index is None:
        return Blocks(PrefixTree(enabled=False))
    wanted = (n for n in index.nodes() if tenant is None or n.owner in ("", tenant))
    blocks = [_Block(n, n.num_users, n.idle_since_s) for n in islice(wanted, MAX_BLOCKS)]
    if tenant is not None:
        blocks = [
            _Block(b.node, 0 if b.node.is_public else b.users, b.idle_since_s) for b in blocks
        ]
    left_out = len(index) - len(blocks) if tenant is None else 0
    tree = PrefixTree(
        enabled=True,
        block_tokens=index.block_tokens,
        block_bytes=index.block_bytes,
        num_blocks=len(blocks),
        num_left_out=left_out,
    )
    return Blocks(tree, blocks)
