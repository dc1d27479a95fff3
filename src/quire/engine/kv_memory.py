"""The KV memory of an engine: its codec, its size, and that of the swap space.

The codec is checked against the model and the device. Sizes are configured, or what free memory has
left after the peak of activations, which is measured.
"""

from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path

import psutil
import torch
from torch import Tensor

from quire.codecs.registry import make_codec
from quire.config.kv_config import KVConfig
from quire.errors import ConfigError
from quire.kernels.dense import attend_dense
from quire.kernels.memory import free_device_bytes
from quire.kv.coded_layers import MeasuredConstants, read_constants, sides_of
from quire.kv.memory import KVMemory
from quire.kv.store import plain_codec, store_of
from quire.layout.eviction import EvictionSpec
from quire.layout.kv_format import read_format, stored_codec
from quire.layout.model import ModelSpec
from quire.layout.pages import CacheLayout, PageClass, choose_slab_bytes, slabs_for
from quire.models.base import AttentionCall, Batch, Decoder, LayerByLayer, OneSequence
from quire.models.loader import LoadedModel
from quire.offload.host_side import auto_swap_pool, free_swap_bytes, swap_pool, swap_worker
from quire.offload.swap.host_pool import HostPool, auto_swap_bytes
from quire.parallel.group import ONE_RANK, TensorGroup
from quire.plan.capacity import (
    DEFAULT_HEADROOM_SHARE,
    auto_kv_memory,
    estimate_activation_peak,
    hidden_state_bytes,
)
from quire.plan.weights import MAX_CHUNKS
from quire.sampling.device_sampling import sampling_scratch_bytes
from quire.scheduler.preemption import refuse_unused_swap_space, uses_swap_space
from quire.scheduler.schedule_config import ScheduleConfig
from quire.scheduler.step import max_batches

_CPU_ALLOCATOR = "DefaultCPUAllocator"  # torch has no exception type for exhausted CPU memory
_RESET_PEAK = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_UNMEASURED_SHARE = 0.25
"""If all requests of an engine need at most this fraction of the free memory for KV, the rest is
enough for activations, and the start takes no time to measure them."""


@dataclass(frozen=True, slots=True)
class StoredAs:
    """The storage format of keys and values."""

    codec: str  # with all defaults resolved
    dtype: str  # compute dtype of the model
    measured: MeasuredConstants | None = None  # calibration constants; None if the codec needs none

    @property
    def fingerprint(self) -> str:
        """Identity of the encoding: equal fingerprints encode equal values to equal codes."""
        parts = [self.codec, self.dtype]
        return " ".join([*parts, self.measured.digest] if self.measured else parts)


def codec_of(config: KVConfig, model: LoadedModel) -> StoredAs:
    """Resolve the KV codec of an engine and read its calibration constants; see `stored_as`."""
    return stored_as(
        config.codec,
        model.decoder,
        model.spec,
        constants=config.constants,
        folder=model.folder,
        argument=model.argument,
    )


def stored_as(
    codec: str,
    decoder: Decoder,
    spec: ModelSpec,
    *,
    constants: str = "",
    folder: Path | None = None,
    argument: str = "MODEL",
) -> StoredAs:
    """Resolve a KV codec; read its constants from `constants`, else the model's folder.

    Errors advise to calibrate the model `argument`.
    """
    dtype = plain_codec(decoder.dtype)
    written = stored_codec(codec, dtype, latent=spec.latent is not None)
    form = read_format(written)
    if form.plain is None and not form.is_plain and any(layer.drafts for layer in spec.layers):
        written = f"{written}+plain={dtype}"  # the type of the draft model's layers
        form = read_format(written)
    pairs = [(form.key, form.value)]
    pairs += [(form.promoted.key, form.promoted.value)] if form.promoted else []
    sides = (zip(*both, strict=True) for both in product(pairs, spec.dims))
    for part, dim in chain.from_iterable(sides):
        why_not = type(make_codec(part, dim)).why_not(decoder.device)
        if why_not is not None:
            raise ConfigError(
                f"KV codec {codec!r} cannot run on {decoder.device}: {why_not}; use int8"
            )
    if not sides_of(form):
        if constants:
            raise ConfigError(
                f"--kv-constants {constants} has no effect: codec {codec!r} needs no "
                "measured constants; use --kv-codec with one that does, such as int8_channel or "
                "kvquant4, or leave out --kv-constants"
            )
        return StoredAs(written, dtype)
    found = Path(constants).expanduser() if constants else folder
    output = ("--output", constants) if constants else ()
    measured = read_constants(found, form, spec, argument=argument, output=output)
    return StoredAs(written, dtype, measured)


