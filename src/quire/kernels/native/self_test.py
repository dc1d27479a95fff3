"""Compares a loaded library with the reference on one small step, before it is used.

Coded pages are compared with the reference on the decoded numbers.

A path with wrong results (miscompiled, or a CPU without a feature it claims) is rejected in favour
of the next simpler path, with a warning. The test takes a few milliseconds.
"""

import functools
import logging
from dataclasses import replace
from itertools import product

import numpy as np
import torch
from torch import Tensor

from quire.codecs.registry import make_codec
from quire.kernels.backend import (
    AttentionBackend,
    AttentionMath,
    AttentionMeasure,
    AttentionStatistic,
    HeldLanes,
    LaneSelector,
    LaneSlots,
    LayerPages,
    MovedSlots,
    NewSlots,
    SlotRanking,
    SparseLanes,
    StatisticRows,
    StepShape,
    StoredNumbers,
)
from quire.kernels.coded import CodedPages, CodedPlanes, decode_slots
from quire.kernels.gathered import GatheredAttention
from quire.kernels.native.backend import NativeAttention
from quire.kernels.native.library import PATHS, NativeLibrary, NotLoaded, load_library
from quire.kernels.reference_backend import ReferenceAttention
from quire.kernels.sparse import SparsePlan, attend_planned
from quire.layout.codec_names import codec_spec
from quire.layout.statistics import REDUCTIONS

