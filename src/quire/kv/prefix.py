r"""The prefix index: cached pages of prompt prefixes, looked up by a chain of block hashes.

    request A   [b0][b1][b2]            nodes  b0 - b1 - b2
    request B   [b0][b1][c2]                         \- c2

A node is one block of tokens: whole pages of every lane, shared with the row that computed them.
Nodes used by running requests are never evicted. Unused nodes are the prefix cache and are evicted
when pages are needed: least recently used first, and within a chain the tail before the head, so
every remaining node can still be found.

A node is published when its tokens are scheduled, so that requests of the same step can share it:
in each layer a step writes all keys and values before attention runs. If the step fails, the nodes
it published are withdrawn. Only exact KV is published: a row that has evicted tokens publishes no
further blocks. Snapshots of attention statistics are stored with a node, one for each set of
statistics. A sequence whose policy needs statistics starts after a node that has its set.

A block's name is the hash of its chain: of all tokens up to its end, with salt and policy. A
listener that receives every event (blocks stored, blocks removed) knows which prefixes are cached.

The keys are a chain of hashes over tokens, salt and everything else KV depends on:

    root       = hash(fingerprint)                      model, codec, policy, RoPE scaling variant
    block i    = hash(block i - 1, salt, tokens of i)   salt: empty in the public part, then private

The public part of a prompt (a system prompt that the operator has registered) is shared by all
tenants. From the first block that is not wholly public, keys are salted, so a tenant cannot learn
another tenant's prompts from response times. Keys are 16 bytes; equal keys are verified by
comparing tokens.
"""

import hashlib
import logging
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError
from quire.kv.memory import KVMemory, MemoryListener
from quire.kv.pages import PageNumbers
from quire.kv.sharing import (
    CachedReference,
    LayerReferences,
    extend_from_references,
    reference_blocks,
    reference_statistics,
    referenced_statistics_pages,
    release_references,
    start_from_references,
)
from quire.layout.pages import PageClass

KEY_BYTES = 16
SALT_BYTES = 16


@dataclass(frozen=True, slots=True)
class PrefixIdentity:
    """The identity that two requests must have in common to share a prefix."""

    root: bytes  # key before the first block
    salt: bytes = b""  # of the private part; empty if callers are not separated
    public_tokens: int = 0  # leading tokens that all tenants share
    owner: str = field(default="", compare=False)  # tenant, for reports; not part of the identity


def root_key(*made_by: str) -> bytes:
    """The key before the first block: all that KV depends on besides the preceding tokens."""
    return hashlib.blake2b("\0".join(made_by).encode(), digest_size=KEY_BYTES).digest()


