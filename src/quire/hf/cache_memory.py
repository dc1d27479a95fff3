"""The KV memory of a cache: the engine's components for the rows of one batch."""

from dataclasses import dataclass

import torch

from quire.engine.kv_memory import StoredAs, max_kv_bytes
from quire.errors import ConfigError
from quire.eviction.eviction_rules import EvictionRules
from quire.kernels.memory import free_device_bytes
from quire.kernels.select import select_backend
from quire.kv.paged_kv import PagedKV, allocate_kv
from quire.layout.eviction import EvictionSpec
from quire.layout.layout import layout_for
from quire.layout.model import ModelSpec
from quire.layout.pages import CacheLayout
from quire.layout.sizes import parse_size
from quire.models.base import Decoder
from quire.scheduler.schedule_config import ScheduleConfig

SCRATCH_BYTES = 64 << 20  # for gathered pages, outside the KV memory
_FREE_SHARE = 0.9  # fraction of free memory, if no size is set
_MIN_ROWS = 64  # rows can be repeated later; an unused row costs table entries, no pages


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """Size and page layout of a cache's KV memory."""

    # bytes or a size; None: the need of the batch, at most nine tenths of the free memory
    memory: int | str | None
    max_tokens: int  # of a sequence
    page_tokens: int
    attention: str


def make_layout(spec: ModelSpec, codec: str, rules: EvictionRules, page_tokens: int) -> CacheLayout:
    """Lane groups of a sequence under a rule."""
    return layout_for(
        spec,
        codec=codec,
        page_tokens=page_tokens,
        evicting=rules.evicts,
        heads_apart=rules.heads_apart,
        rotated=not rules.rerotates_keys,
        statistics=rules.statistics,
    )


def make_memory(
    decoder: Decoder,
    layout: CacheLayout,
    stored: StoredAs,
    rows: int,
    eviction: EvictionSpec,
    options: MemoryOptions,
) -> PagedKV:
    """Allocate the arena of a batch."""
    device = decoder.device
    backend = select_backend(
        options.attention,
        device,
        dtype=decoder.dtype,
        head_dim=decoder.spec.dims,
        scratch_bytes=SCRATCH_BYTES,
        rotated=all(group.page_class.rotated for group in layout.groups),
        codec=stored.codec,
    ).backend
    with torch.inference_mode(mode=False):  # the arena outlives the caller's inference mode
        return allocate_kv(
            layout,
            _memory_bytes(device, layout, rows, eviction, options),
            max(_MIN_ROWS, 2 * rows),  # beams are forked before the old ones are closed
            device=device,
            backend=backend,
            measured=stored.measured,
        )


def _memory_bytes(
    device: torch.device,
    layout: CacheLayout,
    rows: int,
    eviction: EvictionSpec,
    options: MemoryOptions,
) -> int:
    free_bytes = free_device_bytes(device)
    if options.memory is None:
        schedule = ScheduleConfig(max_num_seqs=rows)
        needed = max_kv_bytes(layout, options.max_tokens, schedule, eviction)
        return min(needed, int(_FREE_SHARE * free_bytes))
    requested_bytes = parse_size(options.memory)
    if requested_bytes > free_bytes:
        raise ConfigError(
            f"memory={options.memory!r} is {requested_bytes:,} B, but only {free_bytes:,} B are "
            f"free on {device}; lower it"
        )
    needed = rows * layout.smallest_sequence_bytes
    if requested_bytes < needed:
        raise ConfigError(
            f"memory={options.memory!r} is {requested_bytes:,} B, but one token in each of "
            f"{rows} rows needs {needed:,} B; raise it or lower page_tokens="
        )
    return requested_bytes
