"""FlashInfer's wrappers, planned for the rows of a step, and reused by later steps.

    row lengths --plan (CPU)--> schedule in pinned memory --copy--> the device       once a step
    page table  --gather--> page numbers of a layer                                  every layer

The layers of a step have equal row lengths and different pages. A wrapper is therefore planned
once, with a tensor of page numbers that each layer overwrites before its attention.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.flashinfer.package import (
    IMPLEMENTATION,
    KV_LAYOUT,
    DecodeWrapper,
    FlashInfer,
    PrefillWrapper,
)

WORKSPACE_BYTES = 128 << 20  # as FlashInfer recommends
_MOST_GROUP_ON_CUDA_CORES = 4  # query heads of a KV head, with kernels for these groups only


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a wrapper is planned for, next to the lengths of rows.

    Attributes:
        num_heads, num_kv_heads, head_dim: of queries and pages.
        page_tokens: slots of a page.
        dtype: type of queries and pages.
        scale: factor on products of queries and keys.
        softcap: c in c * tanh(x / c), or None.
        window: slots that a query attends to, including its own; None for all.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_tokens: int
    dtype: torch.dtype
    scale: float
    softcap: float | None
    window: int | None

    @property
    def on_tensor_cores(self) -> bool:
        """Whether decode rows use tensor cores, because many heads share their keys."""
        return self.num_heads // self.num_kv_heads > _MOST_GROUP_ON_CUDA_CORES

    @property
    def window_left(self) -> int:
        """Slots before its own that a query attends to; -1 for all."""
        return -1 if self.window is None else self.window - 1


@dataclass(frozen=True, slots=True)
class RowPages:
    """Pages of some rows of a step, in FlashInfer's form.

    Attributes:
        starts: int32 [rows + 1] first page of each row among those of all rows, on the CPU.
        last_slots: int32 [rows] live slots of each row's last page, on the CPU.
        first_queries: int32 [rows + 1] first query of each row, on the CPU.
    """

    starts: Tensor
    last_slots: Tensor
    first_queries: Tensor

    @classmethod
    def of(
        cls, slots: NDArray[np.int64], tokens: NDArray[np.int32], page_tokens: int, *, pinned: bool
    ) -> "RowPages":
        """Describe the pages of rows.

        Args:
            slots: [rows] live slots in these pages, at least 1.
            tokens: [rows] new tokens.
            page_tokens: slots of a page.
            pinned: whether a device copies the numbers.
        """
        pages = -(-slots // page_tokens)
        numbers = (_ends(pages), slots - (pages - 1) * page_tokens, _ends(tokens))
        found = (torch.from_numpy(np.ascontiguousarray(x, dtype=np.int32)) for x in numbers)
        return cls(*(x.pin_memory() if pinned else x for x in found))


def _ends(counts: NDArray[np.int32] | NDArray[np.int64]) -> NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


Wrapper = TypeVar("Wrapper", DecodeWrapper, PrefillWrapper)


@dataclass(slots=True)
class _Kept(Generic[Wrapper]):
    """A wrapper, and the end of the copy of its last schedule; None on a CPU."""

    wrapper: Wrapper
    copied: torch.cuda.Event | None = None

    @property
    def is_free(self) -> bool:
        """Whether the pinned memory of its last schedule can be overwritten."""
        return self.copied is None or bool(self.copied.query())  # type: ignore[no-untyped-call]


class _Shelf(Generic[Wrapper]):
    """Wrappers of one kind that no step uses.

    Args:
        make: creates a wrapper.
        device: device of the wrappers.
    """

    def __init__(self, make: Callable[[], Wrapper], device: torch.device) -> None:
        self._make: Callable[[], Wrapper] = make
        self._device = device
        self._idle: list[_Kept[Wrapper]] = []

    def planned(self, holder: object, plan: Callable[[Wrapper], None]) -> Wrapper:
        """Plan a wrapper, which is used again once `holder` is garbage collected."""
        index = next((i for i, kept in enumerate(self._idle) if kept.is_free), None)
        kept = _Kept(self._make()) if index is None else self._idle.pop(index)
        plan(kept.wrapper)
        if self._device.type == "cuda":
            kept.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            kept.copied.record(torch.cuda.current_stream(self._device))
        weakref.finalize(holder, self._idle.append, kept)
        return kept.wrapper


@dataclass(slots=True)
class Wrappers:
    """Creates, plans and reuses the wrappers of a device.

    Attributes:
        package: FlashInfer.
        device: device of the pages.
        workspace_bytes: device memory for partial results; all wrappers share it, because their
            kernels run in order.
    """

    package: FlashInfer
    device: torch.device
    workspace_bytes: int = WORKSPACE_BYTES
    _workspace: Tensor | None = None
    _decode: dict[bool, _Shelf[DecodeWrapper]] = field(default_factory=dict)
    _prefill: list[_Shelf[PrefillWrapper]] = field(default_factory=list)

    def decode(
        self, holder: object, shape: AttentionShape, rows: RowPages, pages: Tensor
    ) -> DecodeWrapper:
        """Plan a wrapper for rows with one query each.

        Args:
            holder: uses the wrapper until it is garbage collected.
            shape: of the attention.
            rows: pages of the rows.
            pages: int32 tensor on the device that will hold the page numbers of a layer.
        """

        def plan(wrapper: DecodeWrapper) -> None:
            wrapper.plan(
                rows.starts,
                pages,
                rows.last_slots,
                shape.num_heads,
                shape.num_kv_heads,
                shape.head_dim,
                shape.page_tokens,
                window_left=shape.window_left,
                logits_soft_cap=shape.softcap,
                q_data_type=shape.dtype,
                kv_data_type=shape.dtype,
                sm_scale=shape.scale,
            )

        on_tensor_cores = shape.on_tensor_cores
        if on_tensor_cores not in self._decode:

            def make() -> DecodeWrapper:
                return self.package.BatchDecodeWithPagedKVCacheWrapper(
                    self._shared_workspace(),
                    KV_LAYOUT,
                    use_tensor_cores=on_tensor_cores,
                    backend=IMPLEMENTATION,
                )

            self._decode[on_tensor_cores] = _Shelf(make, self.device)
        return self._decode[on_tensor_cores].planned(holder, plan)

    def prefill(
        self, holder: object, shape: AttentionShape, rows: RowPages, pages: Tensor
    ) -> PrefillWrapper:
        """Plan a wrapper for rows with several queries each; arguments as for `decode`."""

        def plan(wrapper: PrefillWrapper) -> None:
            wrapper.plan(
                rows.first_queries,
                rows.starts,
                pages,
                rows.last_slots,
                shape.num_heads,
                shape.num_kv_heads,
                shape.head_dim,
                shape.page_tokens,
                causal=True,
                sm_scale=shape.scale,
                window_left=shape.window_left,
                logits_soft_cap=shape.softcap,
                q_data_type=shape.dtype,
                kv_data_type=shape.dtype,
            )

        if not self._prefill:

            def make() -> PrefillWrapper:
                return self.package.BatchPrefillWithPagedKVCacheWrapper(
                    self._shared_workspace(), KV_LAYOUT, backend=IMPLEMENTATION
                )

            self._prefill.append(_Shelf(make, self.device))
        return self._prefill[0].planned(holder, plan)

    def _shared_workspace(self) -> Tensor:
        if self._workspace is None:  # zeros: FlashInfer requires them at the first use
            self._workspace = torch.zeros(
                self.workspace_bytes, dtype=torch.uint8, device=self.device
            )
        return self._workspace
