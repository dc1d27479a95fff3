"""The pages of requests in the KV memory: allocate, grow, share, free.

Prefixes are looked up in the prefix cache at admission and published during prefill. The identity
of a request's prefix determines which other requests may share its KV.
"""

import secrets
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from quire.config.generation_request import DEFAULT_TENANT
from quire.config.kv_config import KVConfig
from quire.errors import ConfigError, OutOfPages
from quire.kv.memory import KVMemory
from quire.kv.prefix import (
    BlockChain,
    PrefixIdentity,
    PrefixIndex,
    PrefixLease,
    PrefixListener,
    private_salt,
    root_key,
)
from quire.kv.sharing import fork, statistics_pages
from quire.layout.eviction import PREFILL_END, PRESSURE
from quire.layout.pages import PageClass
from quire.scheduler.events import EventLog
from quire.scheduler.offload_port import KVOffloader, PrefixLoads
from quire.scheduler.peaks import can_offload_request
from quire.scheduler.request import Request, RequestState, note_peak, prefillable_tokens

SECRET_BYTES = 32
FINISHED = "finished"  # reason of a free when a request finished normally


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
        """Return the identity of a request's prefix; unsalted without tenant and cache salt."""
        variant, salt, public_tokens = self.variant(request), b"", 0
        if variant not in self._roots:
            self._roots[variant] = root_key(*self._kv_settings, variant)
        if (request.tenant, request.spec.cache_salt) != (DEFAULT_TENANT, ""):
            salt = private_salt(self._secret, request.tenant, request.spec.cache_salt)
        prompt = np.asarray(request.prompt_token_ids if self._public else ())
        for public in self._public:
            shortest = min(len(prompt), len(public))
            differ = np.flatnonzero(prompt[:shortest] != public[:shortest])
            public_tokens = max(public_tokens, int(differ[0]) if len(differ) else shortest)
        return PrefixIdentity(self._roots[variant], salt, public_tokens, request.tenant)

    def variant(self, request: Request) -> str:
        """How the positions of a request's keys are encoded: its RoPE variant."""
        number = request.spec.rope_variant
        return f"{number} before RoPE" if request.spec.pre_rope else str(number)


