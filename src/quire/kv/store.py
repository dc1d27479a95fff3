"""The page store: one tensor of bytes per arena, and typed views of it for each page class."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from quire.codecs.base import DTYPES
from quire.codecs.registry import make_codec
from quire.errors import InvariantError
from quire.kernels.backend import MovedSlots
from quire.kernels.coded import CodedPages, CodedPlanes
from quire.kernels.device_copies import to_device
from quire.kernels.memory import zero_memory
from quire.kernels.paging import move_slots, set_bounds
from quire.kv.memory import KVMemory
from quire.kv.pages import PageNumbers
from quire.layout.pages import BOUNDS, KEY, VALUE, PageClass, PlacedPlane

PLAIN_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Floating-point types that models compute in and that pages can hold unquantized."""


@dataclass(frozen=True, slots=True)
class PageViews:
    """Typed views of the arena as pages of one class.

    Attributes:
        whole: uint8 [pages, page_bytes].
        planes: the data of each plane by name, [pages, heads, tokens, width] each: its vectors, or
            packed codes followed by scales, zeros and outliers.
        positions: int32 [pages, tokens] logical positions; None if pages have none.
        coded: encodes and decodes keys and values; None if the pages are not quantized.
        by_slot: data with a record per slot, each [pages, heads, tokens, width], positions
            included: what moves with a slot.
    """

    whole: Tensor
    planes: Mapping[str, tuple[Tensor, ...]]
    positions: Tensor | None
    coded: CodedPages | None
    by_slot: tuple[Tensor, ...]

    @property
    def key(self) -> Tensor:
        """Keys, or packed codes of quantized keys."""
        return self.planes[KEY][0]

    @property
    def bounds(self) -> Tensor | None:
        """Bounds of the keys of each page; None if pages have none."""
        return self.planes[BOUNDS][0] if BOUNDS in self.planes else None

    @property
    def value(self) -> Tensor:
        """Values, or packed codes of quantized values."""
        return self.planes[VALUE][0]


Places = tuple[Int[Tensor, " slot"], Int[Tensor, " slot"]]
"""Pages of slots, and the offsets of the slots in them."""


