"""Free memory of a model's device, within the limits of the container."""

import torch

from quire.plan.machine import free_host_bytes


def free_device_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on a device."""
    if device.type != "cuda":
        return free_host_bytes()
    torch.cuda.empty_cache()  # memory cached by the allocator is free too
    return torch.cuda.mem_get_info(device)[0]
