"""Keep freed CPU memory in the process, so that steps reuse it without page faults.

glibc returns large blocks to the system as soon as they are freed. A step on a CPU frees its
activations layer by layer, so each layer would get new pages, which the system zeroes first: about
15 % of the prefill time of a model with 125M parameters.

    M_MMAP_THRESHOLD   smaller blocks are allocated from the heap, not from a separate mapping
    M_TRIM_THRESHOLD   the free end of a heap is not returned
    M_TOP_PAD          a heap grows in large steps
    M_ARENA_MAX        all threads share one heap: a thread's own heap is limited to 64 MiB

The heap keeps its largest size: the blocks allocated at once in the largest step. Before glibc
2.38 it is a few blocks larger, because aligned allocations leave small free blocks between them.
"""

import ctypes
import sys
from dataclasses import dataclass

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8  # malloc.h
_LARGEST_BLOCK_BYTES = 1 << 30
_LARGEST_BLOCK_OF_OLD_GLIBC_BYTES = 1 << 25  # glibc before 2.35 refuses larger values
_LARGEST_TRIM_BYTES = (1 << 31) - 1  # mallopt takes an int
_TOP_PAD_BYTES = 64 << 20


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
