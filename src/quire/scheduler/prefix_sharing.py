"""Prefixes that requests share: found when a request enters, published as it is read.

A request's identity says which other requests may share the beginning of its KV.
"""

import secrets
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.config.generation_request import DEFAULT_TENANT
from quire.kv.memory import KVMemory
from quire.kv.prefix import PrefixIndex
from quire.kv.prefix_blocks import PrefixLease
from quire.kv.prefix_key import BlockChain, PrefixIdentity, private_salt, root_key
from quire.layout.pages import PageClass
from quire.scheduler.group import readable_tokens
from quire.scheduler.request import Request

SECRET_BYTES = 32


class PrefixIdentities:
    """Makes the identity of a request's prefix from its tenant, its salt and what is public.

    Args:
        made_by: all that KV depends on besides tokens: model, precision, codec, policy.
        secret: salts are derived from it; drawn at random where none is given.
    """

    def __init__(self, made_by: Sequence[str] = (), *, secret: bytes | None = None) -> None:
        self._made_by = tuple(made_by)
        self._secret = secrets.token_bytes(SECRET_BYTES) if secret is None else secret
        self._roots: dict[int, bytes] = {}
        self._public: list[NDArray[np.int64]] = []

    def register_public(self, token_ids: Sequence[int]) -> None:
        """Let every tenant share the KV of these tokens where a prompt begins with them."""
        self._public.append(np.asarray(token_ids, dtype=np.int64))

    def of(self, request: Request) -> PrefixIdentity:
        """The identity of a request's prefix."""
        variant = request.spec.rope_variant
        if variant not in self._roots:
            self._roots[variant] = root_key(*self._made_by, str(variant))
        return PrefixIdentity(self._roots[variant], self._salt(request), self._num_public(request))

    def _salt(self, request: Request) -> bytes:
        """Nothing where no tenants and no salts are in use: then all callers trust each other."""
        if (request.tenant, request.spec.cache_salt) == (DEFAULT_TENANT, ""):
            return b""
        return private_salt(self._secret, request.tenant, request.spec.cache_salt)

    def _num_public(self, request: Request) -> int:
        if not self._public:
            return 0
        prompt = np.asarray(request.prompt_token_ids)
        return max(_common(prompt, public) for public in self._public)


def _common(prompt: NDArray[np.int64], public: NDArray[np.int64]) -> int:
    """How many first tokens are the same."""
    shortest = min(len(prompt), len(public))
    differ = np.flatnonzero(prompt[:shortest] != public[:shortest])
    return int(differ[0]) if len(differ) else shortest