_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-3}
_CODED_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2**-8}  # of the output
_CODECS = ("int8", "int4", "int4_outliers", "int2", "fp8")
_NEW_TOKENS, _SLOTS = (1, 1, 20), (3, 101, 37)  # walks over pages, and a chunk
_WALKS = 2
_HEADS, _GROUP, _HEAD_DIM, _PAGE_TOKENS = 2, 4, 64, 16
_NUMBERS = torch.arange(2 * _HEADS * _PAGE_TOKENS * 3) % 61  # exact in every dtype
_COLUMNS = -(-max(_SLOTS) // _PAGE_TOKENS)

_log = logging.getLogger(__name__)


@functools.cache
def tested_library() -> NativeLibrary | NotLoaded:
    """Return the installed library on its best correct path, loaded once."""
    library = load_library()
    return library if isinstance(library, NotLoaded) else on_right_path(library)


def on_right_path(library: NativeLibrary) -> NativeLibrary | NotLoaded:
    """Return the library on the first path, from its best one down, with correct results."""
    for path in range(library.path, -1, -1):
        tried = replace(library, path=path)
        native = NativeAttention(tried, GatheredAttention(torch.device("cpu")))
        keys = (False, True) if tried.blocks(_HEAD_DIM) else (False,)
        plain_right = all(_is_right(native, *kind) for kind in product(_TOLERANCES, keys))
        plain_right = plain_right and selects_right(native, torch.device("cpu"))
        plain_right = plain_right and all(_reads_right(native, dtype) for dtype in _TOLERANCES)
        if plain_right and _counts_right(native) and all(_codes_right(native, c) for c in _CODECS):
            return tried
        _log.warning("the C extension computes wrong numbers with %s; not used", PATHS[path])
    return NotLoaded("the C extension computes wrong numbers on this machine; please report it")


def _is_right(native: AttentionBackend, dtype: torch.dtype, joined: bool) -> bool:  # noqa: FBT001
    if not _moves_right(native, dtype):
        return False
    backends = (ReferenceAttention(), native)
    found = (_write_and_attend(backend, dtype, joined=joined) for backend in backends)
    return all(
        _near(got.float(), expected.float(), _TOLERANCES[dtype])
        for expected, got in zip(*found, strict=True)
    )


def _near(got: Tensor, expected: Tensor, tolerance: float) -> bool:
    return bool((got - expected).abs().max() / expected.abs().max() <= tolerance)  # NaN is not


def _counts_right(native: AttentionBackend) -> bool:
    """Return whether statistics are correct for every measure and reduction."""
    return all(
        torch.allclose(
            _tally(native, *requested), _tally(ReferenceAttention(), *requested)
        )  # NaN is not
        for requested in product(AttentionMeasure, REDUCTIONS)
    )


def _tally(backend: AttentionBackend, count: AttentionMeasure, heads: str) -> Tensor:
    """Return the statistics of all pages after a step of rows with one token each."""
    generator = torch.Generator().manual_seed(0)
    num_pages, num_rows = len(_SLOTS) * _COLUMNS, len(_SLOTS)
    numbers = torch.rand(num_pages, _HEADS, _PAGE_TOKENS, 1, generator=generator)
    table = torch.randperm(num_pages, generator=generator).int().view(num_rows, 1, _COLUMNS)
    weights = torch.rand(num_rows, _HEADS * _GROUP, max(_SLOTS), generator=generator)
    rows = StatisticRows(
        step_rows=torch.arange(num_rows),
        table_rows=torch.arange(num_rows).flip(0),
        slots=torch.tensor(_SLOTS, dtype=torch.int32)[:, None],
        fresh=torch.ones(num_rows, dtype=torch.int32),
        max_slots=max(_SLOTS),
    )
    tally = AttentionStatistic(numbers, table, first_lane=0, count=count, heads=heads)
    backend.tally(tally, rows, 2 * weights / max(_SLOTS))  # some below 1 / seen, some above
    return numbers


def _moves_right(backend: AttentionBackend, dtype: torch.dtype) -> bool:
    """Return whether slots that exchange places are copied correctly."""
    pages = _NUMBERS.to(dtype).view(2, _HEADS, _PAGE_TOKENS, -1)
    ends = (torch.tensor([0, 1, 0]), torch.tensor([2, 5, 7]))
    onto = (torch.tensor([1, 0, 0]), torch.tensor([5, 7, 2]))
    expected, got = pages.clone(), pages.clone()
    ReferenceAttention().move(MovedSlots((expected,), ends, onto))
    backend.move(MovedSlots((got,), ends, onto))
    return torch.equal(got, expected)


def selects_right(backend: LaneSelector, device: torch.device) -> bool:
    """Return whether slots are ordered, selected by each kind of score, and moved correctly."""
    position = torch.tensor([[7, 1, 9], [4, 0, 5]], dtype=torch.int32, device=device)
    pages, held, keep, newest = (
        torch.tensor(numbers, dtype=torch.int32, device=device)
        for numbers in ([[1, 0]], [6], [3], [1])
    )
    lanes = HeldLanes(position, pages, held, 6)  # positions 4 0 5 7 1 9 by slot
    score = torch.tensor([[1, 3, 2, 2, 0, 0]], device=device)  # of the positions 0 1 4 5 7 9
    numbers = torch.tensor([[2, 3, 0], [2, 1, 2]], dtype=torch.float32, device=device)
    stored = StoredNumbers(numbers.view(2, 1, 3, 1), pages)
    by_score = SlotRanking(keep, 3, 3, newest=newest)
    ranked = [replace(by_score, score=score.to(dtype)) for dtype in (torch.float32, torch.float64)]
    ranked += [replace(by_score, numbers=stored), replace(by_score, score=score % 4 > 1)]
    ordered = backend.order_lanes(lanes)
    right = ordered is not None and ordered[1].tolist() == [[1, 4, 0, 2, 3, 5]]
    for ranking, gone in (
        (by_score, [0, 1, 4]),
        (ranked[0], [0, 5, 7]),
        (ranked[1], [0, 5, 7]),
        (ranked[2], [0, 5, 7]),
        (ranked[3], [0, 7, 9]),
    ):
        found = backend.select_lanes(lanes, ranking)
        right &= found is not None and found.evicted[0, 2:].tolist() == gone
        if found is not None:
            moved = position.clone()
            plane = moved[:, None, :, None]
            backend.move_lanes([plane], pages, found)
            left = moved[pages[0].long()].flatten()[:3].tolist()
            right &= sorted(left) == sorted({0, 1, 4, 5, 7, 9} - set(gone))
    return right


def _write_and_attend(
    backend: AttentionBackend, dtype: torch.dtype, *, joined: bool
) -> tuple[Tensor, Tensor]:
    """Write the newest slots and attend; return the output and the column sums in float32."""
    generator = torch.Generator().manual_seed(0)
    num_pages = len(_SLOTS) * _COLUMNS
    shape = (num_pages, 2, _HEADS, _PAGE_TOKENS, _HEAD_DIM)
    arena = torch.randn(shape, generator=generator).to(dtype)
    table = torch.randperm(num_pages, generator=generator).int().view(len(_SLOTS), 1, _COLUMNS)
    dim = (1 + joined) * _HEAD_DIM
    query = torch.randn(sum(_NEW_TOKENS), _HEADS * _GROUP, dim, generator=generator).to(dtype)
    pages = LayerPages(
        key=arena[:, 0],
        value=arena[:, 1],
        table=table,
        rows=torch.arange(len(_SLOTS)),
        first_lane=0,
        num_lanes=1,
    )
    newest = torch.cat(
        [torch.arange(slots - new, slots) for slots, new in zip(_SLOTS, _NEW_TOKENS, strict=True)]
    )
    row = torch.arange(len(_SLOTS)).repeat_interleave(torch.tensor(_NEW_TOKENS))
    page = table[row, 0, newest // _PAGE_TOKENS].long()
    fresh = (arena[page, 0, :, newest % _PAGE_TOKENS], arena[page, 1, :, newest % _PAGE_TOKENS])
    arena[page, :, :, newest % _PAGE_TOKENS] = 0
    places = (page[:, None], (newest % _PAGE_TOKENS)[:, None])
    backend.write(NewSlots(arena[:, 0], arena[:, 1], *places), *fresh)
    return _attend(backend, query, pages, fresh, arena[0].nbytes // _PAGE_TOKENS)


def _reads_right(native: NativeAttention, dtype: torch.dtype) -> bool:
    """Return whether the pages with the highest scores are read, and no others."""
    generator, rows = torch.Generator().manual_seed(0), len(_SLOTS)
    slots_and_bounds = (_PAGE_TOKENS, _PAGE_TOKENS, 2)  # vectors of each head in a page
    numbers = [_HEADS * count * _HEAD_DIM for count in slots_and_bounds]
    arena = torch.randn(rows * _COLUMNS, sum(numbers), generator=generator).to(dtype)
    key, value, bounds = (
        part.view(-1, _HEADS, count, _HEAD_DIM)
        for part, count in zip(torch.split(arena, numbers, dim=1), slots_and_bounds, strict=True)
    )
    bounds[:, :, 0], bounds[:, :, 1] = key.amin(dim=2), key.amax(dim=2)
    table = torch.randperm(rows * _COLUMNS, generator=generator).int().view(rows, 1, _COLUMNS)
    bounds = bounds.flatten(2)[:, :, None]
    pages = LayerPages(key, value, table, torch.arange(rows), 0, 1, bounds=bounds)
    query = torch.randn(rows, _HEADS * _GROUP, _HEAD_DIM, generator=generator).to(dtype)
    slots = np.array(_SLOTS, dtype=np.int32)[:, None]
    held = -(-slots // _PAGE_TOKENS)
    read = np.where(held > 3, np.int32(3), np.int32(0))
    kept = np.ones(rows, dtype=np.int32)
    lanes = LaneSlots(slots, None, SparseLanes(read, kept, kept))
    step, fresh = StepShape.of(kept), (query[:, :_HEADS], query[:, :_HEADS])
    math = AttentionMath(scale=_HEAD_DIM**-0.5)
    backends: tuple[AttentionBackend, ...] = (ReferenceAttention(), native)
    plans = (SparsePlan.of(backend, step, lanes, _PAGE_TOKENS, 1) for backend in backends)
    expected, got = (
        attend_planned(backend, plan, pages, math, query, fresh)
        for backend, plan in zip(backends, plans, strict=True)
    )
    return _near(got.float(), expected.float(), _TOLERANCES[dtype])


def _attend(
    backend: AttentionBackend,
    query: Tensor,
    pages: LayerPages,
    fresh: tuple[Tensor, Tensor],
    slot_bytes: int,
) -> tuple[Tensor, Tensor]:
    """Return the output and the column sums of the rows of `pages`."""
    rows = len(pages.rows)
    step = StepShape.of(np.array(_NEW_TOKENS[:rows], dtype=np.int32))
    lanes = LaneSlots(np.array(_SLOTS[:rows], dtype=np.int32)[:, None], None)
    plan = backend.plan(step, lanes, _PAGE_TOKENS, slot_bytes)
    sums = torch.zeros(rows, query.shape[1], max(_SLOTS))
    dim = query.shape[2]
    math = AttentionMath(scale=dim**-0.5, joined=dim > _HEAD_DIM)
    return backend.attend(plan, pages, math, query, fresh, column_sums=sums), sums


# ---- coded pages ---------------------------------------------------------------------------------


def _codes_right(native: AttentionBackend, name: str) -> bool:
    """Return whether the results are correct for a codec that the C library reads."""
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
    fresh = (query[:, :_HEADS], query[:, :_HEADS])  # unused, because attention uses the codes
    expected, expected_sums = _attend(ReferenceAttention(), query.float(), pages, fresh, 1)
    got, sums = _attend(native, query, pages, fresh, 1)
    return _near(got.float(), expected, _CODED_TOLERANCES[query.dtype]) and _near(
        sums, expected_sums, _CODED_TOLERANCES[torch.float32]
    )


def _in_pages(planes: list[Tensor]) -> tuple[Tensor, ...]:
    """Copy planes next to each other in pages, as in a page class."""
    starts = np.cumsum([0] + [-(-plane[0].nbytes // 4) * 4 for plane in planes])
    pages = torch.zeros(len(planes[0]), int(starts[-1]), dtype=torch.uint8)
    placed = []
    for plane, start in zip(planes, starts.tolist(), strict=False):
        part = pages[:, start : start + plane[0].nbytes].view(plane.dtype).view(plane.shape)
        placed.append(part.copy_(plane))
    return tuple(placed)
