"""Clocks and buffers for measuring: nothing here is timed when it is touched for the first time."""

import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from jaxtyping import UInt8
from torch import Tensor


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s


def touched_buffer(num_bytes: int) -> UInt8[Tensor, " num_bytes"]:
    """Memory of its own that has been written, on huge pages where the system gives them."""
    memory = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    return buffer.fill_(1)


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Run torch with so many threads; 0 leaves them as they are."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
