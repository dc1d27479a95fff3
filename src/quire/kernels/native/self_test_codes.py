"""Compares a loaded library on coded pages with the reference on the decoded numbers."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from quire.codecs.registry import make_codec
from quire.kernels.backend import (
    AttentionBackend,
    AttentionMath,
    LaneSlots,
    LayerPages,
    NewSlots,
    StepShape,
)
from quire.kernels.coded import CodedPages, CodedPlanes, decode_slots
from quire.kernels.gathered import GatheredAttention
from quire.kernels.native.backend import NativeAttention
from quire.kernels.native.library import NativeLibrary
from quire.kernels.reference_backend import ReferenceAttention
from quire.layout.codec_names import codec_spec

_CODECS = ("int8", "int4", "int4_outliers", "int2", "fp8")
_NEW_TOKENS, _SLOTS = (1, 1, 20), (3, 101, 37)  # walks over pages, and a chunk
_WALKS = 2
_HEADS, _GROUP, _HEAD_DIM, _PAGE_TOKENS = 2, 4, 64, 16
_COLUMNS = -(-max(_SLOTS) // _PAGE_TOKENS)
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2**-8}  # of the output; columns: the first


def codes_right(library: NativeLibrary) -> bool:
    """Return whether the results are correct for every codec that the C library reads."""
    native = NativeAttention(library, GatheredAttention(torch.device("cpu")))
    return all(_is_right(native, name) for name in _CODECS)


def _is_right(native: AttentionBackend, name: str) -> bool:
    generator = torch.Generator().manual_seed(0)
    num_pages = len(_SLOTS) * _COLUMNS
    codec = make_codec(codec_spec(name), _HEAD_DIM)
    encoded = [
        codec.encode(torch.randn(num_pages, _HEADS, _PAGE_TOKENS, _HEAD_DIM, generator=generator))
        for _ in range(2)
    ]
    planes = _in_pages([plane for side in encoded for plane in side])
    coded = CodedPages(
        CodedPlanes(codec, planes[: len(planes) // 2]),
        CodedPlanes(codec, planes[len(planes) // 2 :]),
    )
    table = torch.randperm(num_pages, generator=generator).int().view(len(_SLOTS), 1, _COLUMNS)
    query = torch.randn(sum(_NEW_TOKENS), _HEADS * _GROUP, _HEAD_DIM, generator=generator)
    pages = LayerPages(
        key=coded.key.planes[0],
        value=coded.value.planes[0],
        table=table,
        rows=torch.arange(len(_SLOTS)),
        first_lane=0,
        num_lanes=1,
        coded=coded,
    )
    walks = replace(pages, rows=pages.rows[:_WALKS])  # torch rounds chunks more than C does
    attends = _equal(query, pages, native) and _equal(query[:_WALKS].bfloat16(), walks, native)
    return attends and _writes(coded, query[:, :_HEADS], native)


def _writes(coded: CodedPages, vectors: Tensor, native: AttentionBackend) -> bool:
    """Return whether new tokens get the codes of the codec."""
    tokens = torch.arange(len(vectors))[:, None]
    pages, offsets = tokens // _PAGE_TOKENS, tokens % _PAGE_TOKENS
    key, value = coded.key.planes[0], coded.value.planes[0]
    native.write(NewSlots(key, value, pages, offsets, coded), vectors, 3 * vectors)
    return all(
        torch.equal(decode_slots(side, pages, offsets)[:, 0], _as_stored(side, factor * vectors))
        for side, factor in ((coded.key, 1), (coded.value, 3))
    )


def _as_stored(side: CodedPlanes, vectors: Tensor) -> Tensor:
    return side.codec.decode(side.codec.encode(vectors[:, :, None])).squeeze(2)


def _equal(query: Tensor, pages: LayerPages, native: AttentionBackend) -> bool:
    """Return whether output and column sums match the reference on the same numbers."""
    expected, expected_sums = _attend(ReferenceAttention(), query.float(), pages)
    got, sums = _attend(native, query, pages)
    return _near(got.float(), expected, _TOLERANCE[query.dtype]) and _near(
        sums, expected_sums, _TOLERANCE[torch.float32]
    )


def _near(got: Tensor, expected: Tensor, tolerance: float) -> bool:
    return bool((got - expected).abs().max() / expected.abs().max() <= tolerance)  # NaN is not


def _in_pages(planes: list[Tensor]) -> tuple[Tensor, ...]:
    """Copy planes next to each other in pages, as in a page class."""
    starts = np.cumsum([0] + [-(-plane[0].nbytes // 4) * 4 for plane in planes])
    pages = torch.zeros(len(planes[0]), int(starts[-1]), dtype=torch.uint8)
    placed = []
    for plane, start in zip(planes, starts.tolist(), strict=False):
        part = pages[:, start : start + plane[0].nbytes].view(plane.dtype).view(plane.shape)
        placed.append(part.copy_(plane))
    return tuple(placed)


def _attend(backend: AttentionBackend, query: Tensor, pages: LayerPages) -> tuple[Tensor, Tensor]:
    rows = len(pages.rows)
    step = StepShape.of(np.array(_NEW_TOKENS[:rows], dtype=np.int32))
    lanes = LaneSlots(np.array(_SLOTS[:rows], dtype=np.int32)[:, None], None)
    plan = backend.plan(step, lanes, _PAGE_TOKENS, 1)
    sums = torch.zeros(rows, query.shape[1], max(_SLOTS))
    math = AttentionMath(scale=_HEAD_DIM**-0.5)
    fresh = (query[:, :_HEADS], query[:, :_HEADS])  # unused, because attention uses the codes
    return backend.attend(plan, pages, math, query, fresh, column_sums=sums), sums
