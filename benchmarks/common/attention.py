"""Attention of a decoding batch over the pages of one layer, without a model."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.backend import (
    AttentionBackend,
    AttentionMath,
    LaneSlots,
    LayerPages,
    StepShape,
)
from quire.kernels.coded import CodedPlanes
from quire.kernels.native.library import NativeLibrary
from quire.kernels.select import select_backend, usable_library
from quire.kv.store import PageStore, PageViews
from quire.layout.layout import layout_for
from quire.layout.model import LayerSpec, ModelSpec

PLAIN = "bfloat16"

_CPU = torch.device("cpu")
_SCRATCH_BYTES = 64 << 20
_ENCODED_PAGES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """A decoding batch: one query per sequence, bfloat16."""

    batch: int = 32
    tokens: int = 2_048  # of each sequence, the new one included
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_tokens: int = 16

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that a step reads."""
        return self.batch * self.spec.kv_bytes(self.tokens, 2)

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(
            architecture="llama",
            num_layers=1,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            hidden_size=self.num_heads * self.head_dim,
            intermediate_size=1,
            vocab_size=1,
            max_positions=self.tokens,
            tied_embeddings=True,
            gated_mlp=True,
            layers=(LayerSpec(),),
        )


class AttentionBench:
    """The KV of one layer in pages, and contiguous."""

    def __init__(self, shape: AttentionShape, codec: str = PLAIN) -> None:
        self._shape, self._codec = shape, codec
        layout = layout_for(shape.spec, page_tokens=shape.page_tokens, codec=codec)
        (group,) = layout.groups
        self._page_class = group.page_class
        per_row = -(-shape.tokens // shape.page_tokens)
        self.kv_bytes = shape.batch * per_row * self._page_class.page_bytes
        self._store = PageStore(self.kv_bytes, _CPU)
        views = self._store.views(self._page_class)
        generator = torch.Generator().manual_seed(0)
        fill_pages(views, shape.head_dim, generator)
        scattered = torch.randperm(shape.batch * per_row, generator=generator)
        self.pages = LayerPages(
            key=views.key,
            value=views.value,
            table=scattered.int().view(shape.batch, 1, per_row),
            rows=torch.arange(shape.batch),
            first_lane=0,
            num_lanes=1,
            coded=views.coded,
        )
        query = torch.randn(shape.batch, shape.num_heads, shape.head_dim, generator=generator)
        self._query = query.bfloat16()
        self._math = AttentionMath(shape.head_dim**-0.5)

    def variants(self) -> dict[str, Callable[[], Tensor]]:
        """Calls that attend once, by variant; `native` variants only if the C extension can run."""
        variants = {"gathered": self.paged("gathered"), "sdpa": self._contiguous()}
        if isinstance(usable_library(_CPU, torch.bfloat16, self._shape.head_dim), NativeLibrary):
            variants["native"] = self.paged("native")
            variants["native sums"] = self.paged("native", statistics=True)
        return variants

    def paged(self, name: str, *, statistics: bool = False) -> Callable[[], Tensor]:
        """A call that attends once through a backend, with or without column sums."""
        shape = self._shape
        backend: AttentionBackend = select_backend(
            name,
            _CPU,
            dtype=torch.bfloat16,
            head_dim=shape.head_dim,
            scratch_bytes=_SCRATCH_BYTES,
            codec=self._codec,
        ).backend
        ones = np.ones(shape.batch, dtype=np.int32)
        lanes = LaneSlots(np.full((shape.batch, 1), shape.tokens, dtype=np.int32), None)
        slot_bytes = self._page_class.page_bytes // self._page_class.tokens
        plan = backend.plan(StepShape.of(ones), lanes, shape.page_tokens, slot_bytes)
        fresh = self._fresh()
        if not statistics:
            return lambda: backend.attend(plan, self.pages, self._math, self._query, fresh)
        sums = torch.zeros(shape.batch, shape.num_heads, shape.tokens)
        return lambda: backend.attend(
            plan, self.pages, self._math, self._query, fresh, column_sums=sums.zero_()
        )

    def _fresh(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the new tokens, as stored in slots; not read if pages hold codes."""
        if self.pages.coded is not None:
            return self._query, self._query
        last = self._shape.tokens - 1
        page = self.pages.table[:, 0, last // self._shape.page_tokens].long()
        offset = last % self._shape.page_tokens
        return self.pages.key[page, :, offset], self.pages.value[page, :, offset]

    def _contiguous(self) -> Callable[[], Tensor]:
        """Create a call of torch's attention on a contiguous copy of the same KV.

        Query heads of a group are placed on the query axis: on a CPU that is eight times faster
        than `enable_gqa`.
        """
        shape = self._shape
        key, value = (
            plane[self.pages.table[:, 0].long()]
            .transpose(1, 2)
            .reshape(shape.batch, shape.num_kv_heads, -1, shape.head_dim)[:, :, : shape.tokens]
            for plane in (self.pages.key, self.pages.value)
        )
        query = self._query.view(shape.batch, shape.num_kv_heads, -1, shape.head_dim)
        return lambda: F.scaled_dot_product_attention(query, key, value, scale=self._math.scale)


def fill_pages(views: PageViews, head_dim: int, generator: torch.Generator) -> None:
    """Fill all pages of a class with random vectors, or with the codes of random vectors."""
    if views.coded is None:
        for plane in (views.key, views.value):
            plane.normal_(generator=generator)
        return
    for side in (views.coded.key, views.coded.value):
        fill_with_codes(side, head_dim, generator)


def fill_with_codes(side: CodedPlanes, head_dim: int, generator: torch.Generator) -> None:
    """Fill all pages of a class with codes of random vectors, drawn for some and repeated."""
    num_pages, heads, tokens, _ = side.planes[0].shape
    drawn = min(num_pages, _ENCODED_PAGES)
    shape, device = (drawn, heads, tokens, head_dim), generator.device
    encoded = side.codec.encode(torch.randn(shape, generator=generator, device=device))
    index = torch.arange(num_pages, device=device) % drawn
    for plane, codes in zip(side.planes, encoded, strict=True):
        plane.copy_(codes[index])
