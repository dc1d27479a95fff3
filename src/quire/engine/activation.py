"""Activation memory: the peak of a full step, and errors when a step runs out of memory."""

from pathlib import Path

import psutil
import torch
from torch import Tensor

from quire.kernels.backend import AttentionMath
from quire.kernels.dense import attend_dense
from quire.models.base import AttentionCall, Batch, Decoder, LayerByLayer
from quire.plan.capacity import estimate_activation_peak
from quire.sampling.device_sampling import sampling_scratch_bytes
from quire.scheduler.schedule_config import ScheduleConfig

_RESET_PEAK = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


class _AttendToChunk:
    """Attention over the tokens of one prompt chunk, without KV memory."""

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        math = AttentionMath(call.scale, call.softcap, call.sinks)
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
    batch = Batch(ids, positions, positions[:sampled_rows], _AttendToChunk())
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


# Out-of-memory errors outside the KV pool.

_CPU_ALLOCATOR = "DefaultCPUAllocator"  # torch has no exception type for exhausted CPU memory


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
