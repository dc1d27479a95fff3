"""What a device offers to the kernels, and whether Triton can run on it."""

import importlib.metadata
import importlib.util
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

INTERPRET = "TRITON_INTERPRET"
LEAST_CAPABILITY = (8, 0)  # tensor cores for bfloat16
_INTERPRETED_PROCESSORS = 4
_ROOMY_BYTES = 160 << 10  # shared memory of a block: two blocks of 72 KB with tiles ahead fit


@dataclass(frozen=True, slots=True)
class Hardware:
    """Properties of a device that the launches depend on.

    Attributes:
        name: name of the device.
        multiprocessors: programs that run at the same time, at least.
        tiles_ahead: tiles of keys and of values that a decode row loads before it needs them.
        interpreted: whether Triton's interpreter runs the kernels on the CPU.
    """

    name: str
    multiprocessors: int
    tiles_ahead: int
    interpreted: bool

    @classmethod
    def of(cls, device: torch.device) -> "Hardware":
        """Return the properties of a device that `why_no_triton` has no objection to."""
        if is_interpreted():
            return cls("Triton's interpreter", _INTERPRETED_PROCESSORS, 1, interpreted=True)
        found = torch.cuda.get_device_properties(device)
        shared_bytes = getattr(found, "shared_memory_per_block_optin", 0)
        ahead = 2 if shared_bytes >= _ROOMY_BYTES else 1
        return cls(found.name, found.multi_processor_count, ahead, interpreted=False)


def is_interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU instead of compiling them; slow, for tests."""
    return os.environ.get(INTERPRET) == "1"


def triton_version() -> str | None:
    """Return the version of the installed Triton, without importing it; None without Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # builds of other distributions
        return "of unknown version"


def why_no_triton(device: torch.device) -> str | None:
    """Return why Triton cannot run kernels on a device, or None; does not import Triton."""
    if device.type == "cpu":
        if is_interpreted():
            return None if triton_version() else "Triton is not installed"
        return "Triton's kernels run on NVIDIA GPUs, the pages are on the CPU"
    if device.type != "cuda":
        return f"Triton's kernels run on NVIDIA GPUs, the pages are on {device}"
    if torch.version.hip is not None:
        return "the kernels were never tried on AMD GPUs"
    if triton_version() is None:
        return "Triton is not installed; builds of PyTorch for CUDA depend on it"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        least, own = (".".join(map(str, x)) for x in (LEAST_CAPABILITY, capability))
        return f"expected compute capability {least} or higher, {device} has {own}"
    return None


def device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the GPU of a tensor the current device, on which Triton launches kernels."""
    return torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]
