"""Which backend computes attention, and why."""

from dataclasses import dataclass

import torch

from quire.errors import ConfigError, UnknownName
from quire.kernels.backend import AttentionBackend
from quire.kernels.gathered import GatheredAttention
from quire.kernels.native.backend import NativeAttention
from quire.kernels.native.coding import DTYPES, why_not
from quire.kernels.native.library import NativeLibrary, NotLoaded
from quire.kernels.native.self_test import tested_library
from quire.kernels.pre_rope import PreRopeAttention
from quire.kernels.reference_backend import ReferenceAttention
from quire.layout.kv_format import read_format

BACKENDS = ("native", "gathered", "reference")


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """A backend and the reason it was taken, for `--verbose` and `quire doctor`."""

    backend: AttentionBackend
    reason: str


def select_backend(
    name: str,
    device: torch.device,
    *,
    dtype: torch.dtype,
    head_dim: int,
    scratch_bytes: int,
    rotated: bool = True,
    codec: str = "",
) -> BackendChoice:
    """Choose who computes attention.

    Args:
        name: "auto", or a backend's name to insist on.
        device: where the pages are.
        dtype: numbers in the pages and in the queries.
        head_dim: numbers in a vector.
        scratch_bytes: bound on gathered pages.
        rotated: whether keys are stored after RoPE.
        codec: how pages store numbers; nothing said, they are plain ones.

    Raises:
        UnknownName: no backend has this name.
        ConfigError: a backend was insisted on and cannot run here; says why.
    """
    if name not in ("auto", *BACKENDS):
        raise UnknownName("attention backend", name, ("auto", *BACKENDS))
    if not rotated:
        if name != "auto":
            raise ConfigError(
                f"attention={name} reads keys as they are, and here they are stored before RoPE; "
                "use attention=auto, or another rule than streaming"
            )
        unrotated = PreRopeAttention(device, scratch_bytes=scratch_bytes)
        return BackendChoice(unrotated, "keys are turned when they are attended; runs anywhere")
    if name == "reference":
        return BackendChoice(ReferenceAttention(), "asked for by name; slow, for comparison")
    gathered = GatheredAttention(device, scratch_bytes=scratch_bytes)
    if name == "gathered":
        return BackendChoice(gathered, "asked for by name")
    library = usable_library(device, dtype, head_dim)
    unread = _unread(codec, head_dim)
    if unread is not None:
        library = NotLoaded(f"the C extension cannot serve these pages: {unread}")
    if isinstance(library, NativeLibrary):
        return BackendChoice(NativeAttention(library, gathered), library.description)
    if name == "native":
        raise ConfigError(f"attention=native cannot run here: {library.reason}; use auto")
    return BackendChoice(gathered, f"runs on any device; not native: {library.reason}")


def _unread(codec: str, head_dim: int) -> str | None:
    """What of a way to store numbers the C extension does not read, or None."""
    if not codec:
        return None
    form = read_format(codec)
    if not form.is_plain and (form.sinks or form.residual):
        return "beside codes it does not read tokens that are kept as they were made"
    reasons = (why_not(spec, head_dim) for spec in (form.key, form.value))
    return next((reason for reason in reasons if reason is not None), None)


def usable_library(
    device: torch.device, dtype: torch.dtype, head_dim: int
) -> NativeLibrary | NotLoaded:
    """The C library, or why it cannot serve these pages."""
    if device.type != "cpu":
        return NotLoaded(f"the C extension runs on CPUs, the pages are on {device}")
    library = tested_library()
    if isinstance(library, NotLoaded):
        return library
    if dtype not in DTYPES or head_dim > library.max_head_dim:
        return NotLoaded(f"it has no code for {dtype} with head_dim {head_dim}")
    return library
