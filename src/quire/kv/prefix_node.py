"""What a prefix index is made of: published blocks, and leases on chains of them."""

from dataclasses import dataclass, field

from quire.kv.prefix_key import Block, PrefixIdentity
from quire.kv.sharing import Loan


@dataclass(slots=True, eq=False)
class PrefixNode:
    """One published block.

    Attributes:
        block: key, tokens and end.
        parent: the node before it; None for the first block.
        loan: its pages.
        statistics: copies of the private pages of a row that ended here; None where none did.
        is_public: whether all tenants may use it.
        num_users: leases that hold it.
    """

    block: Block
    parent: "PrefixNode | None"
    loan: Loan
    statistics: Loan | None = None
    is_public: bool = False
    num_users: int = 1


@dataclass(slots=True, eq=False)
class PrefixLease:
    """What one sequence uses and publishes.

    Attributes:
        identity: who may share it.
        nodes: the chain from the first block on.
        publishes: whether it may add to the chain.
    """

    identity: PrefixIdentity
    nodes: list[PrefixNode] = field(default_factory=list)
    publishes: bool = True

    @property
    def tokens(self) -> int:
        """Tokens of the chain."""
        return self.nodes[-1].block.end if self.nodes else 0
