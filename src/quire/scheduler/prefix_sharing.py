"""Prefix caching for requests: looked up at admission, published during prefill.

The identity of a request's prefix determines which other requests may share its KV.
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
from quire.scheduler.group import prefillable_tokens
from quire.scheduler.request import Request

SECRET_BYTES = 32


class PrefixIdentities:
    """Creates prefix identities from tenants, cache salts and public prefixes.

    Args:
        kv_settings: all that KV depends on except the tokens: model, precision, codec, policy.
        secret: key from which salts are derived; default: random.
    """

    def __init__(self, kv_settings: Sequence[str] = (), *, secret: bytes | None = None) -> None:
        self._kv_settings = tuple(kv_settings)
        self._secret = secrets.token_bytes(SECRET_BYTES) if secret is None else secret
        self._roots: dict[str, bytes] = {}
        self._public: list[NDArray[np.int64]] = []

    def register_public(self, token_ids: Sequence[int]) -> None:
        """Let all tenants share the KV of these tokens in prompts that begin with them."""
        self._public.append(np.asarray(token_ids, dtype=np.int64))

    def of(self, request: Request) -> PrefixIdentity:
        """Return the identity of a request's prefix."""
        variant = self.variant(request)
        if variant not in self._roots:
            self._roots[variant] = root_key(*self._kv_settings, variant)
        salt, num_public = self._salt(request), self._num_public(request)
        return PrefixIdentity(self._roots[variant], salt, num_public, request.tenant)

    def variant(self, request: Request) -> str:
        """How the positions of a request's keys are encoded: its RoPE variant."""
        number = request.spec.rope_variant
        return f"{number} before RoPE" if request.spec.pre_rope else str(number)

    def _salt(self, request: Request) -> bytes:
        """The salt of a request; empty without a tenant and a cache salt."""
        if (request.tenant, request.spec.cache_salt) == (DEFAULT_TENANT, ""):
            return b""
        return private_salt(self._secret, request.tenant, request.spec.cache_salt)

    def _num_public(self, request: Request) -> int:
        if not self._public:
            return 0
        prompt = np.asarray(request.prompt_token_ids)
        return max(_common(prompt, public) for public in self._public)


def _common(prompt: NDArray[np.int64], public: NDArray[np.int64]) -> int:
    """Length of the common prefix."""
    shortest = min(len(prompt), len(public))
    differ = np.flatnonzero(prompt[:shortest] != public[:shortest])
    return int(differ[0]) if len(differ) else shortest


