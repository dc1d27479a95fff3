"""Memory beside weights and KV: what a full step takes, and what is done when it runs out."""

from pathlib import Path

import psutil
import torch
from torch import Tensor

from quire.kernels.backend import AttentionMath
from quire.kernels.dense import attend_dense
from quire.models.base import AttentionCall, Batch, Decoder, LayerByLayer
from quire.plan.capacity import estimate_activation_peak
from quire.scheduler.schedule_config import ScheduleConfig

# Measures what a full step takes beside weights and KV.

_RESET_PEAK = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


class _AttendToChunk:
    """Attention of one fresh prompt, without any KV memory."""

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        math = AttentionMath(call.scale, call.softcap, call.sinks)
        return attend_dense(q, k, v, math=math, seen=None, causal=True)[0].transpose(0, 1)


def measure_activation_peak(decoder: Decoder, schedule: ScheduleConfig, batches: int = 1) -> int:
    """Bytes a step of the largest size takes at its peak, by running one.

    On a CUDA device the allocator knows; on Linux the peak of resident memory is reset before and
    read after. Elsewhere the estimate of `quire.plan` stands in.

    Args:
        decoder: runs it.
        schedule: how large a batch is.
        batches: of the step; those that wait keep their hidden states.
    """
    tokens = min(schedule.forward_tokens, decoder.spec.max_positions)
    if decoder.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(decoder.device)
        before = torch.cuda.memory_allocated(decoder.device)
        _run(decoder, tokens, schedule.num_rows, batches)
        return int(torch.cuda.max_memory_allocated(decoder.device)) - before
    if _RESET_PEAK.exists():
        before = psutil.Process().memory_info().rss
        try:
            _RESET_PEAK.write_text("5")
        except OSError:  # a container may forbid it
            return _estimate(decoder, tokens, schedule.num_rows, batches)
        _run(decoder, tokens, schedule.num_rows, batches)
        return max(0, _peak_resident_bytes() - before)
    return _estimate(decoder, tokens, schedule.num_rows, batches)


def _run(decoder: Decoder, tokens: int, sampled_rows: int, batches: int) -> None:
    ids = torch.zeros(tokens, dtype=torch.int64, device=decoder.device)
    positions = torch.arange(tokens, device=decoder.device)
    batch = Batch(ids, positions, positions[:sampled_rows], _AttendToChunk())
    if batches > 1:
        assert isinstance(decoder, LayerByLayer), "batches are more where layers are brought"
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


# ---- out of memory -------------------------------------------------------------------------------

# Running out of memory beside the KV pool: which errors say so, and what a user can do.

_CPU_ALLOCATOR = "DefaultCPUAllocator"  # torch has no type of its own for a full host


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory could not be had, on a device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)


def no_memory_text(error: BaseException) -> str:
    """What the request of a step without memory is told."""
    said = str(error).strip().splitlines()
    return (
        f"a step found no memory beside the KV memory ({said[0] if said else 'out of memory'}); "
        "lower --kv-memory, --max-num-batched-tokens or --max-num-seqs"
    )
