"""Builds the KV memory of an engine for a model and its options."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from quire.config.kv_config import KVConfig
from quire.engine.batch_invariance import (
    exact_statistics,
    one_by_one,
    prepare_batch_invariant,
    refuse_pressure,
)
from quire.engine.kv_memory import StoredAs, codec_of, kv_memory_bytes, swap_space
from quire.engine.shared_pool import PoolMember
from quire.errors import ConfigError, RequestError
from quire.eviction.eviction_rules import (
    EvictionRules,
    Provided,
    check_chunk_size,
    check_pre_rope,
    first_served,
    unless_scored,
)
from quire.kernels.backend import AttentionBackend
from quire.kernels.pre_rope import PreRopeAttention
from quire.kernels.select import select_backend
from quire.kv.coded_layers import CodedLayers
from quire.kv.memory import KVMemory, MakeStore
from quire.kv.paged_kv import PagedKV
from quire.kv.store import PageStore, store_of
from quire.kv.tables import refuse_too_many_rows
from quire.layout import limits
from quire.layout.kv_format import read_format
from quire.layout.layout import (
    added_statistics,
    classes_with_bounds,
    layout_for,
    offloaded_bounds_bytes,
    usable_offload_bytes,
)
from quire.layout.pages import CacheLayout
from quire.layout.sizes import format_size
from quire.layout.sparse import SparseSpec, parse_sparse, refuse_sparse
from quire.layout.statistics import Statistic
from quire.models.base import attention_math
from quire.models.loader import LoadedModel
from quire.offload.host_side import host_bytes_of, stream_bytes_of
from quire.offload.kv.build import KVOffloadComponents, OffloadChoice, build_kv_offload
from quire.offload.kv.hot_pages import with_dense_layers
from quire.offload.swap.host_pool import HostPool
from quire.policies.eviction import Eviction
from quire.policies.registry import load_policy_file
from quire.scheduler.preemption import refuse_unused_swap_space
from quire.scheduler.request import Request
from quire.scheduler.schedule_config import ScheduleConfig
from quire.scheduler.speculation import parse_speculative
from quire.scheduler.step import refuse_nothing_shared

logger = logging.getLogger(__name__)

MAX_GROUPS = 128  # lane groups with those that requests add: bounds page tables


@dataclass(frozen=True, slots=True)
class KVPool:
    """The KV memory of an engine and the resolved options behind it."""

    kv: PagedKV
    rules: EvictionRules
    eviction: Eviction  # the default rule, resolved for the longest prompt
    stored_as: StoredAs
    reason: str  # for the selected attention backend
    batch_invariant: bool = False  # whether KV depends only on the tokens before it
    host: HostPool | None = None  # swap space; None if preempted requests are recomputed
    offload: KVOffloadComponents | None = None

    @property
    def codec(self) -> str:
        return self.stored_as.codec

    @property
    def explanation(self) -> str:
        memory = self.kv.memory
        pages = ", ".join(
            f"{g.contents} of {len(g.layers)} layers in pages of {g.page_class.page_bytes:,} B "
            f"for {g.page_class.tokens} tokens"
            for g in memory.layout.groups
        )
        offload = "" if self.offload is None else f"; KV offload: {self.offload.why}"
        swap = "no swap space" if self.host is None else f"swap space: {self.host.total_bytes:,} B"
        return (
            f"{memory.total_bytes:,} B of KV in {self.codec} ({pages}); "
            f"attention: {self.kv.backend.name} ({self.reason}); {swap}{offload}"
        )

    def add_statistics(self, statistics: Sequence[Statistic]) -> None:
        """Add lane groups for statistics that the layout lacks, for a request's rule."""
        layout = self.kv.memory.layout
        added = added_statistics(self.rules.model, layout, statistics)
        if not added:
            return
        if len(layout.groups) + len(added) > MAX_GROUPS:
            raise RequestError(
                f"evict: requests have named rules with {len(layout.groups)} kinds of statistics "
                f"and windows, and an engine has at most {MAX_GROUPS}; name a rule with other "
                "options, or start another engine",
                param="evict",
            )
        try:
            refuse_too_many_rows(added, len(self.kv.memory.lengths))
            self.kv.add_groups(added)
        except ConfigError as error:
            raise RequestError(f"evict: {error}", param="evict") from error


