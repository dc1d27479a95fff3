"""Sizes of an engine's KV memory and swap space: configured, or from free memory."""

from quire.config.kv_config import KVConfig
from quire.engine.activation import measure_activation_peak
from quire.errors import ConfigError
from quire.kernels.memory import free_device_bytes
from quire.kv.memory import KVMemory
from quire.kv.store import store_of
from quire.layout.eviction import EvictionSpec
from quire.layout.pages import CacheLayout, PageClass
from quire.layout.slabs import choose_slab_bytes, slabs_for
from quire.models.loader import LoadedModel
from quire.offload.host_side import auto_swap_pool, free_swap_bytes, swap_pool, swap_worker
from quire.offload.swap.host_pool import HostPool, auto_swap_bytes
from quire.parallel.group import ONE_RANK, TensorGroup
from quire.plan.capacity import DEFAULT_HEADROOM_SHARE, auto_kv_memory
from quire.scheduler.preemption import refuse_unused_swap_space, uses_swap_space
from quire.scheduler.schedule_config import ScheduleConfig
from quire.scheduler.step import max_batches

_UNMEASURED_SHARE = 0.25
"""If all requests of an engine need at most this fraction of the free memory for KV, the rest is
enough for activations, and the start takes no time to measure them."""


def kv_memory_bytes(
    model: LoadedModel,
    config: KVConfig,
    schedule: ScheduleConfig,
    layout: CacheLayout,
    eviction: EvictionSpec,
) -> int:
    """Size of the KV memory: as configured, or the memory left by weights and activations."""
    device = model.decoder.device
    free_bytes = free_device_bytes(device)
    if device.type == "cpu":  # other ranks, swap space and KV offload use the same memory
        free_bytes //= model.group.size
        reserved_bytes = (config.swap_space or 0) + config.offload.kv_memory
        free_bytes = max(0, free_bytes - reserved_bytes)
    if config.memory is not None:
        if config.memory > free_bytes:
            raise ConfigError(
                f"a KV memory of {config.memory:,} B exceeds the {free_bytes:,} B that "
                "are free "
                f"on {device}; lower --kv-memory or use auto"
            )
        return config.memory
    max_bytes = max_kv_bytes(layout, model.spec.max_positions, schedule, eviction)
    if max_bytes <= _UNMEASURED_SHARE * model.group.least(free_bytes):
        return max_bytes
    total_bytes = free_bytes + model.weight_bytes
    offloaded_weights = None if config.offload.kv_memory else model.weights
    left_bytes = auto_kv_memory(
        total_bytes=total_bytes,
        weights_bytes=model.weight_bytes,
        activation_peak_bytes=measure_activation_peak(
            model.decoder, schedule, max_batches(schedule.objective, offloaded_weights)
        ),
        headroom_bytes=int(DEFAULT_HEADROOM_SHARE * total_bytes),
    )
    return model.group.least(min(left_bytes, max_bytes))  # page tables are equal on all ranks


def max_kv_bytes(
    layout: CacheLayout, max_tokens: int, schedule: ScheduleConfig, eviction: EvictionSpec
) -> int:
    """Size of an arena that `max_num_seqs` requests of `max_tokens` tokens can never fill.

    Counts whole slabs per page class, with the pages lost at slab boundaries.
    """
    chunk_tokens = max(schedule.longest_chunk, 0 if eviction.cap is None else eviction.every)
    pages: dict[PageClass, int] = {}
    for group in layout.groups:
        tokens = max_tokens if group.ordered else eviction.peak_tokens(max_tokens)
        lane_pages = group.page_class.pages_for(group.slots_at_most(tokens, chunk_tokens))
        needed = lane_pages * group.num_lanes * schedule.num_rows
        pages[group.page_class] = pages.get(group.page_class, 0) + needed
    sizes = [page_class.page_bytes for page_class in pages]
    # an upper bound for the slab size of an arena of any size
    slab_bytes = choose_slab_bytes(1 << 60, sizes)
    return slab_bytes * slabs_for(
        slab_bytes, ((page.page_bytes, count) for page, count in pages.items())
    )


def swap_space(
    memory: KVMemory,
    schedule: ScheduleConfig,
    host_bytes: int | None,
    offload_bytes: int,
    group: TensorGroup = ONE_RANK,
) -> HostPool | None:
    """Allocate the swap space."""
    store, layout = store_of(memory), memory.layout
    # ranks must learn equal rates at the same steps, so their copies block
    worker = swap_worker(store.device) if group.size == 1 else None
    if host_bytes is not None:
        return swap_pool(memory, host_bytes, worker) if host_bytes else None
    host = None
    if uses_swap_space(schedule):
        free_bytes = group.least(free_swap_bytes(store, offload_bytes) // group.size)
        size_bytes = auto_swap_bytes(memory.total_bytes, free_bytes, layout)
        host = auto_swap_pool(memory, size_bytes, worker)
    refuse_unused_swap_space(0 if host is None else host.total_bytes, schedule)
    return host
