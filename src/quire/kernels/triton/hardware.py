"""What a device offers to the kernels, and whether Triton and the row-wise kernels run on it."""

import functools
import importlib.metadata
import importlib.util
import logging
import os
import re
import subprocess
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

INTERPRET = "TRITON_INTERPRET"
MIN_CAPABILITY = (8, 0)  # tensor cores for bfloat16
MIN_TRITON = (3, 6)  # of PyTorch 2.10; earlier versions were not tried
_INTERPRETED_PROCESSORS = 4
_LARGE_TILES_MAJOR = 9  # compute capability
_LARGE_TILES_BYTES = 200 << 10  # shared memory for one block of 177 KB
_TILES_AHEAD_BYTES = 160 << 10  # shared memory for two blocks of 72 KB with tiles ahead
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Hardware:
    """Properties of a device that the launches depend on.

    Attributes:
        name: name of the device.
        multiprocessors: programs that run at the same time, at least.
        tiles_ahead: tiles of keys and of values that a decode row loads before it needs them.
        large_tiles: whether shared memory and registers suffice for twice as large tiles of chunks
            over unquantized pages and of decode rows over codes.
        interpreted: whether Triton's interpreter runs the kernels on the CPU.
    """

    name: str
    multiprocessors: int
    tiles_ahead: int
    large_tiles: bool
    interpreted: bool

    @classmethod
    def of(cls, device: torch.device) -> "Hardware":
        """Return the properties of a device that `why_no_triton` has no objection to."""
        if is_interpreted():
            name = "Triton's interpreter"
            return cls(name, _INTERPRETED_PROCESSORS, 1, large_tiles=False, interpreted=True)
        found = torch.cuda.get_device_properties(device)
        shared_bytes = getattr(found, "shared_memory_per_block_optin", 0)
        ahead = 2 if shared_bytes >= _TILES_AHEAD_BYTES else 1
        return cls(
            name=found.name,
            multiprocessors=found.multi_processor_count,
            tiles_ahead=ahead,
            # the kernels of earlier GPUs spill registers, or lack shared memory
            large_tiles=found.major >= _LARGE_TILES_MAJOR and shared_bytes >= _LARGE_TILES_BYTES,
            interpreted=False,
        )


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
            return _why_not_this_triton()
        return "Triton's kernels run on NVIDIA GPUs, the pages are on the CPU"
    if device.type != "cuda":
        return f"Triton's kernels run on NVIDIA GPUs, the pages are on {device}"
    if torch.version.hip is not None:
        return "the kernels were never tried on AMD GPUs"
    reason = _why_not_this_triton()
    if reason is not None:
        return reason
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        least, own = (".".join(map(str, x)) for x in (MIN_CAPABILITY, capability))
        return f"expected compute capability {least} or higher, {device} has {own}"
    return None


def _why_not_this_triton() -> str | None:
    """Return why the installed version of Triton is not used, or None."""
    version = triton_version()
    if version is None:
        return "Triton is not installed; builds of PyTorch for CUDA depend on it"
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and tuple(map(int, found.groups())) < MIN_TRITON:
        least = ".".join(map(str, MIN_TRITON))
        return f"expected Triton {least} or higher, got {version} (auto selects gathered pages)"
    return None


def cannot_run() -> tuple[type[Exception], ...]:
    """Return the errors that mean that Triton cannot compile or launch kernels here.

    They include those of a missing C compiler or of missing Python headers (`CalledProcessError`),
    of a cache folder without write permission (`OSError`), and of other versions of Triton.
    """
    errors = (
        RuntimeError,
        OSError,
        ImportError,
        AttributeError,
        TypeError,
        subprocess.SubprocessError,
    )
    try:
        from triton.errors import TritonError
    except ImportError:
        return errors
    return (*errors, TritonError)


def failure_of(error: Exception) -> str:
    """Describe one of the errors of `cannot_run` in a line."""
    return f"Triton cannot run them: {' '.join(str(error).split())[:200]}"


def device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the GPU of a tensor the current device, on which Triton launches kernels."""
    return torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class RowShape:
    """Sizes of a model that its row-wise kernels depend on.

    Attributes:
        width: elements of the residual stream.
        head_dim: elements of a head.
        rotary_dim: leading elements of a head that RoPE rotates.
    """

    width: int
    head_dim: int
    rotary_dim: int


def why_no_rows(device: torch.device, dtype: torch.dtype, shape: RowShape) -> str | None:
    """Return why the row-wise kernels are not used on a device, or None.

    The kernels run once on small inputs, and their results are compared with those of PyTorch.

    Args:
        device: of the model.
        dtype: float32, bfloat16 or float16.
        shape: of the model.
    """
    reason = why_no_triton(device)
    if reason is not None:
        return reason
    try:
        wrong = _wrong_kernels(device, dtype, shape)
    except cannot_run() as error:  # not cached: memory may be free at the next load
        _log.warning("fused layers are off", exc_info=True)
        return failure_of(error)
    if not wrong:
        return None
    reason = f"wrong results of {', '.join(wrong)} on {device}"
    _log.warning("fused layers are off: %s; please report it", reason)
    return reason


@functools.cache
def _wrong_kernels(device: torch.device, dtype: torch.dtype, shape: RowShape) -> tuple[str, ...]:
    from quire.kernels.triton.self_test import wrong_kernels

    return wrong_kernels(device, dtype, shape)
