"""Selection of the attention backend, with the reason."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from quire.errors import ConfigError, UnknownName
from quire.kernels.backend import AttentionBackend
from quire.kernels.gathered import GatheredAttention
from quire.kernels.native.arguments import DTYPES, why_not
from quire.kernels.native.backend import NativeAttention
from quire.kernels.native.library import NativeLibrary, NotLoaded
from quire.kernels.native.self_test import tested_library
from quire.kernels.pre_rope import PreRopeAttention
from quire.kernels.reference_backend import ReferenceAttention
from quire.kernels.triton.hardware import (
    cannot_run,
    failure_of,
    triton_version,
    why_no_triton,
)
from quire.layout.codecs import CodecSpec
from quire.layout.kv_format import read_format

BACKENDS = ("native", "triton", "gathered", "reference")
Dims = Collection[tuple[int, int]]
"""Elements of keys and of values, for each shape of heads in a model."""


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """A backend and the reason for its selection, shown by `--verbose` and `quire doctor`."""

    backend: AttentionBackend
    reason: str


def select_backend(
    name: str,
    device: torch.device,
    *,
    dtype: torch.dtype,
    head_dim: int | Dims,
    scratch_bytes: int,
    rotated: bool = True,
    codec: str = "",
) -> BackendChoice:
    """Select the attention backend.

    Args:
        name: "auto", or the name of a required backend.
        device: device of the pages.
        dtype: dtype of pages and queries.
        head_dim: elements of keys and values, or those of each shape of heads in a model.
        scratch_bytes: bound on gathered pages.
        rotated: whether keys are stored after RoPE.
        codec: codec of the pages; "" for unquantized pages.

    Raises:
        UnknownName: no backend has this name.
        ConfigError: the required backend cannot run here; the message states the reason.
    """
    if name not in ("auto", *BACKENDS):
        raise UnknownName("attention backend", name, ("auto", *BACKENDS))
    if not rotated:
        if name != "auto":
            raise ConfigError(
                f"attention={name} needs keys stored after RoPE, but the rule streaming stores "
                "them before it; use attention=auto, or another eviction rule"
            )
        pre_rope = PreRopeAttention(device, scratch_bytes=scratch_bytes)
        return BackendChoice(pre_rope, "rotates keys at every attention; runs on any device")
    if name == "reference":
        return BackendChoice(ReferenceAttention(), "selected by name; slow, for comparison")
    dims = {(head_dim, head_dim)} if isinstance(head_dim, int) else head_dim
    gathered = GatheredAttention(device, scratch_bytes=scratch_bytes)
    if name == "gathered":
        return BackendChoice(gathered, "selected by name")
    if name == "triton" or (name == "auto" and device.type == "cuda"):
        choice = usable_triton(gathered, device, dtype, dims, codec)
        if isinstance(choice, BackendChoice):
            return choice
        if name == "triton":
            raise ConfigError(f"attention=triton cannot run here: {choice}; use auto")
        return BackendChoice(gathered, f"runs on any device; not triton: {choice}")
    return _native(name, gathered, device, dtype, dims, codec)


def _native(
    name: str,
    gathered: GatheredAttention,
    device: torch.device,
    dtype: torch.dtype,
    dims: Dims,
    codec: str,
) -> BackendChoice:
    """Return the native backend; with `auto`, the gathered backend if it cannot run.

    Raises:
        ConfigError: native is required and cannot run.
    """
    library = usable_library(device, dtype, max(max(pair) for pair in dims))
    unread = _unread(codec, dims, why_not)
    if unread is not None:
        library = NotLoaded(f"the C extension cannot read these pages: {unread}")
    if isinstance(library, NativeLibrary):
        return BackendChoice(NativeAttention(library, gathered), library.description)
    if name == "native":
        raise ConfigError(f"attention=native cannot run here: {library.reason}; use auto")
    return BackendChoice(gathered, f"runs on any device; not native: {library.reason}")


def usable_triton(
    gathered: GatheredAttention,
    device: torch.device,
    dtype: torch.dtype,
    dims: Dims,
    codec: str,
) -> BackendChoice | str:
    """Return the Triton backend, or why it cannot read these pages.

    Triton is imported only if it can run on the device.
    """
    reason = why_no_triton(device)
    if reason is not None:
        return reason
    if dtype not in DTYPES:
        return f"it has no kernels for {dtype}"
    from quire.kernels.triton import coding

    unread = _unread(codec, dims, coding.why_not)
    if unread is not None:
        return f"the kernels cannot read these pages: {unread}"
    try:
        from quire.kernels.triton.backend import TritonAttention
        from quire.kernels.triton.self_test import NoTriton, tested_hardware
    except cannot_run() as error:
        return f"the kernels are not used: {failure_of(error)}"
    hardware = None
    for pair in dims:
        tested = tested_hardware(device, dtype, *pair)
        if isinstance(tested, NoTriton):
            return tested.reason
        hardware = tested
    assert hardware is not None, "a model has heads"
    return BackendChoice(
        TritonAttention(device, gathered, hardware),
        f"Triton {triton_version()}, attention directly from the pages on {hardware.name}",
    )


def _unread(codec: str, dims: Dims, why_not: Callable[[CodecSpec, int], str | None]) -> str | None:
    """Return why kernels cannot read a KV format, or None.

    Args:
        codec: codec of the pages; "" for unquantized pages.
        dims: elements of keys and of values.
        why_not: why the kernels cannot read a codec.
    """
    if not codec:
        return None
    form = read_format(codec)
    if not form.is_plain and (form.sinks or form.residual):
        return "it does not support tokens in full precision next to codes"
    pairs = [pair for own in dims for pair in zip((form.key, form.value), own, strict=True)]
    reasons = (why_not(spec, dim) for spec, dim in pairs)
    return next((reason for reason in reasons if reason is not None), None)


def usable_library(
    device: torch.device, dtype: torch.dtype, head_dim: int
) -> NativeLibrary | NotLoaded:
    """Return the C library, or why it cannot read these pages."""
    if device.type != "cpu":
        return NotLoaded(f"the C extension runs on CPUs, the pages are on {device}")
    library = tested_library()
    if isinstance(library, NotLoaded):
        return library
    if dtype not in DTYPES or head_dim > library.max_head_dim:
        return NotLoaded(f"it has no code for {dtype} with head_dim {head_dim}")
    return library
