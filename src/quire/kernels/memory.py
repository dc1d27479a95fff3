"""Memory of the CPU and of devices: huge pages, free bytes, and blocks that the process keeps.

CPU memory in 2 MiB system pages has fewer TLB misses where reads are scattered or long.

glibc returns large blocks to the system as soon as they are freed. A step on a CPU frees its
activations layer by layer, so each layer would get new pages, which the system zeroes first: about
15 % of the prefill time of a model with 125M parameters. `keep_freed_memory` sets:

    M_MMAP_THRESHOLD   smaller blocks are allocated from the heap, not from a separate mapping
    M_TRIM_THRESHOLD   the free end of a heap is not returned
    M_TOP_PAD          a heap grows in large steps
    M_ARENA_MAX        all threads share one heap: a thread's own heap is limited to 64 MiB

The heap keeps its largest size: the blocks allocated at once in the largest step. Before glibc
2.38 it is a few blocks larger, because aligned allocations leave small free blocks between them.
"""

import contextlib
import ctypes
import mmap
import sys
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.layout.pages import PAGE_ALIGNMENT_BYTES
from quire.layout.sizes import HUGE_PAGE_BYTES
from quire.plan.machine import free_host_bytes

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8  # malloc.h
_LARGEST_BLOCK_BYTES = 1 << 30
_LARGEST_BLOCK_OF_OLD_GLIBC_BYTES = 1 << 25  # glibc before 2.35 refuses larger values
_LARGEST_TRIM_BYTES = (1 << 31) - 1  # mallopt takes an int
_TOP_PAD_BYTES = 64 << 20


def zero_memory(num_bytes: int) -> Tensor:
    """Allocate zero bytes of CPU memory, uint8 [num_bytes]; in huge pages if Linux has them.

    Fresh system memory is zero, so no byte is written: the operating system allocates a page at its
    first write.
    """
    if hasattr(mmap, "MADV_HUGEPAGE") and num_bytes >= HUGE_PAGE_BYTES:
        return _huge_pages(num_bytes)
    spare = np.zeros(num_bytes + PAGE_ALIGNMENT_BYTES, dtype=np.uint8)
    start = -spare.ctypes.data % PAGE_ALIGNMENT_BYTES
    return torch.from_numpy(spare[start : start + num_bytes])


def _huge_pages(num_bytes: int) -> Tensor:
    """Map anonymous memory with 2 MiB system pages if Linux has them; the end in small pages.

    The pages of a row are scattered in the arena. With small system pages, nearly every read of a
    KV page would miss the TLB. The end stays in small pages because a huge page there would be
    larger than the requested size.
    """
    mapping = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    spare = np.frombuffer(mapping, dtype=np.uint8)  # keeps the mapping alive; the tensor keeps this
    start = -spare.ctypes.data % HUGE_PAGE_BYTES
    with contextlib.suppress(OSError):  # Linux built without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE, start, num_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
    return torch.from_numpy(spare[start : start + num_bytes])


def free_device_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on a device."""
    if device.type != "cuda":
        return free_host_bytes()
    torch.cuda.empty_cache()  # memory cached by the allocator is free too
    return torch.cuda.mem_get_info(device)[0]


@dataclass(frozen=True, slots=True)
class FreedMemory:
    """Whether the process keeps freed CPU memory."""

    kept: bool
    explanation: str


def keep_freed_memory() -> FreedMemory:
    """Configure the C library to keep freed blocks for the next step.

    The setting applies to the whole process and cannot be undone. Repeated calls have no further
    effect. Without glibc (musl, macOS, Windows) the setting is not available.
    """
    glibc = _glibc()
    if glibc is None:
        return FreedMemory(False, "returned to the system: only glibc has a setting to keep it")
    largest_bytes = next(
        (
            size
            for size in (_LARGEST_BLOCK_BYTES, _LARGEST_BLOCK_OF_OLD_GLIBC_BYTES)
            if glibc.mallopt(_M_MMAP_THRESHOLD, size)
        ),
        0,
    )
    others = ((_M_TRIM_THRESHOLD, _LARGEST_TRIM_BYTES), (_M_TOP_PAD, _TOP_PAD_BYTES))
    taken = [glibc.mallopt(what, value) for what, value in (*others, (_M_ARENA_MAX, 1))]
    if not largest_bytes or not all(taken):
        return FreedMemory(False, "returned to the system: glibc refused to keep it")
    return FreedMemory(
        True,
        f"blocks of up to {largest_bytes >> 20} MiB are kept for the next step; "
        "--return-memory returns them to the system",
    )


def return_freed_memory() -> bool:
    """Return free heap memory to the system after a rare large request; no effect without glibc."""
    glibc = _glibc()
    return glibc is not None and bool(glibc.malloc_trim(0))


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None