class _AttendToChunk:
    """Attention over the tokens of one prompt chunk, without KV memory."""

    def __init__(self, states: OneSequence) -> None:
        self.states = states

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        k, v = call.math.heads(k, v)
        math = call.math.at(torch.arange(len(query), device=query.device), len(query) - 1)
        return attend_dense(q, k, v, math=math, seen=None, causal=True)[0].transpose(0, 1)


def measure_activation_peak(decoder: Decoder, schedule: ScheduleConfig, batches: int = 1) -> int:
    """Run one step of the largest size and return its peak activation memory in bytes.

    On a CUDA device the peak is read from PyTorch's allocator, and the scratch memory of sampling
    is added, which is allocated after the step. On Linux the peak resident memory is
    reset before the step and read after it. On other systems `quire.plan` estimates the peak.
    """
    tokens = min(schedule.forward_tokens, decoder.spec.max_positions)
    if decoder.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(decoder.device)
        before = torch.cuda.memory_allocated(decoder.device)
        run_largest_step(decoder, tokens, schedule.num_rows, batches)
        peak_bytes = int(torch.cuda.max_memory_allocated(decoder.device)) - before
        rows = schedule.num_rows * batches
        return peak_bytes + sampling_scratch_bytes(rows, decoder.spec.vocab_size)
    if _RESET_PEAK.exists():
        before = psutil.Process().memory_info().rss
        try:
            _RESET_PEAK.write_text("5")
        except OSError:  # some containers forbid the write
            return _estimate(decoder, tokens, schedule.num_rows, batches)
        run_largest_step(decoder, tokens, schedule.num_rows, batches)
        return max(0, _peak_resident_bytes() - before)
    return _estimate(decoder, tokens, schedule.num_rows, batches)


def run_largest_step(decoder: Decoder, tokens: int, sampled_rows: int, batches: int) -> None:
    """Run a step of batches of this size, without KV memory."""
    ids = torch.zeros(tokens, dtype=torch.int64, device=decoder.device)
    positions = torch.arange(tokens, device=decoder.device)
    states = OneSequence(tokens, decoder.device)
    batch = Batch(ids, positions, positions[:sampled_rows], _AttendToChunk(states))
    if batches > 1:
        assert isinstance(decoder, LayerByLayer), "several batches need offloaded weights"
        decoder.forward_together([batch] * batches)
    else:
        decoder.forward(ids, positions, batch.sample_rows, batch.attention)


def _peak_resident_bytes() -> int:
    line = next(x for x in _STATUS.read_text().splitlines() if x.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def _estimate(decoder: Decoder, tokens: int, sampled_rows: int, batches: int) -> int:
    value_bytes = decoder.dtype.itemsize
    waiting_bytes = 4 * tokens * decoder.spec.hidden_size * value_bytes  # embeddings, rotations
    return (batches - 1) * waiting_bytes + estimate_activation_peak(
        decoder.spec,
        max_num_batched_tokens=tokens,
        sampled_rows=sampled_rows,
        bytes_per_value=value_bytes,
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that a device or CPU memory allocation failed."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)


def no_memory_text(error: BaseException) -> str:
    """Error message for the requests of a step that ran out of memory."""
    lines = str(error).strip().splitlines()
    return (
        f"out of memory for the activations of a step ({lines[0] if lines else 'out of memory'}); "
        "lower --kv-memory, --max-num-batched-tokens or --max-num-seqs"
    )


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
    hidden_tokens = min(model.spec.max_positions, MAX_CHUNKS * schedule.longest_chunk)
    hidden_bytes = hidden_state_bytes(model.spec, hidden_tokens) * eviction.cuts_by_layer
    left_bytes = auto_kv_memory(
        total_bytes=total_bytes,
        weights_bytes=model.weight_bytes,
        activation_peak_bytes=hidden_bytes
        + measure_activation_peak(
            model.decoder, schedule, max_batches(schedule.objective, offloaded_weights)
        ),
        headroom_bytes=int(DEFAULT_HEADROOM_SHARE * total_bytes),
        weight_codec=model.weight_codec,
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
        rows = schedule.rows_with_forks if group.private else schedule.num_rows
        needed = lane_pages * group.num_lanes * rows
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