class PrefixSharing:
    """The prefix cache on behalf of requests.

    Args:
        memory: the pool.
        prefix: finds and keeps prefixes; None where nothing is to be shared.
        identities: who may share whose prefix.
    """

    def __init__(
        self,
        memory: KVMemory,
        prefix: PrefixIndex | None = None,
        identities: PrefixIdentities | None = None,
    ) -> None:
        self.memory, self.prefix = memory, prefix
        self.identities = identities or PrefixIdentities()

    # ---- memory --------------------------------------------------------------------------------

    @property
    def idle_bytes(self) -> int:
        """Bytes of cached prefixes that can be dropped."""
        return 0 if self.prefix is None else self.prefix.idle_bytes

    @property
    def available_bytes(self) -> int:
        """Bytes that are free or can be freed without preempting a request."""
        return self.memory.free_bytes + self.idle_bytes

    def make_room(self, pages: dict[PageClass, int]) -> bool:
        """Drop cached prefixes until so many pages fit; say whether they do."""
        if self.memory.fits(pages):
            return True
        return self.prefix is not None and self.prefix.reclaim(pages)

    def drop_cached(self) -> None:
        """Drop every cached prefix that no request uses."""
        if self.prefix is not None:
            self.prefix.clear()

    # ---- a request's prefix --------------------------------------------------------------------

    def look_up(self, request: Request, most_tokens: int | None = None) -> PrefixLease | None:
        """Hold the cached prefix of a request, to enter with or to give back.

        One that others are to be copied from finds no more than they have in common.
        One whose prompt is scored reads all of it again: scores need the logits of every token.
        One that will evict finds what it would hold before its first eviction, so that neither its
        answer nor its peak depends on what is cached.

        Args:
            request: waits.
            most_tokens: of use, where its own KV follows from there on; None for all.
        """
        if self.prefix is None:
            return None
        identity = self.identities.of(request)
        if request.scores_prompt:
            return PrefixLease(identity)
        wanted = min(readable_tokens(request), request.exact_tokens + 1)
        if most_tokens is not None:
            wanted = min(wanted, most_tokens + 1)
        if request.memory.chain is None or request.memory.chain.identity != identity:
            request.memory.chain = BlockChain(identity, self.prefix.block_tokens, request.token_ids)
        blocks = request.memory.chain.blocks(wanted - 1)  # one token at least is left to compute
        return self.prefix.match_blocks(identity, blocks, statistics=request.memory.statistics)

    def give_back(self, lease: PrefixLease | None) -> None:
        """Let go of what `look_up` held."""
        if self.prefix is not None and lease is not None:
            self.prefix.release(lease)

    def snapshot_ends(self, request: Request) -> tuple[int, ...]:
        """Tokens behind which what is remembered of a prompt is to be kept for others.

        The last whole block of the prompt, for who asks more behind it; and where another prompt
        began like this one, for the next that does.
        """
        lease, prefix = request.memory.lease, self.prefix
        if prefix is None or not request.memory.statistics or not isinstance(lease, PrefixLease):
            return ()
        most = min(len(request.prompt_token_ids) - 1, request.exact_tokens)
        ends = {min(lease.known_tokens, most), most // prefix.block_tokens * prefix.block_tokens}
        return tuple(sorted(end for end in ends if end > lease.tokens))

    def publish(self, request: Request, length: int) -> None:
        """Share the whole blocks of a request up to a token."""
        lease = request.memory.lease
        assert self.prefix is not None
        offloaded = lease is not None and self._is_offloaded(request.memory.row, lease.tokens)
        if lease is not None and lease.publishes and not offloaded:
            self.prefix.publish(lease, request.memory.row, request.token_ids(lease.tokens, length))

    def _is_offloaded(self, row: int, token: int) -> bool:
        """Whether the page of a token is offloaded, where no other request could share it."""
        tables = self.memory.tables.values()
        return any(token < int(t.staged[row]) * t.group.page_class.tokens for t in tables)

    def rejoin(self, request: Request, length: int) -> None:
        """Hold the prefix of a request that has been resumed, as far as it is still there."""
        if self.prefix is not None and request.eviction.exact:
            tokens = request.token_ids(0, length + 1)
            request.memory.lease = self.prefix.match(self.identities.of(request), tokens)

    def stop_sharing(self, request: Request) -> None:
        """The row's pages are no longer those of its tokens, or no longer needed."""
        self.give_back(request.memory.lease)
        request.memory.lease = None

    def withdraw_from_cache(self, request: Request) -> None:
        """Drop what a request has published: its pages are about to be offloaded."""
        if request.memory.lease is not None:
            self.stop_sharing(request)
            self.drop_cached()

    # ---- a step --------------------------------------------------------------------------------

    def confirm(self, requests: Sequence[Request]) -> None:
        """A step has run: what it published is there, and statistics can be kept."""
        if self.prefix is None:
            return
        self.prefix.confirm()
        for request in requests:
            at_end = request.progress.num_computed in request.memory.snapshot_ends
            if at_end and request.eviction.exact and request.memory.lease is not None:
                self.prefix.snapshot(request.memory.lease, request.memory.row)

    def withdraw(self) -> None:
        """A step has failed: what it published is not there."""
        if self.prefix is not None:
            self.prefix.withdraw()

    def shares_unwritten(self, request: Request) -> bool:
        """Whether a request shares blocks that the step being planned has yet to write."""
        prefix, lease = self.prefix, request.memory.lease
        return prefix is not None and lease is not None and prefix.is_pending(lease)