def build_pool(
    model: LoadedModel,
    config: KVConfig,
    schedule: ScheduleConfig,
    member: PoolMember | None = None,
    running: Sequence[Request] = (),
) -> KVPool:
    """Allocate the arena, swap space and KV offload of an engine."""
    plan = _plan_pool(model, config, schedule)
    if config.offload.kv_memory and member is not None and classes_with_bounds(plan.layout):
        raise limits.refused(limits.SPARSE_OFFLOAD)
    layout, device, mover = plan.layout, model.decoder.device, plan.backend.move
    host_bytes, offload_bytes = host_bytes_of(config, layout), stream_bytes_of(config, layout)
    if host_bytes is not None:
        refuse_unused_swap_space(host_bytes, schedule)
    total_bytes, bounds_bytes = None, 0
    if offload_bytes and classes_with_bounds(layout):  # bounds of offloaded pages are KV memory
        total_bytes = kv_memory_bytes(model, config, schedule, layout, plan.eviction.spec)
        usable_bytes = usable_offload_bytes(layout, total_bytes)
        if usable_bytes < offload_bytes:
            logger.warning(
                "of --kv-offload-memory %s, %s is allocated: with --sparse, a KV memory of %s has "
                "room for staging and bounds of no more; raise --kv-memory to use all of it",
                *map(format_size, (offload_bytes, usable_bytes, total_bytes)),
            )
            offload_bytes = usable_bytes
        bounds_bytes = offloaded_bounds_bytes(layout, offload_bytes)
        total_bytes -= bounds_bytes
    choice = OffloadChoice(model, config, layout) if offload_bytes else None
    if choice is not None:
        choice.refuse_without_effect(offload_bytes, plan.eviction.spec.statistics)
    refuse_too_many_rows(layout.groups, schedule.rows_with_forks)
    if member is None:
        make_store = partial(PageStore, device=device, mover=mover)
        memory = _own_memory(model, config, schedule, layout, plan, make_store, total_bytes)
    else:
        if model.group.size > 1:
            raise limits.refused(limits.SHARED_POOL_ON_RANKS, ranks=model.group.size)
        if config.memory is not None:
            raise ConfigError(
                f"a KV memory of {config.memory} conflicts with a shared pool, which guarantees "
                f"{member.guaranteed_bytes:,} B to {member.name!r}; leave memory at auto"
            )
        memory = member.make_memory(layout, schedule.rows_with_forks, device, mover)
    memory.arena.unpaged_bytes = bounds_bytes
    store, measured = store_of(memory), plan.stored_as.measured
    host = swap_space(memory, schedule, host_bytes, offload_bytes, model.group)
    offload = None
    if choice is not None:
        coded = CodedLayers(store, measured)
        offload = build_kv_offload(choice, memory, store, coded, offload_bytes, running)
    kv_offload = None if offload is None else offload.kv_offload
    return KVPool(
        kv=PagedKV(
            memory, store, plan.backend, measured, offload=kv_offload, pre_rope=plan.pre_rope
        ),
        rules=plan.rules,
        eviction=plan.eviction,
        stored_as=plan.stored_as,
        reason=plan.reason,
        batch_invariant=schedule.batch_invariant,
        host=host,
        offload=offload,
    )


@dataclass(frozen=True, slots=True)
class _PoolPlan:
    """Resolved options of a pool before its allocation; `KVPool` explains the names."""

    stored_as: StoredAs
    rules: EvictionRules
    eviction: Eviction
    layout: CacheLayout
    backend: AttentionBackend
    reason: str
    pre_rope: AttentionBackend | None = None


def _plan_pool(model: LoadedModel, config: KVConfig, schedule: ScheduleConfig) -> _PoolPlan:
    """Resolve the options of a pool and refuse conflicting options."""
    cache, limit = config.prefix_cache, None
    if cache.cpu_memory or cache.disk_memory or cache.remote:
        limit = limits.TIER_ON_RANKS
    elif config.offload.kv_memory:
        limit = limits.OFFLOAD_ON_RANKS
    elif schedule.batch_invariant:
        limit = limits.INVARIANT_ON_RANKS
    if model.group.size > 1 and limit is not None:
        raise limits.refused(limit)
    refuse_nothing_shared(schedule.objective, offloaded_weights=model.weights is not None)
    stored_as = codec_of(config, model)
    if schedule.batch_invariant:
        prepare_batch_invariant(model, config, stored_as.codec)
    rules = _make_rules(model, config, schedule, stored_as.codec)
    sparse = parse_sparse(config.sparse)
    if sparse is not None:
        _refuse_sparse(model, config, stored_as.codec, rules, sparse)
    longest = rules.resolve_default(model.spec.max_positions)
    layout = layout_for(
        model.spec,
        codec=stored_as.codec,
        page_tokens=config.page_tokens,
        evicting=rules.evicts,
        heads_apart=rules.heads_apart,
        rotated=not rules.rerotates_keys,
        statistics=rules.statistics,
        bounds=sparse is not None,
    )
    layout = rules.fitted(layout)
    if sparse is not None and config.offload.kv_memory:
        layout = with_dense_layers(layout, sparse)
    check_pre_rope(rules, model.decoder.prepare_pre_rope)
    if parse_speculative(schedule.speculative) is not None:
        _refuse_speculative(model, config)
    choice = select_backend(
        config.attention,
        model.decoder.device,
        dtype=model.decoder.dtype,
        head_dim=model.spec.dims,
        scratch_bytes=config.scratch,
        rotated=not rules.rerotates_keys,
        codec=stored_as.codec,
    )
    backend = one_by_one(choice, model.spec) if schedule.batch_invariant else choice.backend
    pre_rope = None
    if rules.mixes and rules.why_no_pre_rope is None:
        pre_rope = PreRopeAttention(model.decoder.device, scratch_bytes=config.scratch)
    return _PoolPlan(stored_as, rules, longest, layout, backend, choice.reason, pre_rope)