class PrefixSharing:
    """The prefix cache, by request.

    Args:
        memory: the KV memory.
        prefix: index of cached prefixes; None without prefix caching.
        identities: creates the identities of prefixes; default: `PrefixIdentities()`.
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
        """Bytes of cached prefixes that no request uses; they can be evicted."""
        return 0 if self.prefix is None else self.prefix.idle_bytes

    @property
    def available_bytes(self) -> int:
        """Bytes that are free or can be freed without preempting a request."""
        return self.memory.free_bytes + self.idle_bytes

    def free_pages(self, pages: dict[PageClass, int]) -> bool:
        """Evict cached prefixes until these pages are free; return whether they are."""
        if self.memory.fits(pages):
            return True
        return self.prefix is not None and self.prefix.reclaim(pages)

    def drop_cached(self) -> None:
        """Evict every cached prefix that no request uses."""
        if self.prefix is not None:
            self.prefix.clear()

    # ---- a request's prefix --------------------------------------------------------------------

    def look_up(self, request: Request, most_tokens: int | None = None) -> PrefixLease | None:
        """Find and pin the cached prefix of a waiting request.

        The prefix is limited in three cases. A request with planned forks uses at most their common
        tokens. A request with prompt log-probabilities or mean pooling uses none, because it needs
        the output of every prompt token. A request that evicts uses at most its tokens before the
        first eviction, so that its output and peak do not depend on the cache.

        Args:
            request: a waiting request.
            most_tokens: maximum tokens, if its own swapped KV follows after them; None: no limit.

        Returns:
            The lease of the prefix, for `SequenceMemory.allocate` or `release`; None without
            prefix caching.
        """
        if self.prefix is None:
            return None
        identity = self.identities.of(request)
        if request.computes_whole_prompt:
            return PrefixLease(identity)
        wanted = min(prefillable_tokens(request), request.exact_tokens + 1)
        if most_tokens is not None:
            wanted = min(wanted, most_tokens + 1)
        if request.memory.chain is None or request.memory.chain.identity != identity:
            request.memory.chain = BlockChain(identity, self.prefix.block_tokens, request.token_ids)
        blocks = request.memory.chain.blocks(wanted - 1)  # at least one token must be computed
        return self.prefix.match_blocks(identity, blocks, statistics=request.memory.statistics)

    def release(self, lease: PrefixLease | None) -> None:
        """Unpin a prefix that `look_up` returned."""
        if self.prefix is not None and lease is not None:
            self.prefix.release(lease)

    def snapshot_ends(self, request: Request) -> tuple[int, ...]:
        """Token counts after which the statistics of a prompt are saved in the prefix cache.

        One is the end of the prompt's last whole block, for requests that extend this prompt. The
        other is the end of the prefix that an earlier prompt had in common with this one.
        """
        lease, prefix = request.memory.lease, self.prefix
        if prefix is None or not request.memory.statistics or not isinstance(lease, PrefixLease):
            return ()
        most = min(len(request.prompt_token_ids) - 1, request.exact_tokens)
        ends = {min(lease.known_tokens, most), most // prefix.block_tokens * prefix.block_tokens}
        return tuple(sorted(end for end in ends if end > lease.tokens))

    def publish(self, request: Request, length: int) -> None:
        """Add the whole blocks of a request's first `length` tokens to the prefix cache."""
        lease = request.memory.lease
        assert self.prefix is not None
        offloaded = lease is not None and self._is_offloaded(request.memory.row, lease.tokens)
        if lease is not None and lease.publishes and not offloaded:
            self.prefix.publish(lease, request.memory.row, request.token_ids(lease.tokens, length))

    def snapshot(self, request: Request) -> None:
        """Save the statistics of a request at the end of its published blocks."""
        lease = request.memory.lease
        if self.prefix is not None and lease is not None and request.memory.statistics:
            self.prefix.snapshot(lease, request.memory.row)

    def _is_offloaded(self, row: int, token: int) -> bool:
        """Whether the page of a token is offloaded, so that it cannot be shared."""
        tables = self.memory.tables.values()
        return any(token < int(t.staged[row]) * t.group.page_class.tokens for t in tables)

    def rejoin(self, request: Request, length: int) -> None:
        """Pin the prefix of a resumed request, as far as it is still cached."""
        if self.prefix is not None and request.eviction.exact:
            tokens = request.token_ids(0, length + 1)
            request.memory.lease = self.prefix.match(self.identities.of(request), tokens)

    def stop_sharing(self, request: Request) -> None:
        """Release the prefix of a request whose pages will change or be freed."""
        self.release(request.memory.lease)
        request.memory.lease = None

    def withdraw_from_cache(self, request: Request) -> None:
        """Evict a request's blocks from the cache, because its pages will be offloaded."""
        if request.memory.lease is not None:
            self.stop_sharing(request)
            self.drop_cached()

    # ---- a step --------------------------------------------------------------------------------

    def confirm(self, requests: Sequence[Request]) -> None:
        """After a step: mark its published blocks as written, and save due statistics."""
        if self.prefix is None:
            return
        self.prefix.confirm()
        for request in requests:
            at_end = request.progress.num_computed in request.memory.snapshot_ends
            if at_end and request.eviction.exact and request.memory.lease is not None:
                self.prefix.snapshot(request.memory.lease, request.memory.row)

    def withdraw(self) -> None:
        """After a failed step: remove the blocks that it published."""
        if self.prefix is not None:
            self.prefix.withdraw()

    def shares_unwritten(self, request: Request) -> bool:
        """Whether a request shares blocks that the step being planned will write."""
        prefix, lease = self.prefix, request.memory.lease
        return prefix is not None and lease is not None and prefix.is_pending(lease)
