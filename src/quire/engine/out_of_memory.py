"""Running out of memory beside the KV pool: which errors say so, and what a user can do."""

import torch

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
