"""Copies of small arrays between the CPU and a device, without waiting for the device.

A copy from pageable memory makes the CPU wait until the device has done all earlier work. Arrays
are therefore copied to pinned memory first. Torch keeps that memory until the copy has ended, and
reuses it then.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ReadNumbers = Callable[[], NDArray[np.generic]]
StartRead = Callable[[Tensor], ReadNumbers]


def reads_freely(device: torch.device) -> bool:
    """Whether the CPU reads tensors of a device without waiting for earlier work."""
    return device.type == "cpu"


def to_device(
    numbers: NDArray[np.generic], device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """Return an array as a tensor on a device; on a CPU, the tensor shares the array's memory.

    Args:
        numbers: the array; it may be changed after the call unless the device is a CPU.
        device: device of the tensor.
        dtype: type of the tensor; default: that of the array.
    """
    host = torch.from_numpy(np.ascontiguousarray(numbers))
    if dtype is not None:
        host = host.to(dtype)
    if device.type == "cpu":
        return host
    return _staged(host, device).to(device, non_blocking=True)


def to_device_at_once(numbers: Sequence[NDArray[np.int32]], device: torch.device) -> list[Tensor]:
    """Return arrays as tensors on a device, copied as one."""
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(one)) for one in numbers]
    joined = to_device(np.concatenate([one.reshape(-1) for one in numbers]), device)
    parts = torch.split(joined, [one.size for one in numbers])
    return [part.view(one.shape) for part, one in zip(parts, numbers, strict=True)]


def copy_to(target: Tensor, numbers: NDArray[np.generic]) -> None:
    """Overwrite a tensor on any device with an array of its shape and type."""
    host = torch.from_numpy(np.ascontiguousarray(numbers))
    target.copy_(_staged(host, target.device), non_blocking=True)


def start_read(numbers: Tensor) -> ReadNumbers:
    """Begin to copy a tensor to the CPU.

    Returns:
        Waits for the copy and returns it. It does not wait for work that was launched on the device
        after `start_read`.
    """
    if numbers.device.type != "cuda":
        return lambda: numbers.cpu().numpy()
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    copied = torch.cuda.current_stream(numbers.device).record_event()

    def wait() -> NDArray[np.generic]:
        copied.synchronize()
        found: NDArray[np.generic] = host.numpy()
        return found

    return wait


def _staged(host: Tensor, device: torch.device) -> Tensor:
    """Return a copy in pinned memory if the device copies from there without the CPU."""
    return host.pin_memory() if device.type == "cuda" else host