class SequenceMemory:
    """Allocates and frees the pages of requests, with prefix caching.

    Args:
        memory: the KV memory.
        prefix: index of cached prefixes; None without prefix caching.
        identities: creates the identities of prefixes; default: `PrefixIdentities()`.
        events: the event log; default: a new one.
        checkpoint_tokens: recurrent states are saved at each multiple of it; 0: see `confirm`.

    Attributes:
        prefix_offloader: offloads the oldest pages of requests; None without KV offload.
        prefix_loader: loads cached prefixes from a second tier; None without one.
    """

    def __init__(
        self,
        memory: KVMemory,
        prefix: PrefixIndex | None = None,
        identities: PrefixIdentities | None = None,
        *,
        events: EventLog | None = None,
        checkpoint_tokens: int = 0,
    ) -> None:
        self.memory, self.prefix = memory, prefix
        self._checkpoint_tokens = checkpoint_tokens
        self._has_states = any(group.state is not None for group in memory.layout.groups)
        self.identities = identities or PrefixIdentities()
        self.events = events or EventLog()
        self.prefix_offloader: KVOffloader | None = None
        self.prefix_loader: PrefixLoads | None = None

    def attach(
        self,
        *,
        prefix_offloader: KVOffloader | None = None,
        prefix_loader: PrefixLoads | None = None,
    ) -> None:
        """Connect the offload components, which use this memory themselves."""
        self.prefix_offloader, self.prefix_loader = prefix_offloader, prefix_loader

    # ---- free pages ----------------------------------------------------------------------------

    @property
    def idle_bytes(self) -> int:
        """Bytes of cached prefixes that no request uses; they can be evicted."""
        return 0 if self.prefix is None else self.prefix.idle_bytes

    @property
    def available_bytes(self) -> int:
        """Bytes that are free or can be freed without preempting a request."""
        return self.memory.free_bytes + self.idle_bytes

    def evict_cached(self, pages: dict[PageClass, int]) -> bool:
        """Evict cached prefixes until these pages are free; return whether they are."""
        if self.memory.fits(pages):
            return True
        return self.prefix is not None and self.prefix.reclaim(pages)

    def drop_cached(self) -> None:
        """Evict every cached prefix that no request uses."""
        if self.prefix is not None:
            self.prefix.clear()

    def can_grow(self, requests: Sequence[Request], tokens: Sequence[int]) -> bool:
        """Whether each request can grow by its number of tokens.

        Evicts cached prefixes and offloads pages if needed.
        """
        rows, counts = rows_of(requests), np.array(tokens, dtype=np.int32)
        if self.memory.can_grow(rows, counts):
            return True
        return self._offload_until(
            lambda: self.evict_cached(self.memory.pages_to_grow(rows, counts))
        )

    def free_pages(self, pages: dict[PageClass, int]) -> bool:
        """Evict cached prefixes and offload pages until these pages are free; whether they are."""
        return self._offload_until(lambda: self.evict_cached(pages))

    def _offload_until(self, is_enough: Callable[[], bool]) -> bool:
        while not is_enough():
            if not self.offload_some():
                return False
        return True

    def offload_some(self) -> bool:
        """Offload pages of one request; False if no offload frees memory."""
        return self.prefix_offloader is not None and self.prefix_offloader.offload_some()

    # ---- allocate and free -----------------------------------------------------------------------

    def allocate(self, request: Request, lease: PrefixLease | None) -> None:
        """Allocate a row for a request and share the pages of its cached prefix.

        Raises:
            OutOfPages: no row or no pages; the request is unchanged.
        """
        prefix = self.prefix
        if prefix is not None and lease is not None and lease.nodes:
            request.memory.row = prefix.start(lease, statistics=request.memory.statistics)
            request.progress.num_computed = lease.tokens
        else:
            request.memory.row = self.memory.start(request.memory.statistics)
        request.memory.lease, request.eviction.exact, request.eviction.replayed = lease, True, 0
        request.eviction.free_until = 0
        request.memory.snapshot_ends = self.snapshot_ends(request)
        if prefix is not None and lease is not None:
            prefix.count(request.num_tokens, lease)
        request.count_cached(0, request.progress.num_computed)
        if self.prefix_loader is not None:
            self.prefix_loader.begin(request)
        self.note_entry(request)

    def note_entry(self, request: Request) -> None:
        """Count and log an admission by allocation, swap-in or fork."""
        request.progress.num_admissions += 1
        request.progress.admitted_tokens = request.num_tokens
        request.memory.chain = None  # its tokens change while it runs
        shared = 0 if request.memory.lease is None else request.memory.lease.tokens
        self.events.emit("admitted", request, tokens=request.num_tokens, cached_tokens=shared)
        if shared:
            kv_bytes = self.memory.row_bytes(request.memory.row)
            self.events.emit("shared", request, tokens=shared, kv_bytes=kv_bytes)

    def free(self, request: Request, reason: str) -> None:
        """Free a request's row and the pages that no other request references."""
        kv_bytes = self.note_peak(request)
        self._drop_forks([request])
        self.memory.release([request.memory.row])
        self.note_freed(request, kv_bytes, reason)

    def note_peak(self, request: Request) -> int:
        """Update the peak bytes of a request before its pages are freed.

        Returns:
            Bytes of the pages that it refers to now.
        """
        row = request.memory.row
        group = request.group or request.split_from
        if group is not None:
            note_peak(self.memory, group)
        request.memory.kv_peak_bytes = max(
            request.memory.kv_peak_bytes, int(self.memory.peak_bytes[row])
        )
        return self.memory.row_bytes(row)

    def note_freed(self, request: Request, kv_bytes: int, reason: str) -> None:
        """Update a request after its row has been released, and log it."""
        self.stop_sharing(request)
        if self.prefix_loader is not None:
            self.prefix_loader.forget(request)
        request.progress.furthest_tokens = max(
            request.progress.furthest_tokens, request.progress.num_computed
        )
        request.memory.row, request.progress.num_computed = -1, 0
        request.progress.again_until = 0
        self.events.emit("freed", request, kv_bytes=kv_bytes, reason=reason)

    def resume(self, request: Request, row: int, length: int) -> None:
        """Update a request after its KV has been swapped in to private pages.

        It pins its cached prefix again, as far as that is still cached, so that its next blocks can
        be published after it.
        """
        request.memory.row, request.progress.num_computed = row, length
        self.note_entry(request)
        if self.prefix is not None and request.eviction.exact:
            tokens = request.token_ids(0, length + 1)
            request.memory.lease = self.prefix.match(self.identities.of(request), tokens)

    # ---- a request's prefix --------------------------------------------------------------------

    def look_up(self, request: Request, max_tokens: int | None = None) -> PrefixLease | None:
        """Find and pin the cached prefix of a waiting request.

        The prefix is limited in four cases. A request with planned forks uses at most their common
        tokens. A request with prompt log-probabilities or mean pooling uses none, because it needs
        the output of every prompt token. A request that evicts uses at most its tokens before the
        first eviction, so that its output and peak do not depend on the cache. A request that can
        evict only in the KV memory uses no offloaded prefix.

        Args:
            request: a waiting request.
            max_tokens: maximum tokens, if its own swapped KV follows after them; None: no limit.

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
        if max_tokens is not None:
            wanted = min(wanted, max_tokens + 1)
        if request.memory.chain is None or request.memory.chain.identity != identity:
            request.memory.chain = BlockChain(identity, self.prefix.block_tokens, request.token_ids)
        blocks = request.memory.chain.blocks(wanted - 1)  # at least one token must be computed
        at_any_time = request.eviction.spec.when == PRESSURE
        read_at = 0 if at_any_time else request.exact_tokens
        used = request.memory.statistics
        lease = self.prefix.match_blocks(identity, blocks, statistics=used, read_at=read_at)
        offloaded = bool(lease.nodes) and lease.nodes[0].is_offloaded
        if offloaded and not can_offload_request(request, self.memory.layout):
            self.release(lease)
            return PrefixLease(identity)
        return lease

    def release(self, lease: PrefixLease | None) -> None:
        """Unpin a prefix that `look_up` returned."""
        if self.prefix is not None and lease is not None:
            self.prefix.release(lease)

    def snapshot_ends(self, request: Request) -> tuple[int, ...]:
        """Token counts after which the statistics of a prompt are saved in the prefix cache.

        One is the end of the prompt's last whole block, for requests that extend this prompt; one
        that of the tokens known, if a request is recomputed. Another is the end of the prefix that
        an earlier prompt had in common with this one. Recurrent states are also saved at multiples
        of an interval.
        """
        lease, prefix = request.memory.lease, self.prefix
        kept = self.memory.kept_with_prefix(request.memory.statistics)
        if prefix is None or not kept or not isinstance(lease, PrefixLease):
            return ()
        known = min(request.num_tokens - 1, request.exact_tokens)
        most = min(len(request.prompt_token_ids) - 1, known)
        ends = {min(lease.known_tokens, most), most // prefix.block_tokens * prefix.block_tokens}
        if self._has_states:
            ends.add(known // prefix.block_tokens * prefix.block_tokens)
        if self._checkpoint_tokens:
            ends.update(range(self._checkpoint_tokens, known + 1, self._checkpoint_tokens))
        first = max(lease.tokens + 1, lease.complete_from)
        return tuple(sorted(end for end in ends if end >= first))

    def publish(self, request: Request, length: int) -> None:
        """Add the whole blocks of a request's first `length` tokens to the prefix cache."""
        lease = request.memory.lease
        assert self.prefix is not None
        offloaded = lease is not None and self._is_offloaded(request.memory.row, lease.tokens)
        if request.spec.sparse is not None:
            length = min(length, request.exact_tokens)
        if lease is not None and lease.publishes and not offloaded and length > lease.tokens:
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

    def stop_sharing(self, request: Request) -> None:
        """Release the prefix of a request whose pages will change or be freed."""
        self.release(request.memory.lease)
        request.memory.lease = None

    # ---- growing -------------------------------------------------------------------------------

    def grow(self, requests: Sequence[Request], tokens: Sequence[int], scoring: int = 0) -> None:
        """Allocate pages for new tokens and publish the blocks that they fill.

        Args:
            requests: running requests.
            tokens: their numbers of new tokens.
            scoring: further slots of each of them, for its scoring pass.

        Raises:
            OutOfPages: see `KVMemory.grow`.
        """
        copied_bytes = self.memory.copied_bytes
        self.memory.grow(rows_of(requests), np.array(tokens, dtype=np.int32) + np.int32(scoring))
        self._note_growth(requests, tokens, self.memory.copied_bytes - copied_bytes)

    def try_grow(
        self, requests: Sequence[Request], tokens: Sequence[int], drafts: Sequence[int] = ()
    ) -> bool:
        """`grow` if `can_grow`; return whether the requests have grown.

        Args:
            requests: running requests.
            tokens: their numbers of new tokens.
            drafts: further slots of each of them, for proposed tokens, if pages are free.
        """
        rows, counts = rows_of(requests), np.array(tokens, dtype=np.int32)
        copied_bytes, has_drafts = self.memory.copied_bytes, any(drafts)
        if has_drafts:
            drafted = (r for r, count in zip(requests, drafts, strict=True) if count)
            forked = [request for request in drafted if not self._drops_newest(request)]
            slots = counts + np.array(drafts, dtype=np.int32)
            self._free_for_drafts(rows, slots, forked)
            if not (self._fork_rows(forked) and self.memory.try_grow(rows, slots)):
                self._drop_forks(forked)
                return False
        elif not self.memory.try_grow(rows, counts):
            if not self.can_grow(requests, tokens):
                return False
            copied_bytes = self.memory.copied_bytes
            self.memory.grow(rows, counts)
        self._note_growth(requests, tokens, self.memory.copied_bytes - copied_bytes)
        return True

    def _free_for_drafts(
        self, rows: NDArray[np.int64], slots: NDArray[np.int32], forked: Sequence[Request]
    ) -> None:
        """Evict cached prefixes for the pages of proposed tokens, of forks and of their copies."""
        pages = Counter(self.memory.pages_to_grow(rows, slots))
        for row in rows_of(forked).tolist():
            pages.update(statistics_pages(self.memory, row))
            for table in self.memory.tables.values():  # a copy of the newest page of each lane
                if table.active[row] and not table.group.private:
                    pages[table.group.page_class] += table.group.num_lanes
        self.evict_cached(dict(pages))

    def _fork_rows(self, requests: Sequence[Request]) -> bool:
        """Keep the KV before proposed tokens that could not be dropped; False: no room for it."""
        try:
            for request in requests:
                request.memory.before_drafts = fork(self.memory, request.memory.row)
        except OutOfPages:
            return False
        return True

    def _drops_newest(self, request: Request) -> bool:
        """Whether proposed tokens change nothing but the newest slots of the request's lanes.

        They change recurrent states and attention statistics, and take the places of
        full-precision tokens. Such a request is forked, and goes on with the fork if a proposed
        token is wrong.
        """
        row, spec = request.memory.row, request.eviction.spec
        counts = spec.cap is not None and spec.when != PREFILL_END
        return not any(
            group.page_class.per_page
            or group.state is not None
            or group.full_precision is not None
            or group.promoted is not None
            or (group.statistic is not None and counts)
            for group in (table.group for table in self.memory.tables.values() if table.active[row])
        )

    def _drop_forks(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.memory.before_drafts >= 0:
                self.memory.release([request.memory.before_drafts])
                request.memory.before_drafts = -1

    def _note_growth(
        self, requests: Sequence[Request], tokens: Sequence[int], copied_bytes: int
    ) -> None:
        if copied_bytes:  # copy on write of shared pages
            self.events.emit("copied", requests[0], kv_bytes=copied_bytes)
        if self.prefix is None:
            return
        block = self.prefix.block_tokens
        for request, count in zip(requests, tokens, strict=True):
            if request.memory.before_drafts >= 0:
                continue  # its tokens may be computed again: see `settle`
            if request.progress.num_computed % block + count >= block:
                self.publish(request, request.progress.num_computed + count)

    def settle(self, request: Request, accepted: int, rejected: int) -> None:
        """Count proposed tokens that were sampled, and drop the KV of the others.

        If the request goes on with a fork, all tokens of the step are computed again, as a chunk.
        """
        memory, progress, prefix = request.memory, request.progress, self.prefix
        before = progress.num_computed
        if memory.before_drafts >= 0:
            if rejected:
                self.note_peak(request)
                memory.row, memory.before_drafts = memory.before_drafts, memory.row
                progress.num_computed -= 1
                progress.again_until = before + accepted
                progress.charged_tokens = max(progress.charged_tokens, before + accepted)
            else:
                before -= 1
            self._drop_forks([request])
            if rejected:
                return
        elif rejected:
            self.memory.drop_newest(memory.row, rejected)
        progress.num_computed += accepted
        if prefix is not None and progress.num_computed > before:
            block = prefix.block_tokens
            if before // block != progress.num_computed // block:
                self.publish(request, progress.num_computed)
                self.confirm([request])

    def publish_known(self, requests: Sequence[Request]) -> None:
        """Publish the blocks of a launched step whose last tokens were not known when they grew.

        Args:
            requests: requests of the step; those that have ended are ignored.
        """
        prefix = self.prefix
        if prefix is None:
            return
        for request in requests:
            computed = request.progress.num_computed
            if request.is_running and computed % prefix.block_tokens == 0:
                self.publish(request, computed)
        self.confirm(requests)

    def fork(self, parent: Request, child: Request) -> None:
        """Fork the KV of a running request for a request without KV, with shared pages.

        Raises:
            OutOfPages: no row, or no pages for statistics; both requests are unchanged.
        """
        child.memory.row = fork(self.memory, parent.memory.row)
        child.progress.num_computed, child.eviction.exact = (
            parent.progress.num_computed,
            parent.eviction.exact,
        )
        share_evictions(parent, child)
        prefix = self.prefix
        if prefix is not None and parent.memory.lease is not None:
            child.memory.lease = prefix.share(parent.memory.lease)
        if not child.progress.num_admissions:
            child.progress.cached_tokens = child.progress.charged_cached_tokens = (
                parent.progress.cached_tokens
            )
        child.progress.state = RequestState.RUNNING
        self.note_entry(child)

    # ---- a step --------------------------------------------------------------------------------

    def confirm(self, requests: Sequence[Request]) -> None:
        """After a step: mark its published blocks as written, and save due statistics.

        The states of a decoding request are saved after its newest block, instead of the last time,
        so that a later turn of a conversation computes less than a block of the response again.
        """
        if self.prefix is not None:
            self.prefix.confirm()
            self._save(requests)

    def _save(self, requests: Sequence[Request]) -> None:
        prefix = self.prefix
        assert prefix is not None, "a prefix cache"
        for request in requests:
            done, lease = request.progress.num_computed, request.memory.lease
            if request.memory.before_drafts >= 0:
                continue  # its states have read proposed tokens
            if lease is None or not request.eviction.exact or done % prefix.block_tokens:
                continue
            every, decoded = self._checkpoint_tokens, done > len(request.prompt_token_ids)
            stays = done in request.memory.snapshot_ends or (every and done % every == 0)
            if not (stays or (self._has_states and decoded)):
                continue
            last = request.memory.checkpoint if decoded and self._has_states else None
            saved = prefix.snapshot(lease, request.memory.row, replaced=last)
            if saved and decoded and self._has_states:
                request.memory.checkpoint = None if stays else lease.nodes[-1]

    def until_checkpoint(self, request: Request) -> int | None:
        """Tokens up to the end of a block after which recurrent states are saved; None: no end."""
        if self.prefix is None or not self._has_states or request.memory.lease is None:
            return None
        block = self.prefix.block_tokens
        return block - request.progress.num_computed % block

    def withdraw(self) -> None:
        """After a failed step: remove the blocks that it published."""
        if self.prefix is not None:
            self.prefix.withdraw()

    def shares_unwritten(self, request: Request) -> bool:
        """Whether a request shares blocks that the step being planned will write."""
        prefix, lease = self.prefix, request.memory.lease
        return prefix is not None and lease is not None and prefix.is_pending(lease)


def sequence_memory_of(
    memory: KVMemory,
    kv: KVConfig,
    identities: PrefixIdentities,
    events: EventLog,
    *,
    listener: PrefixListener | None = None,
) -> SequenceMemory:
    """Create the memory of requests, with a prefix cache if `kv` has one.

    Raises:
        ConfigError: an option of checkpoints has no effect, or their memory holds none.
    """
    cache, every = kv.prefix_cache, kv.prefix_cache.state_checkpoint_interval
    states = [group for group in memory.layout.groups if group.state is not None]
    given = {
        "--state-checkpoint-interval": every,
        "--state-checkpoint-memory": cache.state_checkpoint_memory is not None,
    }
    for flag in (flag for flag, is_given in given.items() if is_given):
        why = "the model has no recurrent states" if not states else "the prefix cache is off"
        if not (states and cache.enabled):
            raise ConfigError(f"{flag} has no effect: {why}; leave it out")
    if not cache.enabled:
        return SequenceMemory(memory, None, identities, events=events)
    one_bytes, limit_bytes = sum(g.bytes_at_most(1, 1) for g in states), None
    if states:
        limit_bytes = cache.state_checkpoint_memory
        if limit_bytes is None:
            limit_bytes = max(one_bytes, memory.total_bytes // 2)
    if limit_bytes is not None and limit_bytes < one_bytes:
        raise ConfigError(
            f"expected --state-checkpoint-memory of {one_bytes:,} B or more, the bytes of one "
            f"checkpoint, got {limit_bytes:,} B; raise it, or use --no-enable-prefix-caching"
        )
    prefix = PrefixIndex(
        *(memory, listener, events.now_s),
        page_tokens=kv.page_tokens,
        snapshot_bytes=limit_bytes,
    )
    if every % prefix.block_tokens:
        raise ConfigError(
            f"expected --state-checkpoint-interval of a multiple of {prefix.block_tokens} tokens, "
            f"the block of the prefix cache, got {every}"
        )
    return SequenceMemory(memory, prefix, identities, events=events, checkpoint_tokens=every)


def share_evictions(parent: Request, child: Request) -> None:
    """Copy a parent's eviction state to its fork; later entries of the child's trace are kept."""
    own, inherited = child.eviction, parent.eviction
    own.trace[: inherited.replayed] = inherited.trace[: inherited.replayed]
    own.replayed = inherited.replayed
    if own.pending or not inherited.pending:
        own.division = inherited.division
    if len(own.trace) == own.replayed:  # the child has no evictions of its own
        own.num_evictions, own.evicted_tokens = inherited.num_evictions, inherited.evicted_tokens


def rows_of(requests: Sequence[Request]) -> NDArray[np.int64]:
    """The requests' rows of the KV memory."""
    return np.fromiter((r.memory.row for r in requests), dtype=np.int64, count=len(requests))
