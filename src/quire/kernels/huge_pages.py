"""CPU memory in 2 MiB system pages: fewer TLB misses where reads are scattered or long."""

import contextlib
import mmap

import numpy as np
import torch
from torch import Tensor

from quire.layout.pages import PAGE_ALIGNMENT_BYTES
from quire.layout.sizes import HUGE_PAGE_BYTES


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
