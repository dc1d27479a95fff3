"""The measured device: its clock and its free memory.

On a GPU, time is measured between two events of a stream, and only events are synchronized. On a
CPU, time is wall-clock time. All code runs on both, so that it can be tested without a GPU.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quire.engine.decode_graphs import CudaGraphs
from quire.errors import ConfigError
from quire.models.device_memory import free_device_bytes
from quire.offload.swap.host_store import device_name
from quire.profile.ceilings import seconds

_MIN_S = 1e-9  # the clock's resolution can measure 0 for a short call


@dataclass(frozen=True, slots=True)
class Target:
    """The device that runs the measured operations.

    Attributes:
        device: torch device.
    """

    device: torch.device

    @classmethod
    def named(cls, name: str) -> "Target":
        """Target by device name; `auto` selects a GPU if torch sees one.

        Raises:
            ConfigError: torch has no such device.
        """
        has_gpu = torch.cuda.is_available()
        if name == "auto":
            name = "cuda" if has_gpu else "cpu"
        if name not in ("cpu", "cuda") and not name.startswith("cuda:"):
            raise ConfigError(f"expected --device auto, cpu, cuda or cuda:N, got {name!r}")
        if name != "cpu" and not has_gpu:
            raise ConfigError(
                f"--device {name}: torch sees no CUDA device here; use --device cpu, with --quick "
                "for a quick trial"
            )
        # a tensor's device includes the device index, which threads need to select the device
        return cls(torch.empty(0, device=name).device)

    @property
    def on_gpu(self) -> bool:
        """Whether the target is a CUDA device, so that copies cross a link."""
        return self.device.type == "cuda"

    @property
    def name(self) -> str:
        """Display name of the device."""
        return device_name(self.device)

    def seconds(self, call: Callable[[], object], times: int = 1) -> float:
        """Time of one call, as the mean over the given number of back-to-back calls."""
        if not self.on_gpu:
            return max(seconds(lambda: _repeat(call, times)) / times, _MIN_S)
        with torch.cuda.device(self.device):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            _repeat(call, times)
            end.record()
            end.synchronize()
        return max(float(begin.elapsed_time(end)) / 1e3 / times, _MIN_S)

    def repeated(self, call: Callable[[], object], times: int) -> Callable[[], object]:
        """Return a function that repeats a call; on a GPU as one CUDA graph, if that is possible.

        So the time that the CPU takes for launches does not count.
        """
        launches = partial(_repeat, call, times)
        if not self.on_gpu:
            return launches
        done = torch.zeros(1, device=self.device)

        def repeat() -> Tensor:
            launches()
            return done

        try:
            return CudaGraphs(self.device).capture(repeat).replay
        except RuntimeError:  # the call reads data
            return launches

    def wait(self) -> None:
        """Wait until the device has finished all submitted work."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def samples(self, call: Callable[[], object], repeats: int, times: int = 1) -> list[float]:
        """Times of repeated calls of `seconds`, after one call that is not counted."""
        self.seconds(call)
        return [self.seconds(call, times) for _ in range(repeats)]

    def median(self, call: Callable[[], object], repeats: int, times: int = 1) -> float:
        """Median of `samples`."""
        return statistics.median(self.samples(call, repeats, times))

    def require(self, num_bytes: int, what: str, change: str) -> None:
        """Check that device memory is free before it is allocated.

        Args:
            num_bytes: bytes to allocate.
            what: name of the allocation, for the error message.
            change: how to need less memory, for the error message.

        Raises:
            ConfigError: too little device memory is free.
        """
        free_bytes = free_device_bytes(self.device)
        if num_bytes > free_bytes:
            raise ConfigError(
                f"{what} needs {num_bytes:,} B on {self.name}, but only {free_bytes:,} B are free; "
                f"{change}"
            )


def _repeat(call: Callable[[], object], times: int) -> None:
    for _ in range(times):
        call()


def rate_gb(num_bytes: int | float, samples: Sequence[float]) -> float:
    """GB/s at the median of the measured durations."""
    return num_bytes / statistics.median(samples) / 1e9