class PageStore:
    """Implements `PageBytes` on a tensor of bytes.

    The arena starts as zeros. On a CPU the operating system allocates memory at the first write of
    each system page, so an unused part of the arena costs no memory. Free pages keep their old
    bytes, which can be any value (NaN too) in another type: readers must not use slots that are not
    live in arithmetic.

    Args:
        total_bytes: size of the arena, as rounded by `Arena`.
        mover: copies slots; a backend may have a faster implementation than torch.
        arena: bytes that several stores share; None to allocate them.
    """

    def __init__(
        self,
        total_bytes: int,
        device: torch.device,
        mover: Callable[[MovedSlots], None] = move_slots,
        arena: Tensor | None = None,
    ) -> None:
        self.device, self._mover = device, mover
        self.arena = zero_bytes(total_bytes, device) if arena is None else arena
        self._views: dict[PageClass, PageViews] = {}

    def views(self, page_class: PageClass) -> PageViews:
        if page_class not in self._views:
            # views created in inference mode could not be written outside of it
            with torch.inference_mode(mode=False):
                num_pages = self.arena.numel() // page_class.page_bytes
                whole = self.arena[: num_pages * page_class.page_bytes]
                self._views[page_class] = self.views_of(whole, page_class)
        return self._views[page_class]

    def views_of(self, whole: Tensor, page_class: PageClass) -> PageViews:
        """Return typed views of a byte tensor that holds only pages of a class, on any device."""
        num_pages = whole.numel() // page_class.page_bytes
        planes = {
            plane.name: tuple(self._plane(whole, page_class, placed) for placed in parts)
            for plane, parts in zip(page_class.planes, page_class.placed, strict=True)
        }
        positions = None
        if page_class.positions:
            typed = whole.view(torch.int32)
            positions = typed.as_strided(
                (num_pages, page_class.tokens),
                (page_class.page_bytes // 4, 1),
                typed.storage_offset() + page_class.positions_offset_bytes // 4,
            )
        by_slot = [
            view
            for views, parts in zip(planes.values(), page_class.placed, strict=True)
            for view, placed in zip(views, parts, strict=True)
            if not placed.plane.per_page
        ]
        if positions is not None:
            by_slot.append(positions[:, None, :, None])
        return PageViews(
            whole=whole.view(num_pages, page_class.page_bytes),
            planes=planes,
            positions=positions,
            coded=None if page_class.is_plain else _coded(page_class, planes),
            by_slot=tuple(by_slot),
        )

    def _plane(self, whole: Tensor, page_class: PageClass, placed: PlacedPlane) -> Tensor:
        dtype, (heads, records, width) = DTYPES[placed.plane.dtype], placed.shape
        num_pages = whole.numel() // page_class.page_bytes
        typed = whole.view(dtype)
        return typed.as_strided(
            (num_pages, heads, records, width),
            (page_class.page_bytes // dtype.itemsize, records * width, width, 1),
            typed.storage_offset() + placed.offset_bytes // dtype.itemsize,
        )

    # ---- PageBytes -----------------------------------------------------------------------------

    def copy_pages(self, page_class: PageClass, source: PageNumbers, target: PageNumbers) -> None:
        whole = self.views(page_class).whole
        whole[self._index(target)] = whole[self._index(source)]

    def clear_pages(self, page_class: PageClass, pages: PageNumbers) -> None:
        self.views(page_class).whole[self._index(pages)] = 0

    def move_slots(
        self,
        page_class: PageClass,
        source: tuple[PageNumbers, NDArray[np.int64]],
        target: tuple[PageNumbers, NDArray[np.int64]],
    ) -> None:
        """InvariantError if the codec shares parameters between the slots of a page."""
        if page_class.per_page:
            raise InvariantError(
                f"single slots of pages in {page_class.codec_name} cannot move: the codec encodes "
                "whole pages"
            )
        self.move_records(page_class, source, target)

    def move_records(
        self,
        page_class: PageClass,
        source: tuple[PageNumbers, NDArray[np.int64]],
        target: tuple[PageNumbers, NDArray[np.int64]],
    ) -> None:
        """Copy the planes that have a record for each slot, and the positions.

        If a codec encodes whole pages, the target pages must then be encoded again.
        """
        (from_page, from_offset), (to_page, to_offset) = source, target
        self.move_places(
            page_class,
            (self._index(from_page), self._index(from_offset)),
            (self._index(to_page), self._index(to_offset)),
        )

    def move_places(self, page_class: PageClass, source: Places, target: Places) -> None:
        """As `move_records`, of slots that are known to the device only."""
        planes = self.views(page_class).by_slot
        self._mover(MovedSlots(planes=planes, source=source, target=target))

    def set_bounds(
        self, page_class: PageClass, pages: PageNumbers, held: NDArray[np.int64]
    ) -> None:
        views = self.views(page_class)
        assert views.bounds is not None, "pages of a class with bounds"
        coded = None if views.coded is None else views.coded.key
        set_bounds(views.bounds, views.key, coded, self._index(pages), self._index(held))

    def read_pages(self, page_class: PageClass, pages: PageNumbers) -> object:
        """Copy the bytes of whole pages to CPU memory, uint8 [pages, page_bytes]."""
        return self.views(page_class).whole[self._index(pages)].cpu()

    def write_pages(self, page_class: PageClass, pages: PageNumbers, payload: object) -> None:
        found = torch.as_tensor(payload)  # byte records from other storage are NumPy arrays
        self.views(page_class).whole[self._index(pages)] = found.to(self.device)

    def page_positions(self, page_class: PageClass, pages: PageNumbers) -> NDArray[np.int32]:
        """Return logical positions [page, slot] of pages of a class that stores positions."""
        positions = self.views(page_class).positions
        assert positions is not None, "pages of unordered lanes store positions"
        found: NDArray[np.int32] = positions[self._index(pages)].cpu().numpy()
        return found

    def _index(self, numbers: NDArray[np.int32] | NDArray[np.int64]) -> Tensor:
        return to_device(np.asarray(numbers, dtype=np.int64), self.device)


def plain_codec(dtype: torch.dtype) -> str:
    """Return the name of the unquantized codec of a type."""
    return next(name for name, plain in PLAIN_DTYPES.items() if plain == dtype)


def zero_bytes(total_bytes: int, device: torch.device) -> Tensor:
    """Allocate zero bytes, on a CPU in huge pages."""
    if device.type != "cpu":
        return torch.zeros(total_bytes, dtype=torch.uint8, device=device)
    return zero_memory(total_bytes)


def _coded(page_class: PageClass, planes: Mapping[str, tuple[Tensor, ...]]) -> CodedPages | None:
    if not {KEY, VALUE} <= set(planes):
        return None
    codecs = {p.name: make_codec(p.codec, p.width) for p in page_class.planes}
    return CodedPages(*(CodedPlanes(codecs[name], planes[name]) for name in (KEY, VALUE)))


def store_of(memory: KVMemory) -> PageStore:
    """Return the store of a memory that was created with a `PageStore`."""
    assert isinstance(memory.store, PageStore), "a memory with bookkeeping only has no bytes"
    return memory.store
