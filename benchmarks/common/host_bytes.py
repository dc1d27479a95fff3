"""Host memory for copies from and to a device: pinned as one pool, written before it is timed."""

import math

import torch
from jaxtyping import UInt8
from torch import Tensor

from benchmarks.common.target import Target
from quire.errors import ConfigError
from quire.offload.swap.host_store import pin_memory
from quire.plan.machine import free_host_bytes
from quire.profile.ceilings import seconds, touched_buffer

ALIGNMENT_BYTES = 4096
CHANGE = "lower --pinned"


def require_host(num_bytes: int, what: str, change: str = CHANGE) -> None:
    """Check that host memory is free before it is allocated.

    Raises:
        ConfigError: too little host memory is free.
    """
    free_bytes = free_host_bytes()
    if num_bytes > free_bytes:
        raise ConfigError(
            f"{what} needs {num_bytes:,} B of host memory, but {free_bytes:,} B are free on this "
            f"machine or in its container; {change}"
        )


class HostBytes:
    """A pool of host memory: allocated in ascending order, freed as a whole.

    Args:
        num_bytes: size of the pool, above 0.
        target: the device; the pool of a GPU is pinned.

    Attributes:
        touch_s, pin_s: time to write and to pin the pool, in seconds.

    Raises:
        ConfigError: the size exceeds the free memory, or the system's limit of pinned memory.
    """

    def __init__(self, num_bytes: int, target: Target) -> None:
        if num_bytes < ALIGNMENT_BYTES:
            raise ConfigError(f"expected --pinned of {ALIGNMENT_BYTES} B or more, got {num_bytes}")
        require_host(num_bytes, "the pool of host memory")
        found: list[UInt8[Tensor, " num_bytes"]] = []
        self.touch_s = seconds(lambda: found.append(touched_buffer(num_bytes)))
        [self._bytes] = found
        self.pin_s = seconds(self._pin) if target.on_gpu else 0.0
        self._taken = 0

    def _pin(self) -> None:
        try:
            pin_memory(self._bytes, self)
        except ConfigError as error:
            raise ConfigError(
                f"the system does not pin {self.num_bytes:,} B of host memory; {CHANGE}, or raise "
                "the limit on locked memory (ulimit -l)"
            ) from error

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self._bytes.numel()

    @property
    def free_bytes(self) -> int:
        """Bytes that are not allocated."""
        return self.num_bytes - self._taken

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate uninitialized memory for a tensor.

        Raises:
            ConfigError: the pool is too small.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > self.free_bytes:
            raise ConfigError(
                f"expected {num_bytes:,} B of free host memory, got {self.free_bytes:,} of "
                f"{self.num_bytes:,} B; raise --pinned"
            )
        found = self._bytes[self._taken : self._taken + num_bytes]
        lines = -(-num_bytes // ALIGNMENT_BYTES)
        self._taken = min(self.num_bytes, self._taken + lines * ALIGNMENT_BYTES)
        return found.view(dtype).view(shape)

    def clear(self) -> None:
        """Free all allocations; their memory must no longer be used."""
        self._taken = 0
