"""How many bytes are free where a model lies, within what a container allows."""

import torch

from quire.plan.machine import free_host_bytes


def free_device_bytes(device: torch.device) -> int:
    """Bytes that can still be taken on a device."""
    if device.type != "cuda":
        return free_host_bytes()
    torch.cuda.empty_cache()  # what the allocator keeps for later is free too
    return torch.cuda.mem_get_info(device)[0]
