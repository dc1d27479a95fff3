"""The tensors of paged KV: one byte arena, and typed views of it for each page class."""

import contextlib
import mmap
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import ConfigError
from quire.kernels.backend import MovedSlots
from quire.kernels.paging import move_slots
from quire.kv.arena import HUGE_PAGE_BYTES
from quire.kv.pages import PageNumbers
from quire.spec.codecs import CodecSpec
from quire.spec.pages import PAGE_ALIGNMENT_BYTES, PageClass

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class PageViews:
    """The arena seen as pages of one class.

    Attributes:
        whole: uint8 [pages, page_bytes].
        key, value: [pages, heads, tokens, head_dim]; value is None for one-plane pages.
        positions: int32 [pages, tokens], or None.
    """

    whole: Tensor
    key: Tensor
    value: Tensor | None
    positions: Tensor | None


class PageStore:
    """Implements `PageBytes` on a tensor of bytes.

    The arena starts as zeros; on a CPU the system gives its memory page by page, when a byte is
    first written, so an arena as large as what is free costs nothing until it fills. Bytes of free
    pages keep what was there last and may be anything when seen as another type: readers never let
    a slot that is not live take part in arithmetic.

    Args:
        total_bytes: size of the arena, as rounded by `Arena`.
        device: where it lies.

    Attributes:
        mover: copies slots; a backend may know a faster way than torch.
    """

    def __init__(self, total_bytes: int, device: torch.device) -> None:
        self.device = device
        self.arena = zero_bytes(total_bytes, device)
        self.mover: Callable[[MovedSlots], None] = move_slots
        self._views: dict[PageClass, PageViews] = {}

    def views(self, page_class: PageClass) -> PageViews:
        """Typed views of all pages of a class.

        Raises:
            ConfigError: a codec whose numbers are not a plain tensor type.
        """
        if page_class not in self._views:
            # views made inside inference mode could not be written outside of it
            with torch.inference_mode(mode=False):
                self._views[page_class] = self._make_views(page_class)
        return self._views[page_class]

    def _make_views(self, page_class: PageClass) -> PageViews:
        num_pages = self.arena.numel() // page_class.page_bytes
        whole = self.arena[: num_pages * page_class.page_bytes]
        value = None
        if page_class.value is not None:
            value = self._plane(whole, page_class, page_class.value, page_class.key_bytes)
        positions = None
        if page_class.positions:
            positions = whole.view(torch.int32).as_strided(
                (num_pages, page_class.tokens),
                (page_class.page_bytes // 4, 1),
                page_class.positions_offset_bytes // 4,
            )
        return PageViews(
            whole=whole.view(num_pages, page_class.page_bytes),
            key=self._plane(whole, page_class, page_class.key, 0),
            value=value,
            positions=positions,
        )

    def _plane(
        self, whole: Tensor, page_class: PageClass, codec: CodecSpec, offset_bytes: int
    ) -> Tensor:
        if codec.name not in DTYPES:
            raise ConfigError(f"codec {codec.name!r} has no plain tensor type to view pages as")
        dtype = DTYPES[codec.name]
        shape = (page_class.heads, page_class.tokens, page_class.head_dim)
        strides = (page_class.tokens * page_class.head_dim, page_class.head_dim, 1)
        num_pages = whole.numel() // page_class.page_bytes
        return whole.view(dtype).as_strided(
            (num_pages, *shape),
            (page_class.page_bytes // dtype.itemsize, *strides),
            offset_bytes // dtype.itemsize,
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
        """Copy slots: keys, values and positions."""
        views = self.views(page_class)
        positions = None if views.positions is None else views.positions[:, None, :, None]
        planes = tuple(p for p in (views.key, views.value, positions) if p is not None)
        (from_page, from_offset), (to_page, to_offset) = source, target
        self.mover(
            MovedSlots(
                planes=planes,
                source=(self._index(from_page), self._index(from_offset)),
                target=(self._index(to_page), self._index(to_offset)),
            )
        )

    def read_pages(self, page_class: PageClass, pages: PageNumbers) -> object:
        """The bytes of whole pages on the host, uint8 [pages, page_bytes]."""
        return self.views(page_class).whole[self._index(pages)].cpu()

    def write_pages(self, page_class: PageClass, pages: PageNumbers, payload: object) -> None:
        """Put bytes that were read back into (other) pages."""
        assert isinstance(payload, Tensor), "a payload comes from read_pages of the same store"
        self.views(page_class).whole[self._index(pages)] = payload.to(self.device)

    def _index(self, numbers: NDArray[np.int32] | NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int64)).to(self.device)


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
