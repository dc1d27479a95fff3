"""Copies of whole pages to and from contiguous memory on their device, for transfers."""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from quire.kernels.triton.hardware import cannot_run, failure_of, why_no_triton

_log = logging.getLogger(__name__)
_TRIED_PAGES, _TRIED_BYTES = 4, 4096


def pack_in_torch(
    whole: UInt8[Tensor, "page page_bytes"],
    pages: Int[Tensor, " packed"],
    packed: UInt8[Tensor, "packed page_bytes"],
) -> None:
    """Copy pages to contiguous memory."""
    torch.index_select(whole, 0, pages, out=packed)


def unpack_in_torch(
    whole: UInt8[Tensor, "page page_bytes"],
    pages: Int[Tensor, " packed"],
    packed: UInt8[Tensor, "packed page_bytes"],
) -> None:
    """Copy pages from contiguous memory."""
    whole[pages] = packed


PageCopy = Callable[[Tensor, Tensor, Tensor], None]
"""Copies between all pages and packed ones: pages of the arena, page numbers, packed pages."""


@dataclass(frozen=True, slots=True)
class PageCopies:
    """Copies of whole pages.

    Attributes:
        pack: to contiguous memory.
        unpack: from contiguous memory.
    """

    pack: PageCopy
    unpack: PageCopy


IN_TORCH = PageCopies(pack_in_torch, unpack_in_torch)


@functools.cache
def page_copies(device: torch.device) -> PageCopies:
    """Return the copies for a device: Triton's on a GPU if they are right, else torch's."""
    if device.type != "cuda" or why_no_triton(device) is not None:
        return IN_TORCH
    return checked(_in_triton, device)


def _in_triton() -> PageCopies:
    from quire.kernels.triton.launch import pack_pages, unpack_pages

    return PageCopies(pack_pages, unpack_pages)


def checked(make: Callable[[], PageCopies], device: torch.device) -> PageCopies:
    """Return the copies that `make` imports if they are right, else torch's, with a warning."""
    try:
        copies = make()
        if _are_right(copies, device):
            return copies
        reason = "wrong bytes"
    except cannot_run() as error:
        reason = failure_of(error)
    _log.warning(
        "copies of pages in Triton are not used on %s: %s; please report it", device, reason
    )
    return IN_TORCH


def _are_right(copies: PageCopies, device: torch.device) -> bool:
    """Return whether pages are packed, and unpacked to other pages."""
    numbers = torch.arange(_TRIED_PAGES * _TRIED_BYTES) % 251
    whole = numbers.to(torch.uint8).view(_TRIED_PAGES, _TRIED_BYTES).to(device)
    expected = whole.clone()
    expected[1] = whole[3]
    pages, target = (torch.tensor(x, device=device) for x in ([3, 0], [1, 0]))
    packed = torch.empty(2, _TRIED_BYTES, dtype=torch.uint8, device=device)
    copies.pack(whole, pages, packed)
    is_packed = torch.equal(packed, whole[pages])
    copies.unpack(whole, target, packed)
    return is_packed and torch.equal(whole, expected)
