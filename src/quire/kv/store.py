"""The tensors of paged KV: one byte arena, and typed views of it for each page class."""

import contextlib
import mmap
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.codecs.base import DTYPES
from quire.codecs.registry import make_codec
from quire.errors import InvariantError
from quire.kernels.backend import MovedSlots
from quire.kernels.coded import CodedPages, CodedPlanes
from quire.kernels.paging import move_slots
from quire.kv.arena import HUGE_PAGE_BYTES
from quire.kv.memory import KVMemory
from quire.kv.pages import PageNumbers
from quire.layout.pages import PAGE_ALIGNMENT_BYTES, PageClass, PlacedPlane

PLAIN_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Types that models compute in and pages hold as they are."""


@dataclass(frozen=True, slots=True)
class PageViews:
    """The arena seen as pages of one class.

    Attributes:
        whole: uint8 [pages, page_bytes].
        key, value: [pages, heads, tokens, head_dim]; value is None for one-plane pages. Where they
            hold codes, these, packed.
        positions: int32 [pages, tokens], or None.
        coded: what encodes and decodes; None where pages hold plain numbers.
        by_slot: planes with a record for each slot, [pages, heads, tokens, width] each, positions
            among them: what moves with a slot.
    """

    whole: Tensor
    key: Tensor
    value: Tensor | None
    positions: Tensor | None
    coded: CodedPages | None
    by_slot: tuple[Tensor, ...]


class PageStore:
    """Implements `PageBytes` on a tensor of bytes.

    The arena starts as zeros; on a CPU the system gives its memory page by page, when a byte is
    first written, so an arena as large as what is free costs nothing until it fills. Bytes of free
    pages keep what was there last and may be anything when seen as another type: readers never let
    a slot that is not live take part in arithmetic.

    Args:
        total_bytes: size of the arena, as rounded by `Arena`.
        device: where it lies.
        mover: copies slots; a backend may know a faster way than torch.
        arena: bytes that several stores share; None allocates them.
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
        """Typed views of all pages of a class."""
        if page_class not in self._views:
            # views made inside inference mode could not be written outside of it
            with torch.inference_mode(mode=False):
                self._views[page_class] = self._make_views(page_class)
        return self._views[page_class]

    def _make_views(self, page_class: PageClass) -> PageViews:
        num_pages = self.arena.numel() // page_class.page_bytes
        return self.views_of(self.arena[: num_pages * page_class.page_bytes], page_class)

    def views_of(self, whole: Tensor, page_class: PageClass) -> PageViews:
        """Typed views of bytes that hold nothing but pages of a class, wherever they are."""
        num_pages = whole.numel() // page_class.page_bytes
        key = tuple(self._plane(whole, page_class, placed) for placed in page_class.key_planes)
        value = tuple(self._plane(whole, page_class, placed) for placed in page_class.value_planes)
        positions = None
        if page_class.positions:
            typed = whole.view(torch.int32)
            positions = typed.as_strided(
                (num_pages, page_class.tokens),
                (page_class.page_bytes // 4, 1),
                typed.storage_offset() + page_class.positions_offset_bytes // 4,
            )
        placed = (*page_class.key_planes, *page_class.value_planes)
        by_slot = [v for v, p in zip((*key, *value), placed, strict=True) if not p.plane.per_page]
        if positions is not None:
            by_slot.append(positions[:, None, :, None])
        return PageViews(
            whole=whole.view(num_pages, page_class.page_bytes),
            key=key[0],
            value=value[0] if value else None,
            positions=positions,
            coded=None if page_class.is_plain else _coded(page_class, key, value),
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
        """Copy whole pages, `source[i]` onto `target[i]`."""
        whole = self.views(page_class).whole
        whole[self._index(target)] = whole[self._index(source)]

    def clear_pages(self, page_class: PageClass, pages: PageNumbers) -> None:
        """Zero whole pages."""
        self.views(page_class).whole[self._index(pages)] = 0

    def move_slots(
        self,
        page_class: PageClass,
        source: tuple[PageNumbers, NDArray[np.int64]],
        target: tuple[PageNumbers, NDArray[np.int64]],
    ) -> None:
        """Copy slots: keys, values and positions.

        Raises:
            InvariantError: slots share what decodes them with others of their page.
        """
        if page_class.per_page:
            raise InvariantError(f"slots of pages in {page_class.key.name} cannot move alone")
        (from_page, from_offset), (to_page, to_offset) = source, target
        self._mover(
            MovedSlots(
                planes=self.views(page_class).by_slot,
                source=(self._index(from_page), self._index(from_offset)),
                target=(self._index(to_page), self._index(to_offset)),
            )
        )

    def read_pages(self, page_class: PageClass, pages: PageNumbers) -> object:
        """The bytes of whole pages on the host, uint8 [pages, page_bytes]."""
        return self.views(page_class).whole[self._index(pages)].cpu()

    def write_pages(self, page_class: PageClass, pages: PageNumbers, payload: object) -> None:
        """Put bytes that were read back into (other) pages."""
        found = torch.as_tensor(payload)  # rows of bytes may come from elsewhere, as an array
        self.views(page_class).whole[self._index(pages)] = found.to(self.device)

    def page_positions(self, page_class: PageClass, pages: PageNumbers) -> NDArray[np.int32]:
        """Logical positions of pages' slots [page, slot], of a class that carries them."""
        positions = self.views(page_class).positions
        assert positions is not None, "slots without order carry theirs"
        found: NDArray[np.int32] = positions[self._index(pages)].cpu().numpy()
        return found

    def _index(self, numbers: NDArray[np.int32] | NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int64)).to(self.device)


def plain_codec(dtype: torch.dtype) -> str:
    """The codec of numbers of a type as they are."""
    return next(name for name, plain in PLAIN_DTYPES.items() if plain == dtype)


def zero_bytes(total_bytes: int, device: torch.device) -> Tensor:
    """Zero bytes, which `torch.zeros` would write out on a CPU and fresh memory is anyway."""
    if device.type != "cpu":
        return torch.zeros(total_bytes, dtype=torch.uint8, device=device)
    if hasattr(mmap, "MADV_HUGEPAGE") and total_bytes >= HUGE_PAGE_BYTES:
        return torch.from_numpy(_huge_pages(total_bytes))
    spare = np.zeros(total_bytes + PAGE_ALIGNMENT_BYTES, dtype=np.uint8)
    start = -spare.ctypes.data % PAGE_ALIGNMENT_BYTES
    return torch.from_numpy(spare[start : start + total_bytes])


def _huge_pages(total_bytes: int) -> NDArray[np.uint8]:
    """A mapping of its own in pages of 2 MiB where Linux gives them; its end in small pages.

    Pages lie scattered in the arena, and a row's are read one after the other: with small system
    pages nearly each of them misses the TLB. The end stays in small ones because a huge page there
    would be larger than what was asked for.
    """
    mapping = mmap.mmap(-1, total_bytes + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    spare = np.frombuffer(mapping, dtype=np.uint8)  # keeps the mapping, and the tensor keeps this
    start = -spare.ctypes.data % HUGE_PAGE_BYTES
    with contextlib.suppress(OSError):  # a kernel built without them
        mapping.madvise(mmap.MADV_HUGEPAGE, start, total_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
    return spare[start : start + total_bytes]


def _coded(page_class: PageClass, key: tuple[Tensor, ...], value: tuple[Tensor, ...]) -> CodedPages:
    assert page_class.value is not None, "what is remembered of sequences is not encoded"
    codecs = (make_codec(spec, page_class.head_dim) for spec in (page_class.key, page_class.value))
    sides = (CodedPlanes(*side) for side in zip(codecs, (key, value), strict=True))
    return CodedPages(*sides)


def store_of(memory: KVMemory) -> PageStore:
    """The bytes of a memory that was made with a `PageStore`."""
    assert isinstance(memory.store, PageStore), "bookkeeping alone has no bytes"
    return memory.store
