"""Builds the KV memory of an engine from what the user said and what the model is."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from quire.config.kv_config import KVConfig
from quire.engine.activation import measure_activation_peak
from quire.engine.batch_invariance import (
    exact_statistics,
    one_by_one,
    prepare_batch_invariant,
    refuse_pressure,
)
from quire.engine.codec import StoredAs, codec_of
from quire.engine.option_effects import refuse_without_effect
from quire.engine.shared_pool import PoolMember
from quire.errors import ConfigError, UnsoundCombination
from quire.eviction.eviction_rules import EvictionRules, check_blocks
from quire.kernels.select import select_backend
from quire.kv.arena import choose_slab_bytes
from quire.kv.coded_layers import CodedLayers
from quire.kv.memory import KVMemory, MakeStore
from quire.kv.step import PagedKV
from quire.kv.store import PageStore, store_of
from quire.kv.stores.registry import (
    PREFIX_CACHE,
    UNROTATED,
    UNSOUND_TOGETHER,
    features_of,
    placement_maker,
    refuse_unsound,
    run_lengths,
    unsound,
)
from quire.kv.stores.runs import LaneLimits
from quire.kv.tables import refuse_too_many_rows
from quire.layout.eviction import EvictionSpec
from quire.layout.layout import layout_for
from quire.layout.pages import CacheLayout, PageClass
from quire.models.device_memory import free_device_bytes
from quire.models.loader import LoadedModel
from quire.offload.host_side import host_bytes_of, host_pool, stream_bytes_of
from quire.offload.kv.build import KVOffloadComponents, build_kv_offload
from quire.offload.kv.offload_choice import OffloadChoice
from quire.offload.swap.host_pool import HostPool
from quire.plan.capacity import DEFAULT_HEADROOM_SHARE, auto_kv_memory
from quire.policies.eviction import Eviction
from quire.scheduler.preemption.swapper import refuse_idle_host_pool
from quire.scheduler.request import Request
from quire.scheduler.schedule_config import ScheduleConfig
from quire.scheduler.step_size import most_batches, refuse_nothing_shared


@dataclass(frozen=True, slots=True)
class KVPool:
    """A KV memory ready for use, and why it is as it is.

    Attributes:
        kv: bookkeeping, bytes and backend.
        rules: which tokens may leave.
        eviction: the default rule, for the longest prompt there is.
        stored_as: how numbers are stored.
        reason: why this backend.
        store: who gives lanes their pages.
        batch_invariant: whether KV depends on the tokens alone.
        host: where preempted sequences wait; None where they are read again.
        fronts: first pages of sequences that run; None where all are in the KV memory.
    """

    kv: PagedKV
    rules: EvictionRules
    eviction: Eviction
    stored_as: StoredAs
    reason: str
    store: str
    batch_invariant: bool = False
    host: HostPool | None = None
    fronts: KVOffloadComponents | None = None

    @property
    def codec(self) -> str:
        """How numbers are stored, as it is written."""
        return self.stored_as.codec

    @property
    def explanation(self) -> str:
        """One line for `--verbose`."""
        memory = self.kv.memory
        pages = ", ".join(
            f"{g.name}: {len(g.layers)} layers, {g.page_class.page_bytes:,} B pages of "
            f"{g.page_class.tokens} tokens"
            for g in memory.layout.groups
        )
        fronts = "" if self.fronts is None else f"; on the host: {self.fronts.why}"
        no_cache = "" if self.why_no_prefix is None else f"; prefix cache off: {self.why_no_prefix}"
        return (
            f"{memory.total_bytes:,} B of KV in {self.codec}, {self.store} ({pages}); "
            f"attention: {self.kv.backend.name} ({self.reason}){no_cache}{fronts}"
        )

    @property
    def why_no_prefix(self) -> str | None:
        """Why prompts that begin alike share no KV here, whatever was asked; None if they can."""
        together = UNSOUND_TOGETHER[UNROTATED, PREFIX_CACHE] if self.rules.rerotates_keys else None
        why = together or unsound(self.store, PREFIX_CACHE)
        return None if why is None else str(why)


def build_pool(
    model: LoadedModel,
    config: KVConfig,
    schedule: ScheduleConfig,
    member: PoolMember | None = None,
    running: Sequence[Request] = (),
) -> KVPool:
    """Allocate the arena and all that belongs to it.

    Args:
        model: whose KV it will hold.
        config: the KV memory.
        schedule: steps and queues.
        member: a place in a pool that several models share; None allocates one of its own.
        running: requests that hold KV; the scheduler's own list.

    Raises:
        ConfigError: an option that cannot be; raised before the arena is allocated.
    """
    refuse_without_effect(config)
    decoder = model.decoder
    offloaded = config.offload.kv_memory > 0
    refuse_nothing_shared(
        schedule.objective, brought=model.weights is not None, offloaded=offloaded
    )
    stored_as = codec_of(config, model)
    codec = stored_as.codec
    invariant = schedule.batch_invariant
    if invariant:
        prepare_batch_invariant(model, config, codec)
    rules = EvictionRules(
        config.evict,
        config.evict_allow,
        model=model.spec,
        page_tokens=config.page_tokens,
        codec=codec,
        reserved=config.store != "paged",
        why_not=exact_statistics(decoder.prepare) if invariant else decoder.prepare,
    )
    if invariant:
        refuse_pressure(rules.default)
    check_blocks(rules.default, schedule)
    longest = rules.default.for_request(model.spec.max_positions, rules.lanes_of(rules.default))
    layout = layout_for(
        model.spec,
        codec=codec,
        page_tokens=config.page_tokens,
        evicting=rules.evicts,
        heads_apart=rules.heads_apart,
        rotated=not rules.rerotates_keys,
        statistics=rules.statistics,
    )
    _check_store(config, rules)
    _check_unrotated(model, rules)
    refuse_unsound(config.store, features_of(layout, enable_prefix_caching=False))
    choice = select_backend(
        config.attention,
        decoder.device,
        dtype=decoder.dtype,
        head_dim=model.spec.head_dim,
        scratch_bytes=config.scratch,
        rotated=not rules.rerotates_keys,
        codec=codec,
    )
    backend = one_by_one(choice) if invariant else choice.backend
    host_bytes = host_bytes_of(config, layout)
    refuse_idle_host_pool(host_bytes, schedule)
    stream_bytes = stream_bytes_of(config, layout)
    offload = OffloadChoice(model, config, layout) if stream_bytes else None
    if offload is not None:
        offload.refuse_without_effect(stream_bytes, longest.spec.statistics)
    refuse_too_many_rows(layout, schedule.num_rows)
    if member is None:
        make_store = partial(PageStore, device=decoder.device, mover=backend.move)
        memory = _own_memory(model, config, schedule, layout, longest.spec, make_store)
    else:
        _check_member(config, member)
        memory = member.make_memory(layout, schedule.num_rows, decoder.device, backend.move)
    store = store_of(memory)
    host = host_pool(store, layout, host_bytes) if host_bytes else None
    fronts = None
    if offload is not None:
        coded = CodedLayers(store, stored_as.measured)
        fronts = build_kv_offload(offload, memory, store, coded, stream_bytes, running)
    kv_offload = None if fronts is None else fronts.kv_offload
    kv = PagedKV(memory, store, backend, stored_as.measured, offload=kv_offload)
    return KVPool(
        kv, rules, longest, stored_as, choice.reason, config.store, invariant, host, fronts
    )


def _check_store(config: KVConfig, rules: EvictionRules) -> None:
    """A store that reserves lanes ahead must know how long they get, whoever asks for what."""
    if config.store != "paged" and rules.default.budget.needs_prompt:
        raise UnsoundCombination(
            f"store {config.store!r} reserves lanes before a prompt is read, and the budget of "
            f"{config.evict!r} divides the cap behind it; use --kv-store paged"
        )
    if config.store != "paged" and config.evict_allow.strip() not in ("", "none"):
        raise UnsoundCombination(
            f"store {config.store!r} reserves lanes as long as --evict lets them get, and with "
            f"--evict-allow {config.evict_allow!r} requests could ask for longer ones; use "
            "--kv-store paged or leave out --evict-allow"
        )


def _check_unrotated(model: LoadedModel, rules: EvictionRules) -> None:
    """Keys can be stored before RoPE only where it is known what RoPE does."""
    why = model.decoder.prepare_pre_rope() if rules.rerotates_keys else None
    if why is not None:
        raise UnsoundCombination(
            f"'streaming' stores keys before RoPE and turns them when they are attended, but {why};"
            " use 'sinks', which keeps the same tokens at the positions they had"
        )


def _own_memory(
    model: LoadedModel,
    config: KVConfig,
    schedule: ScheduleConfig,
    layout: CacheLayout,
    eviction: EvictionSpec,
    make_store: MakeStore,
) -> KVMemory:
    device = model.decoder.device
    limits = LaneLimits.of(config.store_tokens or model.spec.max_positions, eviction)
    return KVMemory(
        layout,
        _kv_bytes(model, config, schedule, layout, eviction),
        schedule.num_rows,
        store=make_store,
        track_changes=device.type != "cpu",
        placement=placement_maker(config.store, limits),
    )


def _check_member(config: KVConfig, member: PoolMember) -> None:
    if config.memory is not None:
        raise ConfigError(
            f"the KV memory of {config.memory} and a place in a shared pool exclude each other: "
            f"{member.name!r} has {member.guaranteed_bytes:,} B there; leave memory at auto"
        )
    if config.store != "paged":
        raise UnsoundCombination(
            f"store {config.store!r} keeps its pages in a row and cannot borrow single slabs of a "
            "shared pool: use the store 'paged'"
        )


def _kv_bytes(
    model: LoadedModel,
    config: KVConfig,
    schedule: ScheduleConfig,
    layout: CacheLayout,
    eviction: EvictionSpec,
) -> int:
    device = model.decoder.device
    free_bytes = free_device_bytes(device)
    if device.type == "cpu":  # the host pool lies in the same memory
        beside = config.swap_space + config.offload.kv_memory
        free_bytes = max(0, free_bytes - beside)
    if config.memory is not None:
        if config.memory > free_bytes:
            raise ConfigError(
                f"a KV memory of {config.memory:,} B is more than the {free_bytes:,} B that "
                "are free "
                f"on {device}; lower --kv-memory or say auto"
            )
        return config.memory
    total_bytes = free_bytes + model.weight_bytes
    brought = None if config.offload.kv_memory else model.weights
    left_bytes = auto_kv_memory(
        total_bytes=total_bytes,
        weights_bytes=model.weight_bytes,
        activation_peak_bytes=measure_activation_peak(
            model.decoder, schedule, most_batches(schedule.objective, brought)
        ),
        headroom_bytes=int(DEFAULT_HEADROOM_SHARE * total_bytes),
    )
    longest = config.store_tokens or model.spec.max_positions
    return min(left_bytes, most_kv_bytes(layout, longest, schedule, eviction, config.store))


def most_kv_bytes(
    layout: CacheLayout,
    max_tokens: int,
    schedule: ScheduleConfig,
    eviction: EvictionSpec,
    store: str = "paged",
) -> int:
    """Bytes of an arena that `max_num_seqs` requests of `max_tokens` tokens can never fill.

    Whole slabs, as many as every page class needs when slab borders cut pages.
    """
    chunk_tokens = max(schedule.longest_chunk, 0 if eviction.cap is None else eviction.every)
    lengths = run_lengths(store, LaneLimits.of(max_tokens, eviction))
    pages: dict[PageClass, int] = {}
    for group in layout.groups:
        tokens = max_tokens if group.ordered else eviction.peak_tokens(max_tokens)
        slots = group.slots_at_most(tokens, chunk_tokens) if lengths is None else tokens
        lane_pages = np.array([group.page_class.pages_for(slots)])
        if lengths is not None:
            lane_pages = lengths.peak_pages(group, lane_pages)
        needed = int(lane_pages[0]) * group.num_lanes * schedule.num_rows
        pages[group.page_class] = pages.get(group.page_class, 0) + needed
    sizes = [page_class.page_bytes for page_class in pages]
    # at least the slabs of an arena of any size, which are largest in a large one
    slab_bytes = choose_slab_bytes(1 << 60, sizes, whole_pages=lengths is not None)
    borders = 0 if lengths is None else lengths.border_slabs(len(pages))
    return slab_bytes * sum(
        -(-count // (slab_bytes // page.page_bytes - bool(slab_bytes % page.page_bytes))) + borders
        for page, count in pages.items()
    )
