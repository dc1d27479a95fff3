"""Which backend computes attention, and why."""

from dataclasses import dataclass

import torch

from quire.errors import UnknownName
from quire.kernels.backend import AttentionBackend
from quire.kernels.gathered import GatheredAttention
from quire.kernels.reference_backend import ReferenceAttention

BACKENDS = ("gathered", "reference")


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """A backend and the reason it was taken, for `--verbose` and `quire doctor`."""

    backend: AttentionBackend
    reason: str


def select_backend(name: str, device: torch.device, *, scratch_bytes: int) -> BackendChoice:
    """Choose who computes attention.

    Args:
        name: "auto", or a backend's name to insist on.
        device: where the pages are.
        scratch_bytes: bound on gathered pages.

    Raises:
        UnknownName: no backend has this name.
    """
    if name == "reference":
        return BackendChoice(ReferenceAttention(), "asked for by name; slow, for comparison")
    if name in ("auto", "gathered"):
        why = "asked for by name" if name == "gathered" else f"runs on any device, here {device}"
        return BackendChoice(GatheredAttention(device, scratch_bytes=scratch_bytes), why)
    raise UnknownName("attention backend", name, ("auto", *BACKENDS))
