"""CPU memory of the engine: swap space, and memory for offloaded KV of running requests."""

import logging

import torch

from quire.config.kv_config import KVConfig
from quire.errors import ConfigError
from quire.kernels.memory import free_device_bytes
from quire.kv.memory import KVMemory
from quire.kv.store import PageStore, store_of
from quire.layout.layout import can_be_offloaded
from quire.layout.pages import CacheLayout
from quire.offload.kv.cuda_transfer import StreamTransferWorker
from quire.offload.swap.host_pool import HostCopies, HostPool, refuse_too_small
from quire.offload.swap.host_store import host_copies
from quire.offload.swap.transfer import StreamedCopies, TransferWorker

logger = logging.getLogger(__name__)


def host_bytes_of(config: KVConfig, layout: CacheLayout) -> int | None:
    """Configured size of the swap space for preempted requests in bytes; None for auto.

    Raises:
        ConfigError: the size exceeds free memory, or is too small for any request.
    """
    requested_bytes = config.swap_space
    if requested_bytes is None:
        return None
    refuse_too_small(requested_bytes, layout)
    free_bytes = free_device_bytes(torch.device("cpu"))
    if requested_bytes > free_bytes:
        raise ConfigError(
            f"expected --swap-space of at most {free_bytes:,} B (CPU memory that is free on this "
            f"machine or in its container), got {requested_bytes:,} B; lower --swap-space"
        )
    return requested_bytes


def stream_bytes_of(config: KVConfig, layout: CacheLayout) -> int:
    """Size of the memory for offloaded KV of running requests in bytes.

    Raises:
        ConfigError: the size exceeds free memory, no layer can be offloaded, or a fraction is set
            while no KV is offloaded.
    """
    requested_bytes = config.offload.kv_memory
    if not requested_bytes:
        _refuse_parts_of_nothing(config)
        return 0
    if not any(map(can_be_offloaded, layout.groups)):
        raise ConfigError(
            "--kv-offload-memory stages two layers in the KV memory, and this model has no more "
            "than two layers with full attention and pages of one size; leave it out"
        )
    free_bytes = free_device_bytes(torch.device("cpu")) - (config.swap_space or 0)
    if requested_bytes > free_bytes:
        raise ConfigError(
            f"expected --kv-offload-memory of at most {max(0, free_bytes):,} B (free CPU memory "
            f"without the swap space), got {requested_bytes:,} B; lower --kv-offload-memory"
        )
    return requested_bytes


def _refuse_parts_of_nothing(config: KVConfig) -> None:
    requested = {
        "--kv-offload-recompute": config.offload.recompute,
        "--kv-offload-cpu-attention": config.offload.cpu_attention,
    }
    for flag, fraction in requested.items():
        if fraction:
            raise ConfigError(
                f"{flag} {fraction:g} is a fraction of the offloaded KV, and no KV is offloaded: "
                f"set --kv-offload-memory too, or leave out {flag}"
            )
    if config.offload.activation_codec is not None:
        raise ConfigError(
            f"--kv-offload-activation-codec {config.offload.activation_codec.name} is for "
            "activations of offloaded KV, and no KV is offloaded: set --kv-offload-memory too, or "
            "leave it out"
        )


def free_swap_bytes(store: PageStore, offload_bytes: int) -> int:
    """CPU memory that is left for swap space when arena and offload memory are fully in use."""
    arena_bytes = store.arena.numel() if store.device.type == "cpu" else 0
    return free_device_bytes(torch.device("cpu")) - arena_bytes - offload_bytes


def auto_swap_pool(
    memory: KVMemory, host_bytes: int, worker: TransferWorker | None
) -> HostPool | None:
    """Allocate swap space of a default size; None for 0 bytes, or if it cannot be pinned."""
    try:
        return swap_pool(memory, host_bytes, worker) if host_bytes else None
    except ConfigError as error:
        logger.info("no swap space, preempted requests are recomputed: %s", error)
        return None


def host_pool(store: PageStore, layout: CacheLayout, host_bytes: int) -> HostPool:
    """Allocate a host pool of this size for the pages of a store."""
    return HostPool(host_bytes, _blocking_copies(store, layout, host_bytes))


def _blocking_copies(store: PageStore, layout: CacheLayout, host_bytes: int) -> HostCopies:
    largest_page_bytes = max(page_class.page_bytes for page_class in layout.page_classes)
    return host_copies(store, host_bytes, largest_page_bytes)


def swap_worker(device: torch.device) -> TransferWorker | None:
    """Return what runs swap copies next to the computation; None on a CPU, where they block."""
    return StreamTransferWorker(device) if device.type == "cuda" else None


def swap_pool(memory: KVMemory, host_bytes: int, worker: TransferWorker | None) -> HostPool:
    """Allocate swap space of this size for the sequences of a KV memory.

    Args:
        memory: the KV memory.
        host_bytes: size of the swap space.
        worker: runs the copies next to the computation; None if copies block.
    """
    copies = _blocking_copies(store_of(memory), memory.layout, host_bytes)
    if worker is not None:
        copies = StreamedCopies(copies, worker, memory.arena.fences)
    return HostPool(host_bytes, copies)
