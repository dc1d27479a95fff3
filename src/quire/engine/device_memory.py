"""How many bytes are free where a model lies, within what a container allows."""

import psutil
import torch

from quire.plan.container import container_free_bytes


def free_device_bytes(device: torch.device) -> int:
    """Bytes that can still be taken on a device."""
    if device.type != "cuda":
        free_bytes = int(psutil.virtual_memory().available)
        contained = container_free_bytes()
        return free_bytes if contained is None else min(free_bytes, max(0, contained))
    torch.cuda.empty_cache()  # what the allocator keeps for later is free too
    return torch.cuda.mem_get_info(device)[0]
