"""One load for several requests: later requests of a prefix wait for the first one's load.

    request A   | recomputed -> | <- loaded |          publishes its blocks
    request B   waits ............ shares the blocks of A, then continues after them

A request that waits shares the blocks of the first one as soon as these are published.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.kv.prefix_blocks import PrefixLease
from quire.kv.prefix_key import Block, BlockChain
from quire.offload.prefix_store.entries import Place
from quire.offload.prefix_store.prefix_load import PrefixLoad
from quire.scheduler.group import prefillable_tokens
from quire.scheduler.prefix_sharing import PrefixSharing
from quire.scheduler.request import Request


@dataclass(slots=True, eq=False)
class RequestPrefixLoad:
    """The prefix load of one request.

    Attributes:
        load: load of the end of the prefix.
        found: the blocks to load, and the location of each.
        began_at: computed tokens of the request when the load began.
        started_s: clock reading when the load began.
        busy: whether the load is in the queue of the transfer worker.
        waits: whether the request could only wait for its pages when it was last planned.
        is_attached: whether the loaded pages were attached to the request.
        has_ended: whether the request no longer loads.
    """

    load: PrefixLoad
    found: Sequence[tuple[Block, Place]]
    began_at: int
    started_s: float
    busy: bool = False
    waits: bool = False
    is_attached: bool = False
    has_ended: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class JoinedLoad:
    """A request's use of another request's load.

    Attributes:
        leader: the request that loads.
        load: its load.
        chain: the blocks of the request that waits.
    """

    leader: Request
    load: RequestPrefixLoad
    chain: BlockChain


class JoinedLoads:
    """Requests that wait for the load of another request.

    Args:
        sharing: the prefix cache that the loading requests publish their blocks to.

    Attributes:
        num_joined: number of requests that have joined a load.
    """

    def __init__(self, sharing: PrefixSharing) -> None:
        self.num_joined = 0
        self._sharing = sharing
        self._leaders: dict[bytes, tuple[Request, RequestPrefixLoad]] = {}
        self._loads: dict[Request, RequestPrefixLoad] = {}
        self._joined: dict[Request, JoinedLoad] = {}

    def __contains__(self, request: Request) -> bool:
        return request in self._joined

    def of(self, request: Request) -> JoinedLoad | None:
        """The load that a request waits for; None if it waits for none."""
        return self._joined.get(request)

    def offer(self, request: Request, load: RequestPrefixLoad) -> None:
        """Let later requests join a load."""
        self._loads[request] = load
        for block, _ in load.found:
            self._leaders.setdefault(block.key, (request, load))

    def join(
        self, request: Request, chain: BlockChain, found: Sequence[tuple[Block, Place]]
    ) -> bool:
        """Wait for the load of a request's next block; return False if there is none.

        A request with statistics needs those at the end of the load. It joins only a request with
        the same statistics whose load ends within its own prompt.

        Args:
            request: a request that has just been admitted.
            chain: its blocks.
            found: its stored blocks.
        """
        leader, load = self._leaders.get(found[0][0].key, (None, None))
        if leader is None or load is None or leader is request:
            return False
        used = request.memory.statistics
        if used:
            last = load.found[-1][0].key
            within = any(block.key == last for block, _ in found)
            if used != leader.memory.statistics or not within:
                return False
        self._joined[request] = JoinedLoad(leader, load, chain)
        self.num_joined += 1
        return True

    def follow(self, request: Request) -> bool:
        """Share the blocks published so far; return whether the load that it waits for has ended.

        A load has ended when its pages were attached, and when it was cancelled or has failed.
        """
        joined, lease = self._joined[request], request.memory.lease
        if isinstance(lease, PrefixLease):
            self._extend(request, lease, joined.chain)
        if joined.load.has_ended:
            del self._joined[request]
        return joined.load.has_ended

    def _extend(self, request: Request, lease: PrefixLease, chain: BlockChain) -> None:
        assert self._sharing.prefix is not None, "a lease belongs to a prefix cache"
        at = request.progress.num_computed
        most = min(at + prefillable_tokens(request), request.exact_tokens + 1) - 1
        end = self._sharing.prefix.extend(
            lease,
            request.memory.row,
            (block for block in chain.blocks(most) if block.end > at),
            statistics=request.memory.statistics,
        )
        request.progress.num_computed = end
        request.count_cached(at, end)

    def forget(self, request: Request) -> None:
        """A request no longer loads or waits: its load has ended, or its row was freed."""
        self._joined.pop(request, None)
        load = self._loads.pop(request, None)
        if load is None:
            return
        load.has_ended = True
        for block, _ in load.found:
            if self._leaders.get(block.key, (None, None))[0] is request:
                del self._leaders[block.key]
