"""Timers and buffers for measurements, with memory that is committed before it is timed."""

import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from jaxtyping import UInt8
from torch import Tensor


def seconds(call: Callable[[], object]) -> float:
    """Duration of a call."""
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s


def touched_buffer(num_bytes: int) -> UInt8[Tensor, " num_bytes"]:
    """Private memory that has been written, on huge pages if the system provides them."""
    memory = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    return buffer.fill_(1)


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Run torch with this number of threads; 0 leaves it unchanged."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
