"""The optional package flashinfer-python: whether it can be used, and its two classes.

Signatures are those of flashinfer-python 0.7.2 (`flashinfer/decode.py`, `flashinfer/prefill.py`).
FlashInfer compiles its kernels when they are first planned, and stores them on disk.
"""

import importlib
import importlib.metadata
import importlib.util
import re
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from quire.kernels.triton.hardware import LEAST_CAPABILITY

PACKAGE, DISTRIBUTION = "flashinfer", "flashinfer-python"
LEAST_VERSION = (0, 7)  # independent of the order of positional arguments of earlier versions
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)
KV_LAYOUT = "HND"  # pages of [heads, tokens, head_dim], as in the arena
IMPLEMENTATION = "fa2"  # reads pages through their strides: they need not be contiguous


@runtime_checkable
class DecodeWrapper(Protocol):
    """`flashinfer.BatchDecodeWithPagedKVCacheWrapper`."""

    def plan(  # noqa: PLR0913 - of another package
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        sm_scale: float | None = None,
    ) -> None:
        """Prepare a batch of rows with one query each."""
        ...

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        """Compute attention."""
        ...


@runtime_checkable
class PrefillWrapper(Protocol):
    """`flashinfer.BatchPrefillWithPagedKVCacheWrapper`."""

    def plan(  # noqa: PLR0913 - of another package
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        """Prepare a batch of rows with several queries each."""
        ...

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        """Compute attention."""
        ...


@runtime_checkable
class FlashInfer(Protocol):
    """The package."""

    def BatchDecodeWithPagedKVCacheWrapper(  # noqa: N802 - of another package
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        *,
        use_tensor_cores: bool = False,
        backend: str = "auto",
    ) -> DecodeWrapper:
        """Create a wrapper for rows with one query."""
        ...

    def BatchPrefillWithPagedKVCacheWrapper(  # noqa: N802 - of another package
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", *, backend: str = "auto"
    ) -> PrefillWrapper:
        """Create a wrapper for rows with several queries."""
        ...


def flashinfer_version() -> str | None:
    """Return the version of the installed FlashInfer, without importing it; None without it."""
    if importlib.util.find_spec(PACKAGE) is None:
        return None
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def why_no_flashinfer(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why FlashInfer cannot be used, or None; does not import it.

    Args:
        device: device of the pages.
        dtype: type of pages and queries.
        head_dim: elements of a vector.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return f"FlashInfer runs on NVIDIA GPUs, the pages are on {device}"
    version = flashinfer_version()
    if version is None:
        return f"FlashInfer is not installed: pip install {DISTRIBUTION}"
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or tuple(map(int, found.groups())) < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        return f"expected {DISTRIBUTION} {least} or higher, got {version}"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        least, own = (".".join(map(str, x)) for x in (LEAST_CAPABILITY, capability))
        return f"expected compute capability {least} or higher, {device} has {own}"
    return unread(dtype, head_dim)


def unread(dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why the kernels do not read unquantized pages of a type, or None."""
    if dtype not in DTYPES:
        return f"expected float16 or bfloat16 pages, got {str(dtype).removeprefix('torch.')}"
    if head_dim not in HEAD_DIMS:
        return f"expected head_dim {', '.join(map(str, HEAD_DIMS))}, got {head_dim}"
    return None


def import_flashinfer() -> FlashInfer:
    """Import the package.

    Raises:
        ImportError: a package that it needs is missing.
        AttributeError: it has other names.
    """
    package = importlib.import_module(PACKAGE)
    for name in ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"):
        getattr(package, name)
    found: FlashInfer = package
    return found
