"""Host memory that a device copies from and to by itself: pinned in place, not a byte more."""

import weakref

import torch
from jaxtyping import UInt8
from torch import Tensor

from quire.errors import ConfigError


def pin_memory(host: UInt8[Tensor, " num_bytes"], holder: object) -> None:
    """Pin memory for as long as its holder lives.

    Torch's own pinned tensors round up to a power of two, so a pool of 5 GiB would take 8.

    Raises:
        ConfigError: the system does not pin as much.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = host.data_ptr()
    code = int(runtime.cudaHostRegister(address, host.numel(), 0))
    if code:
        raise ConfigError(
            f"the system does not pin {host.numel():,} B of host memory (CUDA error {code}); "
            "lower --swap-space or raise the limit on locked memory (ulimit -l)"
        )
    weakref.finalize(holder, runtime.cudaHostUnregister, address)
