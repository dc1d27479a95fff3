"""Resident memory of replaced weights: pages of mapped files, and freed memory.

Safetensors maps a weight file and returns views of it. The mapping lasts as long as one view, and
every page that was read stays in the resident memory of the process. A model whose weights were
packed would take the bytes of both copies, because a norm or an embedding keeps the mapping.
"""

import ctypes
import mmap
import sys
from bisect import bisect_right
from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path

import torch
from torch import Tensor, nn

_MAPS = Path("/proc/self/maps")


class MappedFiles:
    """The memory ranges of this process that are mapped files; none except on Linux."""

    def __init__(self) -> None:
        lines = _MAPS.read_text("utf-8", "surrogateescape").splitlines() if _MAPS.exists() else ()
        found = (_file_range(line) for line in lines)
        self._ranges = sorted(each for each in found if each is not None)

    def hold(self, tensor: Tensor) -> bool:
        """Whether the elements of a tensor are in a mapped file."""
        if tensor.device.type != "cpu" or not tensor.nbytes:
            return False
        start = tensor.data_ptr()
        number = bisect_right(self._ranges, start, key=itemgetter(0)) - 1
        return number >= 0 and start + tensor.nbytes <= self._ranges[number][1]

    def release_pages(self, tensors: Iterable[Tensor]) -> None:
        """Remove the pages of these tensors from resident memory; the next access reads the file.

        Tensors that are in no mapped file are ignored. The caller holds the tensors: a freed range
        may hold other objects.
        """
        for tensor in tensors:
            if tensor.is_contiguous() and self.hold(tensor):
                _release_pages(tensor.data_ptr(), tensor.nbytes)

    @torch.no_grad()
    def copy_weights(self, model: nn.Module) -> None:
        """Copy the parameters that are in a mapped file, so that the file can be unmapped."""
        for parameter in model.parameters():
            if self.hold(parameter):
                parameter.data = parameter.detach().clone()


def trim_free_memory() -> None:
    """Return freed memory to the system, if the C library can (glibc).

    Small packed weights lie between freed ones, which glibc would keep otherwise.
    """
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


def _file_range(line: str) -> tuple[int, int] | None:
    fields = line.split(maxsplit=5)  # range, permissions, offset, device, inode, path
    if len(fields) < 6 or not fields[5].startswith("/"):
        return None
    start, end = fields[0].split("-")
    return int(start, 16), int(end, 16)


def _release_pages(start: int, num_bytes: int) -> None:
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE  # pages that no other tensor shares
    end = (start + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > first:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)