def _refuse_sparse(
    model: LoadedModel, config: KVConfig, codec: str, rules: EvictionRules, spec: SparseSpec
) -> None:
    """Refuse what sparse attention cannot be combined with."""
    device = model.decoder.device
    for is_limited, limit in (
        (device.type not in ("cpu", "cuda"), limits.SPARSE_DEVICE),
        (device.type == "cuda" and bool(config.offload.kv_memory), limits.SPARSE_OFFLOAD_DEVICE),
        (rules.rerotates_keys, limits.SPARSE_PRE_ROPE),
        (rules.mixes, limits.SPARSE_ALLOWED),
        (any(math.alibi for math in attention_math(model.decoder)), limits.SPARSE_ALIBI),
    ):
        if is_limited:
            raise limits.refused(limit, device=device)
    refuse_sparse(model.spec, codec, spec)


def _refuse_speculative(model: LoadedModel, config: KVConfig) -> None:
    """Refuse what speculative decoding cannot be combined with."""
    for is_limited, limit in (
        (bool(config.offload.kv_memory), limits.SPECULATIVE_OFFLOAD),
        (parse_sparse(config.sparse) is not None, limits.SPECULATIVE_SPARSE),
    ):
        if is_limited:
            raise limits.refused(limit)


def _make_rules(
    model: LoadedModel, config: KVConfig, schedule: ScheduleConfig, codec: str
) -> EvictionRules:
    load_policy_file(config.policy_file)  # an engine of another rank or without an `LLM`
    prepare = unless_scored(model.decoder.prepare, _why_no_scoring(model, config, codec))
    provided = Provided(
        exact_statistics(prepare) if schedule.batch_invariant else prepare,
        _why_no_pre_rope(model, config, schedule),
        model.decoder.output_projections,
    )
    rules = first_served(
        config.evict,
        lambda evict: EvictionRules(
            evict,
            config.evict_allow,
            model=model.spec,
            page_tokens=config.page_tokens,
            codec=codec,
            provided=provided,
            ranks=model.group.size,
            bounds=parse_sparse(config.sparse) is not None,
        ),
    )
    if schedule.batch_invariant:
        refuse_pressure(rules.default)
    check_chunk_size(rules.default, schedule)
    return rules


def _why_no_scoring(model: LoadedModel, config: KVConfig, codec: str) -> limits.Limit | None:
    """Why an engine has no scoring passes; None if it has them."""
    if any(layer.state is not None or layer.chunk for layer in model.spec.layers):
        return limits.SCORED_STATES
    if read_format(codec).recent(config.page_tokens):
        return limits.SCORED_RECENT
    return limits.SCORED_OFFLOAD if config.offload.kv_memory else None


def _why_no_pre_rope(model: LoadedModel, config: KVConfig, schedule: ScheduleConfig) -> str | None:
    """Why single requests cannot store keys before RoPE; None if they can."""
    if config.offload.kv_memory:
        return "KV offload reads keys after RoPE"
    if schedule.batch_invariant:
        return "batch-invariant engines have one attention backend"
    return model.decoder.prepare_pre_rope()


def _own_memory(
    model: LoadedModel,
    config: KVConfig,
    schedule: ScheduleConfig,
    layout: CacheLayout,
    plan: _PoolPlan,
    make_store: MakeStore,
    total_bytes: int | None = None,
) -> KVMemory:
    device, eviction = model.decoder.device, plan.eviction.spec
    if total_bytes is None:
        total_bytes = kv_memory_bytes(model, config, schedule, layout, eviction)
    return KVMemory(
        layout,
        total_bytes,
        schedule.rows_with_forks,
        store=make_store,
        track_changes=device.type != "cpu",
        unite=model.group.union if model.group.size > 1 else None,
    )