def private_salt(secret: bytes, tenant: str, cache_salt: str) -> bytes:
    """Return a salt that callers cannot choose: only the engine knows the secret."""
    name = f"{tenant}\0{cache_salt}".encode()
    return hashlib.blake2b(name, key=secret, digest_size=SALT_BYTES).digest()


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a prompt: whole pages of tokens."""

    key: bytes  # of the chain up to the block's end
    tokens: bytes  # ids as int64 bytes
    end: int  # position after the block's last token

    @property
    def token_ids(self) -> list[int]:
        return memoryview(self.tokens).cast("q").tolist()


def blocks_of(
    identity: PrefixIdentity,
    token_ids: Sequence[int],
    block_tokens: int,
    *,
    start: int = 0,
    parent_key: bytes | None = None,
) -> Iterator[Block]:
    """Yield the whole blocks of the tokens from `start`, a multiple of `block_tokens`, in order."""
    key = identity.root if parent_key is None else parent_key
    for first in range(0, len(token_ids) - block_tokens + 1, block_tokens):
        # lazy: a lookup stops at the first missing block and hashes no further
        end = start + first + block_tokens
        block = _block(identity, key, token_ids[first : first + block_tokens], end)
        yield block
        key = block.key


class BlockChain:
    """The whole blocks of one sequence; each is hashed once, so tokens must not change."""

    def __init__(
        self,
        identity: PrefixIdentity,
        block_tokens: int,
        read: Callable[[int, int], Sequence[int]],
    ) -> None:
        self.identity = identity
        self._block_tokens, self._read = block_tokens, read
        self._known: list[Block] = []

    def blocks(self, num_tokens: int) -> Iterator[Block]:
        for number in range(num_tokens // self._block_tokens):
            if number == len(self._known):
                self._known.append(self._next())
            yield self._known[number]

    def _next(self) -> Block:
        first = len(self._known) * self._block_tokens
        end = first + self._block_tokens
        key = self._known[-1].key if self._known else self.identity.root
        return _block(self.identity, key, self._read(first, end), end)


def _block(
    identity: PrefixIdentity, parent_key: bytes, token_ids: Sequence[int], end: int
) -> Block:
    tokens = np.array(token_ids, dtype=np.int64).tobytes()
    salt = b"" if end <= identity.public_tokens else identity.salt
    key = hashlib.blake2b(parent_key + salt + tokens, digest_size=KEY_BYTES).digest()
    return Block(key, tokens, end)


logger = logging.getLogger(__name__)

OFFLOADED_AT_ONCE = 16  # blocks; a copy to offload memory holds several


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
    is_offloaded: bool = False  # some of its pages are in offload memory
    num_users: int = 1  # leases that hold the block
    owner: str = ""  # tenant; "" if all may use it
    idle_since_s: float = 0.0  # when the last lease was returned, on the index's clock

    def follows(self, previous: "PrefixNode | None") -> bool:
        """Whether a row can start with both: its offloaded pages are its first ones."""
        if previous is None:
            return True
        return self.cached_reference.pages.keys() >= previous.cached_reference.pages.keys()

    def lacks(self, memory: KVMemory, row: int) -> bool:
        used = memory.kept_with_prefix(memory.statistics_of(row))
        return bool(used) and used not in self.statistics

    def continues(self, parent: "PrefixNode | None", block: Block) -> bool:
        return self.block.tokens == block.tokens and self.parent is parent


@dataclass(slots=True, eq=False)
class PrefixLease:
    """The chain of blocks that one sequence uses and publishes."""

    identity: PrefixIdentity
    nodes: list[PrefixNode] = field(default_factory=list)  # from the first block on
    publishes: bool = True  # whether the sequence may extend the chain
    known_tokens: int = 0  # of the longest chain found, also without the needed statistics
    pinned: frozenset[str] = frozenset()  # statistics after its last node that a row starts from
    complete_from: int = 0  # tokens from which the statistics of a row without a snapshot are exact

    @property
    def tokens(self) -> int:
        return self.nodes[-1].block.end if self.nodes else 0


def notify_stored(listener: PrefixListener, nodes: Sequence[PrefixNode], block_tokens: int) -> None:
    """Notify a listener of new nodes, chain by chain: each node is the child of the one before."""
    chains: list[list[PrefixNode]] = []
    for node in nodes:
        if chains and node.parent is chains[-1][-1]:
            chains[-1].append(node)
        else:
            chains.append([node])
    for chain in chains:
        parent = None if chain[0].parent is None else chain[0].parent.block.key
        keys = [node.block.key for node in chain]
        tokens = [token for node in chain for token in node.block.token_ids]
        listener.stored(keys, parent, tokens, block_tokens)


class IdleNodes:
    """Unused blocks, least recently used first, and their bytes: the prefix cache.

    They can be evicted without affecting a running request.
    """

    def __init__(self, memory: KVMemory, block_pages: Mapping[PageClass, int]) -> None:
        self._memory, self._block_pages = memory, block_pages
        self.block_bytes = sum(c.page_bytes * n for c, n in block_pages.items())
        self._nodes: OrderedDict[PrefixNode, int] = OrderedDict()  # bytes that evicting them frees
        self.num_bytes = 0
        self.num_offloaded = 0  # nodes that have no pages in the KV memory

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[PrefixNode]:
        return iter(self._nodes)

    def add(self, node: PrefixNode, moving: str = "") -> None:
        """Add a node; `moving` is a group whose pages move to offload memory next."""
        self._nodes[node] = num_bytes = self._bytes_of(node, moving)
        self.num_bytes += num_bytes
        self.num_offloaded += not num_bytes

    def discard(self, node: PrefixNode) -> bool:
        """Remove a node that is used again or was evicted; return whether it was here."""
        num_bytes = self._nodes.pop(node, None)
        self.num_bytes -= num_bytes or 0
        self.num_offloaded -= num_bytes == 0
        return num_bytes is not None

    @property
    def num_resident(self) -> int:
        """Number of nodes that have pages in the KV memory."""
        return len(self._nodes) - self.num_offloaded

    def oldest(self, number: int) -> list[PrefixNode]:
        """Return the `number` nodes in the KV memory that were used least recently, or all."""
        return list(islice((node for node, held in self._nodes.items() if held), number))

    def blocks_short(self, pages: Mapping[PageClass, int]) -> int:
        """Return a lower bound on the blocks to evict so that these pages fit."""
        short, slabs = 1, self._memory.arena.num_free_slabs
        for page_class, of_block in self._block_pages.items():
            pool = self._memory.pools[page_class]
            missing = pages.get(page_class, 0) - pool.num_free - slabs * pool.pages_per_slab
            short = max(short, -(-missing // of_block))
        return short

    def _bytes_of(self, node: PrefixNode, moving: str) -> int:
        num_bytes = self.block_bytes
        if node.is_offloaded:
            tables, pages = self._memory.tables, node.cached_reference.pages
            held = [(tables[name].group, numbers) for name, numbers in pages.items()]
            num_bytes = sum(n.size * g.page_class.page_bytes for g, n in held if g.name != moving)
        return num_bytes


Snapshot = tuple[PrefixNode, frozenset[str]]
"""A block, and the names of the private groups that were copied after it."""


class Snapshots:
    """Statistics and states after blocks, least recently used first.

    They are evicted with their blocks, or before them: for others if they have reached their limit
    of bytes, and if a running request uses the block and pages run out. A lookup then ends at an
    earlier block.

    Args:
        memory: the KV memory.
        max_bytes: most bytes of all; None: no limit.

    Attributes:
        num_bytes: bytes of their pages, that they do not share.
    """

    def __init__(self, memory: KVMemory, max_bytes: int | None) -> None:
        self._memory, self.max_bytes = memory, max_bytes
        self._found: OrderedDict[Snapshot, int] = OrderedDict()
        self._pinned: Counter[Snapshot] = Counter()
        self.num_bytes = self._pinned_bytes = 0

    def __len__(self) -> int:
        return len(self._found)

    @property
    def free_bytes(self) -> int:
        """Bytes of those that no request is about to start from."""
        return self.num_bytes - self._pinned_bytes

    def add(self, node: PrefixNode, used: frozenset[str], copy: CachedReference) -> None:
        tables = self._memory.tables
        self._found[node, used] = num_bytes = sum(
            pages.size * tables[name].group.page_class.page_bytes
            for name, pages in copy.pages.items()
        )
        node.statistics[used] = copy
        self.num_bytes += num_bytes

    def remove(self, node: PrefixNode, used: frozenset[str]) -> CachedReference:
        """Remove one; the caller releases its pages."""
        num_bytes = self._found.pop((node, used))
        self.num_bytes -= num_bytes
        if self._pinned.pop((node, used), 0):
            self._pinned_bytes -= num_bytes
        return node.statistics.pop(used)

    def pin(self, node: PrefixNode, used: frozenset[str]) -> None:
        """Keep one, which is in use now, until `unpin`."""
        self._found.move_to_end((node, used))
        if not self._pinned[node, used]:
            self._pinned_bytes += self._found[node, used]
        self._pinned[node, used] += 1

    def unpin(self, node: PrefixNode, used: frozenset[str]) -> None:
        self._pinned[node, used] -= 1
        if not self._pinned[node, used]:
            del self._pinned[node, used]
            self._pinned_bytes -= self._found[node, used]

    def oldest(self) -> Snapshot | None:
        """Return the least recently used one that is not pinned."""
        return next((found for found in self._found if found not in self._pinned), None)

    def exceeds(self, num_bytes: int) -> bool:
        """Whether one of this size does not fit beside the others."""
        return self.max_bytes is not None and self.num_bytes + num_bytes > self.max_bytes


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
        held = node.cached_reference.pages
        named = (wanted[held[name]] for name in groups if name in held)
        if node.parent in found or any(part.any() for part in named):
            found.add(node)
    return sorted(found, key=lambda node: -node.block.end)


class PrefixIndex(MemoryListener):
    """Finds, retains and evicts cached prefixes of one KV memory.

    Args:
        memory: the KV memory.
        listener: receives the events of the index.
        clock: seconds.
        page_tokens: tokens of a block of a layout without pages that sequences share.
        snapshot_bytes: most bytes of statistics and states after blocks; None: no limit.

    Attributes:
        snapshots: statistics and states after blocks.
        block_tokens: tokens of a block; a block is whole pages in every lane.
        queried_tokens: tokens of all prompts that were looked up so far.
        hit_tokens: tokens of these prompts that were found in the cache.
    """

    def __init__(
        self,
        memory: KVMemory,
        listener: PrefixListener | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        page_tokens: int = 1,
        snapshot_bytes: int | None = None,
    ) -> None:
        shared = [group for group in memory.layout.groups if not group.private]
        self.memory = memory
        tokens = [group.page_class.tokens for group in shared]
        self.block_tokens = math.lcm(*tokens) if tokens else page_tokens
        pages: Counter[PageClass] = Counter()
        for group in shared:
            columns = self.block_tokens // group.page_class.tokens
            pages[group.page_class] += columns * group.num_lanes
        self.queried_tokens = self.hit_tokens = 0
        self._on_drop: list[Callable[[Sequence[PrefixNode]], None]] = []
        self._on_write: list[Callable[[Sequence[PrefixNode]], None]] = []
        self._listener, self._clock = listener, clock
        self._nodes: dict[bytes, PrefixNode] = {}
        self._idle = IdleNodes(memory, pages)
        self.snapshots = Snapshots(memory, snapshot_bytes)
        self._public: dict[PrefixNode, None] = {}  # separate because every step counts them
        self._pending: list[PrefixNode] = []  # published in the step that is being scheduled
        self._by_layer: list[tuple[PrefixLease, LayerReferences]] = []  # to be published after it
        self.block_bytes = self._idle.block_bytes
        memory.listeners.subscribe(self)

    # ---- numbers -------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def num_idle(self) -> int:
        """Number of blocks that no running request uses."""
        return len(self._idle)

    @property
    def idle_bytes(self) -> int:
        """Bytes that evicting all unused blocks and all statistics snapshots would free.

        Pages that are only kept to be published are unused too.
        """
        kept_bytes = sum(kept.idle_bytes for _, kept in self._by_layer)
        return self._idle.num_bytes + self.snapshots.free_bytes + kept_bytes

    def nodes(self) -> Iterator[PrefixNode]:
        """Yield all published blocks, parents first; the index must not change meanwhile."""
        yield from self._nodes.values()

    def public_references(self) -> list[Mapping[str, PageNumbers]]:
        """Return the pages of blocks that all tenants share, by lane group."""
        return [node.cached_reference.pages for node in self._public]

    # ---- lookup --------------------------------------------------------------------------------

    def match(
        self,
        identity: PrefixIdentity,
        token_ids: Sequence[int],
        *,
        statistics: frozenset[str] = frozenset(),
    ) -> PrefixLease:
        """Lease the longest published prefix with `statistics` that leaves a token."""
        blocks = blocks_of(identity, token_ids[: len(token_ids) - 1], self.block_tokens)
        return self.match_blocks(identity, blocks, statistics=statistics)

    def match_blocks(
        self,
        identity: PrefixIdentity,
        blocks: Iterable[Block],
        *,
        statistics: frozenset[str] = frozenset(),
        read_at: int = 0,
    ) -> PrefixLease:
        """Lease the longest published prefix after which a sequence can continue.

        Args:
            identity: of the request.
            blocks: of its tokens.
            statistics: names of the private groups that it uses.
            read_at: tokens of the sequence when its statistics are read for the first time. After
                a prefix so far before it that they only depend on later queries, a sequence
                continues without a snapshot.
        """
        nodes = self._nodes_after(None, blocks)
        known_tokens = nodes[-1].block.end if nodes else 0
        kept = self.memory.kept_with_prefix(statistics)

        def continues(node: PrefixNode) -> bool:
            needed = self.memory.kept_with_prefix(kept, read_at - node.block.end)
            return not needed or kept in node.statistics

        while kept and nodes and not continues(nodes[-1]):
            nodes.pop()
        self._use(nodes)
        lease = PrefixLease(identity, nodes, known_tokens=known_tokens)
        if kept and nodes and kept in nodes[-1].statistics:
            lease.pinned = kept
            self.snapshots.pin(nodes[-1], kept)
        elif kept and nodes:
            newest = (self.memory.tables[name].group.statistic for name in kept)
            lease.complete_from = lease.tokens + max(s.newest or 0 for s in newest if s)
        return lease

    def cached_tokens(self, blocks: Iterable[Block]) -> int:
        """Tokens of the longest published prefix of some blocks; nothing is leased or counted."""
        nodes = self._nodes_after(None, blocks)
        return nodes[-1].block.end if nodes else 0

    def count(self, queried_tokens: int, lease: PrefixLease) -> None:
        self.queried_tokens += queried_tokens
        self.hit_tokens += lease.tokens

    def start(self, lease: PrefixLease, *, statistics: frozenset[str] = frozenset()) -> int:
        """Start a sequence from a lease matched for these statistics; return its row."""
        snapshot = lease.nodes[-1].statistics[lease.pinned] if lease.pinned else None
        cached_references = [node.cached_reference for node in lease.nodes]
        row = start_from_references(self.memory, cached_references, snapshot, used=statistics)
        self._unpin(lease)
        return row

    def _unpin(self, lease: PrefixLease) -> None:
        if lease.pinned:
            self.snapshots.unpin(lease.nodes[-1], lease.pinned)
            lease.pinned = frozenset()

    def extend(
        self,
        lease: PrefixLease,
        row: int,
        blocks: Iterable[Block],
        *,
        statistics: frozenset[str] = frozenset(),
    ) -> int:
        """Append published blocks to a row that ends with its lease; return its tokens."""
        nodes = self._nodes_after(lease.nodes[-1] if lease.nodes else None, blocks)
        if any(node.is_offloaded for node in nodes):
            return lease.tokens
        statistics = self.memory.kept_with_prefix(statistics)
        while statistics and nodes and statistics not in nodes[-1].statistics:
            nodes.pop()
        if nodes and lease.publishes and lease.tokens == int(self.memory.lengths[row]):
            snapshot = nodes[-1].statistics[statistics] if statistics else None
            references = [node.cached_reference for node in nodes]
            if extend_from_references(self.memory, row, references, snapshot):
                self._use(nodes)
                lease.nodes += nodes
        return lease.tokens

    def _nodes_after(self, parent: PrefixNode | None, blocks: Iterable[Block]) -> list[PrefixNode]:
        """The published nodes of consecutive blocks after a node; None: from the start."""
        nodes: list[PrefixNode] = []
        for block in blocks:
            node = self._nodes.get(block.key)
            if node is None or not (node.continues(parent, block) and node.follows(parent)):
                break
            nodes.append(node)
            parent = node
        return nodes

    def share(self, lease: PrefixLease) -> PrefixLease:
        """Create a second lease on the same nodes, for a fork of the lease's sequence."""
        self._use(lease.nodes)
        return replace(lease, nodes=list(lease.nodes), pinned=frozenset())

    def _use(self, nodes: Sequence[PrefixNode]) -> None:
        for node in nodes:
            node.num_users += 1
            self._idle.discard(node)

    def release(self, lease: PrefixLease) -> None:
        """Return a lease: its sequence was released, or its pages no longer match the chain."""
        self._unpin(lease)
        now_s = self._clock()
        for node in reversed(lease.nodes):  # the tail of the chain is evicted first
            node.num_users -= 1
            if not node.num_users and self._nodes.get(node.block.key) is node:
                node.idle_since_s = now_s
                self._idle.add(node)
        lease.nodes.clear()
        lease.publishes = False

    # ---- publishing ----------------------------------------------------------------------------

    def publish_by_layer(self, lease: PrefixLease, row: int, end: int) -> LayerReferences:
        """References for the layers of a row, whose blocks up to `end` are published afterwards."""
        whole = end // self.block_tokens * self.block_tokens
        references = LayerReferences(self.memory, row, lease.tokens, whole)
        self._by_layer.append((self.share(lease), references))
        return references

    def publish_layers(
        self, references: LayerReferences, row: int, token_ids: Sequence[int]
    ) -> None:
        """Publish the blocks of a row whose layers have all been referenced."""
        [at] = [i for i, (_, of_row) in enumerate(self._by_layer) if of_row is references]
        lease, _ = self._by_layer.pop(at)
        self.publish(lease, row, token_ids[lease.tokens :], references)
        used = self.memory.kept_with_prefix(self.memory.statistics_of(row))
        for statistics in references.statistics():
            node = next((node for node in lease.nodes if node.block.end == statistics.end), None)
            if node is not None and node.lacks(self.memory, row):
                self.snapshots.add(node, used, statistics)
            else:
                release_references(self.memory, [statistics])
        references.release()
        self.release(lease)

    def publish(
        self,
        lease: PrefixLease,
        row: int,
        token_ids: Sequence[int],
        by_layer: LayerReferences | None = None,
    ) -> None:
        """Publish the blocks that a row has filled since the last call, which this step writes."""
        parent = lease.nodes[-1] if lease.nodes else None
        key = parent.block.key if parent else None
        size, start = self.block_tokens, lease.tokens
        blocks = blocks_of(lease.identity, token_ids, size, start=start, parent_key=key)
        for block in blocks:
            node = self._nodes.get(block.key)
            if node is None:  # then no later block is published either
                lease.publishes = self._add([block, *blocks], lease, row, by_layer)
            elif node.continues(parent, block):
                self._use([node])  # another row published it first: both hold pages of its tokens
                lease.nodes.append(node)
                parent = node
            else:  # hash collision of two texts: this one stays unpublished
                lease.publishes = False
                return

    def _add(
        self,
        blocks: list[Block],
        lease: PrefixLease,
        row: int,
        by_layer: LayerReferences | None,
    ) -> bool:
        """Publish blocks after the lease's last block; return False if one cannot be published.

        A block cannot be published if its key collides with another text's, or if a window lane has
        already freed some of its pages.
        """
        distinct = {block.key for block in blocks}
        # `isdisjoint` would iterate over all nodes: `_nodes` is a dict
        if len(distinct) < len(blocks) or any(key in self._nodes for key in distinct):
            return False
        span = lease.tokens, blocks[-1].end, self.block_tokens
        try:
            if by_layer is None:
                cached_references = reference_blocks(self.memory, row, *span)
            else:
                cached_references = by_layer.blocks(*span)
        except ConfigError:
            return False
        for block, cached_reference in zip(blocks, cached_references, strict=True):
            is_public = block.end <= lease.identity.public_tokens
            parent = lease.nodes[-1] if lease.nodes else None
            owner = "" if is_public else lease.identity.owner
            node = PrefixNode(block, parent, cached_reference, is_public=is_public, owner=owner)
            self._nodes[block.key] = node
            if is_public:
                self._public[node] = None
            self._pending.append(node)
            lease.nodes.append(node)
        return True

    def confirm(self) -> None:
        """Confirm the nodes published in this step, after the step has run."""
        if self._listener is not None:
            notify_stored(self._listener, self._pending, self.block_tokens)
        self._written(self._pending)
        self._pending.clear()

    def withdraw(self) -> None:
        """Withdraw the nodes published in this step, after the step has failed."""
        for lease, references in self._by_layer:
            references.release()
            self.release(lease)
        self._by_layer.clear()
        self._forget(self._pending)
        self._pending.clear()

    def is_pending(self, lease: PrefixLease) -> bool:
        """Return whether a lease holds blocks that the step being scheduled has yet to write."""
        return bool(self._pending and lease.nodes and lease.nodes[-1] in self._pending)

    def snapshot(self, lease: PrefixLease, row: int, *, replaced: PrefixNode | None = None) -> bool:
        """Copy the statistics of a row that has just computed exactly its chain's last block.

        Unused blocks are evicted for the copy. Returns whether it was made: it may not fit.

        Args:
            lease: of the row.
            row: the row.
            replaced: the block after which the row made the copy that this one replaces. That copy
                is released first, so that no other one is evicted for it.
        """
        ends_here = bool(lease.nodes) and lease.tokens == int(self.memory.lengths[row])
        if not ends_here or lease.tokens < lease.complete_from:
            return False
        node, used = lease.nodes[-1], self.memory.kept_with_prefix(self.memory.statistics_of(row))
        pages = referenced_statistics_pages(self.memory, row)
        if not node.lacks(self.memory, row):
            return False
        if replaced is not None and used in replaced.statistics:
            release_references(self.memory, [self.snapshots.remove(replaced, used)])
        if not self._free_pages(pages):
            return False
        copy = reference_statistics(self.memory, row)
        if copy is None:
            return False
        self.snapshots.add(node, used, copy)
        if node not in self._pending:
            self._written([node])
        return True

    def _free_pages(self, pages: Mapping[PageClass, int]) -> bool:
        """Evict unused blocks and snapshots for one more snapshot; return whether it fits."""
        wanted_bytes = sum(page_class.page_bytes * n for page_class, n in pages.items())
        if not self.memory.fits(pages) and wanted_bytes > self.memory.free_bytes + self.idle_bytes:
            return False
        limit_bytes = self.snapshots.max_bytes
        if limit_bytes is not None and wanted_bytes > limit_bytes:
            return False
        while self.snapshots.exceeds(wanted_bytes):
            if not self._drop_snapshot():
                return False
        return self.reclaim(pages)

    def _drop_snapshot(self) -> bool:
        """Evict the least recently used snapshot, before its block; False if there is none."""
        found = self.snapshots.oldest()
        if found is None:
            return False
        self._offer([found[0]])  # a tier stores what the KV memory loses
        release_references(self.memory, [self.snapshots.remove(*found)])
        return True

    # ---- eviction ------------------------------------------------------------------------------

    def reclaim(self, pages: Mapping[PageClass, int]) -> bool:
        """Evict unused blocks until these additional pages fit; return whether they do.

        If they are not enough, snapshots after blocks in use are evicted.
        """
        dropped: list[bytes] = []
        while not self.memory.fits(pages):
            if self._idle.num_resident:
                dropped += self._drop(self._idle.oldest(self._idle.blocks_short(pages)))
            elif not self._drop_snapshot():
                break
        self._notify_removed(dropped)
        return self.memory.fits(pages)

    def unpublish(self, page_class: PageClass, pages: PageNumbers) -> NDArray[np.bool_]:
        """Evict unused blocks whose pages are about to be written; mask [pages] of them."""
        if not self.memory.fits({page_class: len(pages)}):
            self._notify_removed(
                self._drop(blocks_of_pages(self.memory, self._idle, page_class, pages))
            )
        alone: NDArray[np.bool_] = self.memory.pools[page_class].ref_counts[pages] == 1
        return alone

    def clear(self) -> None:
        self._notify_removed(self._drop(list(self._idle)))
        while self._drop_snapshot():
            pass

    def offloading(self, group: str, keys: Sequence[int]) -> None:
        """Note the blocks whose pages move to offload memory; tiers store them before."""
        moving = set(keys)
        nodes = [n for n in self._nodes.values() if n.cached_reference.key in moving]
        self._offer([node for node in nodes if not node.is_offloaded])
        for node in nodes:
            node.is_offloaded = True
            if self._idle.discard(node):
                self._idle.add(node, group)

    def free_offloaded(self) -> bool:
        """Evict the unused blocks in offload memory that were used least recently."""
        offloaded = (node for node in self._idle if node.is_offloaded)
        oldest = list(islice(offloaded, OFFLOADED_AT_ONCE))
        self._notify_removed(self._drop(oldest))
        return bool(oldest)

    def keep_all(self) -> None:
        """Pass every unused block to the `on_drop` callbacks without evicting it."""
        self._offer(list(self._idle))

    def on_drop(self, keep: Callable[[Sequence[PrefixNode]], None]) -> None:
        """Call `keep` with written unused blocks before they are evicted."""
        self._on_drop.append(keep)

    def on_write(self, keep: Callable[[Sequence[PrefixNode]], None]) -> None:
        """Call `keep` with blocks whose pages or statistics a step has just written."""
        self._on_write.append(keep)

    def _written(self, nodes: Sequence[PrefixNode]) -> None:
        for keep in self._on_write:
            keep(nodes)

    def _offer(self, nodes: Sequence[PrefixNode]) -> None:
        for keep in self._on_drop:
            keep(nodes)

    def _drop(self, nodes: Sequence[PrefixNode]) -> list[bytes]:
        """Evict unused blocks; return the keys of those that listeners know as stored.

        Blocks after them are evicted too: with offloaded ones, the tail is not always the oldest.
        """
        if any(node.is_offloaded for node in self._idle):
            dropped = set(nodes)
            for node in sorted(self._idle, key=lambda node: node.block.end):
                if node.parent in dropped:
                    dropped.add(node)
            nodes = sorted(dropped, key=lambda node: -node.block.end)
        written = [node for node in nodes if node not in self._pending]
        self._pending = [node for node in self._pending if node not in nodes]
        self._offer(written)
        self._forget(nodes)
        return [node.block.key for node in written]

    def _notify_removed(self, keys: list[bytes]) -> None:
        if keys and self._listener is not None:
            self._listener.removed(keys)

    def _forget(self, nodes: Sequence[PrefixNode]) -> None:
        cached_references = []
        for node in nodes:
            if self._nodes.get(node.block.key) is node:
                del self._nodes[node.block.key]
            self._idle.discard(node)
            self._public.pop(node, None)
            copies = [self.snapshots.remove(node, used) for used in list(node.statistics)]
            cached_references += [node.cached_reference, *copies]
        release_references(self.memory, cached_references)
