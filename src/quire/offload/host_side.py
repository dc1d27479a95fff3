"""Host memory beside the KV memory: for sequences that wait, and first pages of those that run."""

import torch

from quire.config.kv_config import KVConfig
from quire.errors import ConfigError, UnsoundCombination
from quire.kv.store import PageStore
from quire.layout.layout import can_be_offloaded
from quire.layout.pages import CacheLayout
from quire.models.device_memory import free_device_bytes
from quire.offload.swap.host_pool import HostPool, refuse_too_small
from quire.offload.swap.host_store import host_copies


def host_bytes_of(config: KVConfig, layout: CacheLayout) -> int:
    """Host memory for preempted sequences.

    Raises:
        ConfigError: more than is free, or too little for any sequence.
    """
    requested_bytes = config.swap_space
    refuse_too_small(requested_bytes, layout)
    free_bytes = free_device_bytes(torch.device("cpu"))
    if requested_bytes > free_bytes:
        raise ConfigError(
            f"a host pool of {requested_bytes:,} B is more than the {free_bytes:,} B that are "
            "free on "
            "this machine or in its container; lower --swap-space"
        )
    return requested_bytes


def stream_bytes_of(config: KVConfig, layout: CacheLayout) -> int:
    """Host memory for fronts.

    Raises:
        ConfigError: more than is free beside the host pool, no layers that could have a front, or
            a part of what is not there at all.
        UnsoundCombination: a store whose lanes lie in one piece.
    """
    requested_bytes = config.offload.kv_memory
    if not requested_bytes:
        _refuse_parts_of_nothing(config)
        return 0
    if config.store != "paged":
        raise UnsoundCombination(
            f"store {config.store!r} keeps a lane's pages in a row, of which the first cannot be "
            "elsewhere; use --kv-store paged or leave out --kv-offload-memory"
        )
    if not any(map(can_be_offloaded, layout.groups)):
        raise ConfigError(
            "--kv-offload-memory keeps two layers of what it moves in the KV memory, and this "
            "model "
            "has no more than two that look back at all tokens; leave it out"
        )
    free_bytes = free_device_bytes(torch.device("cpu")) - config.swap_space
    if requested_bytes > free_bytes:
        raise ConfigError(
            f"{requested_bytes:,} B for sequences that run are more than the "
            f"{max(0, free_bytes):,} B "
            "that are free beside the host pool; lower --kv-offload-memory"
        )
    return requested_bytes


def _refuse_parts_of_nothing(config: KVConfig) -> None:
    requested = {
        "--kv-offload-recompute": config.offload.recompute,
        "--kv-offload-cpu-attention": config.offload.cpu_attention,
    }
    for flag, part in requested.items():
        if part:
            raise ConfigError(
                f"{flag} {part:g} is a part of the first pages on the host, and none go there: say "
                f"--kv-offload-memory SIZE too, or leave out {flag}"
            )
    if config.offload.activation_codec is not None:
        raise ConfigError(
            f"--kv-offload-activation-codec {config.offload.activation_codec.name} is for "
            "activations of the first "
            "pages on the host, and none go there: say --kv-offload-memory SIZE too, or leave "
            "it out"
        )


def host_pool(store: PageStore, layout: CacheLayout, host_bytes: int) -> HostPool:
    """A pool of so many bytes beside an arena."""
    largest_page_bytes = max(page_class.page_bytes for page_class in layout.page_classes)
    return HostPool(host_bytes, host_copies(store, host_bytes, largest_page_bytes))
